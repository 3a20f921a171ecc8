"""Rules within a section, or of a section and the hardware that is named. They raise ConfigError."""

from __future__ import annotations

import re

from jtrain.config.schema import Config, LoraConfig
from jtrain.errors import ConfigError


def check_lora(config: Config) -> None:
    """Adapters without a rank, or without a base."""
    section, default = config.model.lora, LoraConfig()
    if section.path is not None and config.model.path is None:
        raise ConfigError(
            f"model.lora.path: {section.path} without model.path: it is an adapter of another model's weights",
            "Write model.path: with the folder of its base.",
        )
    for field in LoraConfig.model_fields:
        value = getattr(section, field)
        if not section.rank and section.path is None and value != getattr(default, field):
            frozen = " (a frozen model without adapters trains nothing)" if field == "base" else ""
            raise ConfigError(
                f"model.lora.{field}: {value!r} with model.lora.rank: 0, which is no adapter{frozen}",
                "Write model.lora.rank: 8 (or another), or leave the section out.",
            )
    if section.rank and not section.targets:
        raise ConfigError("model.lora.targets: empty: nothing would be trained", "Write all-linear, or names (q_proj).")


def check_processes(config: Config) -> None:
    """Numbers of processes, and addresses."""
    distributed = config.distributed
    count, number = distributed.num_processes, distributed.process_id
    if number is not None and count is not None and number >= count:
        raise ConfigError(
            f"distributed.process_id: {number} of {count} processes", f"They are numbered from 0 to {count - 1}."
        )
    if count is not None and isinstance(config.devices, int) and config.devices % count:
        raise ConfigError(
            f"devices: {config.devices} over {count} processes leave a remainder",
            f"Write devices: {-(-config.devices // count) * count}.",
        )
    for field in ("coordinator_address", "bind_address"):
        address = getattr(distributed, field)
        port = re.fullmatch(r".+:(\d{1,5})", address or "")
        if address is not None and (port is None or not 0 < int(port[1]) < 2**16):
            raise ConfigError(
                f"distributed.{field}: {address!r} is no host with a port", "Write host:port, as in 10.0.0.1:8476."
            )


def check_patterns(config: Config) -> None:
    """Regular expressions of parameter paths."""
    patterns = [("decay_rules", pattern) for pattern, _ in config.optimizer.decay_rules]
    patterns += [("freeze", pattern) for pattern in config.optimizer.freeze]
    for field, pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"optimizer.{field}: {pattern!r} is not a pattern: {error}", "Write a Python regular expression."
            ) from None


def check_data(config: Config) -> None:
    """Weights of a mixture, and what early stopping needs."""
    data = config.data
    if data.weights and len(data.weights) != len(data.train):
        raise ConfigError(
            f"data.weights: {len(data.weights)} weights for {len(data.train)} entries of data.train",
            "Give every entry a weight, or none.",
        )
    # Without data.train the data comes from Python, and so may the evaluation data.
    if config.eval.early_stopping_patience and data.train and data.eval is None:
        raise ConfigError(
            f"eval.early_stopping_patience: {config.eval.early_stopping_patience} without evaluation data",
            "Write data.eval: a path, or a fraction such as 0.1.",
        )
    if config.eval.early_stopping_patience and config.checkpoint.best is None:
        raise ConfigError(
            f"eval.early_stopping_patience: {config.eval.early_stopping_patience} without checkpoint.best",
            "Write checkpoint.best: eval_loss.",
        )


def check_hardware(config: Config) -> None:
    """What an accelerator that is named does not have."""
    accelerator = config.accelerator
    if config.precision == "64-true" and accelerator in ("gpu", "tpu"):
        raise ConfigError(
            f"precision: 64-true on {accelerator}", "Write accelerator: cpu (it is for tests), or 32-true."
        )
    for field in ("offload_optimizer", "offload_parameters"):
        if getattr(config.sharding, field) and accelerator == "cpu":
            raise ConfigError(f"sharding.{field}: true on cpu, which has one memory", "Leave it out.")
    for field, kinds in (("attention", {"splash": "tpu", "cudnn": "gpu"}), ("expert_kernel", {"megablox": "tpu"})):
        kernel = getattr(config.model, field)
        needs = kinds.get(kernel, accelerator)
        if accelerator not in ("auto", needs):
            raise ConfigError(
                f"model.{field}: {kernel} on {accelerator}: it runs on {needs}", f"Write model.{field}: auto."
            )
