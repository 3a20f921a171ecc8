"""What a task chooses where nobody does, in one table; the values are TRL's.

Flag > environment > file > task > default. Also here: which fields only some tasks read; set under another task they
are an error, not a line without effect.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from jtrain.config.layers import Layer
from jtrain.config.schema import Config
from jtrain.config.section import Section
from jtrain.errors import ConfigError


class TaskDefault(NamedTuple):
    """A value that a task has for a field.

    Attributes:
      path: the field.
      value: what it is where no layer sets it.
      why: in a few words, for the log.
      unless: fields that say the same thing another way: with one of them set, this default is none.
      when: a field that must be set for it; None: always. The first entry of a field that holds counts.
    """

    path: str
    value: Any
    why: str
    unless: tuple[str, ...] = ()
    when: str | None = None


_TRL = "TRL's default"
_BATCH = ("per_device_batch_size", "gradient_accumulation_steps")
FINE_TUNING: tuple[TaskDefault, ...] = (
    TaskDefault("optimizer.weight_decay", 0.0, _TRL),
    TaskDefault("optimizer.beta2", 0.999, _TRL),
    TaskDefault("schedule.name", "linear", _TRL),
    TaskDefault("schedule.warmup_steps", 0, _TRL),
    TaskDefault("schedule.min_ratio", 0.0, _TRL),
    TaskDefault("num_train_epochs", 3.0, _TRL, unless=("max_steps",)),
    TaskDefault("per_device_batch_size", 8, f"{_TRL}; rows of a data-parallel rank", unless=("global_batch_size",)),
    TaskDefault("precision", "auto", "bf16-mixed where the hardware has it, as TRL's bf16"),
)
"""What the tasks that tune a model on examples share."""

TASK_DEFAULTS: dict[str, tuple[TaskDefault, ...]] = {
    "pretrain": (),
    "sft": (
        TaskDefault("run_dir", "runs/sft", "named after the task"),
        TaskDefault(
            "optimizer.learning_rate", 1e-4, "adapters take a higher rate (TRL's advice)", when="model.lora.rank"
        ),
        TaskDefault("optimizer.learning_rate", 2e-5, _TRL),
        *FINE_TUNING,
        TaskDefault("data.packing", "none", f"{_TRL}: one example a row, padded to the next bucket of lengths"),
    ),
    "dpo": (
        TaskDefault("run_dir", "runs/dpo", "named after the task"),
        TaskDefault(
            "optimizer.learning_rate", 1e-5, "adapters take a higher rate (TRL's advice)", when="model.lora.rank"
        ),
        TaskDefault("optimizer.learning_rate", 1e-6, _TRL),
        *FINE_TUNING,
        TaskDefault("data.packing", "none", "one pair a row, padded to the next bucket of lengths"),
    ),
    "reward": (
        TaskDefault("run_dir", "runs/reward", "named after the task"),
        TaskDefault(
            "optimizer.learning_rate", 1e-3, "adapters take a higher rate (TRL's advice)", when="model.lora.rank"
        ),
        TaskDefault("optimizer.learning_rate", 1e-4, _TRL),
        *FINE_TUNING,
        TaskDefault("data.packing", "none", "one pair a row, padded to the next bucket of lengths"),
    ),
    "distill": (
        TaskDefault("run_dir", "runs/distill", "named after the task"),
        TaskDefault(
            "optimizer.learning_rate", 1e-4, "adapters take a higher rate (TRL's advice)", when="model.lora.rank"
        ),
        TaskDefault("optimizer.learning_rate", 2e-5, "that of SFT, as in TRL's GKD"),
        *FINE_TUNING,
        TaskDefault("data.packing", "none", f"{_TRL}: one example a row, padded to the next bucket of lengths"),
    ),
    "contrastive": (
        TaskDefault("run_dir", "runs/contrastive", "named after the task"),
        TaskDefault("model.preset", "clip-tiny", "a model of images and texts", unless=("model.path",)),
        TaskDefault("optimizer.learning_rate", 1e-5, "weights that are loaded are tuned", when="model.path"),
        TaskDefault("optimizer.learning_rate", 5e-4, "CLIP's"),
        TaskDefault("optimizer.beta2", 0.98, "CLIP's"),
        TaskDefault("optimizer.eps", 1e-6, "CLIP's"),
        TaskDefault(
            "optimizer.decay_rules",
            ((r".*(norm|bias|logit_scale).*", 0.0), (r".*", 1.0)),
            "CLIP's: the scale of the scores does not decay",
        ),
        TaskDefault("schedule.min_ratio", 0.0, "CLIP's"),
        TaskDefault("global_batch_size", 256, "every other pair of the batch is a negative", _BATCH),
        TaskDefault("precision", "auto", "bf16-mixed where the hardware has it"),
        TaskDefault("data.packing", "none", "an image with its text is a row"),
    ),
}

READ_BY: dict[str, tuple[str, ...]] = {
    "sft": ("sft", "distill"),
    "dpo": ("dpo",),
    "reward": ("reward",),
    "distill": ("distill",),
    "contrastive": ("contrastive",),
    "loss.label_smoothing": ("pretrain", "sft"),
    "loss.z_loss": ("pretrain", "sft"),
    "roles.reference": ("dpo",),
    "roles.teacher": ("distill",),
    **dict.fromkeys(
        ("eval.metrics", "eval.metric_examples", "eval.max_new_tokens", "eval.num_samples"), ("sft", "distill")
    ),
    "eval.sample_prompts": ("pretrain", "sft", "dpo", "distill"),
    "data.truncation": ("sft", "dpo", "distill"),
    "data.chat_template": ("sft", "dpo", "reward", "distill"),
    "data.buckets": ("sft", "dpo", "reward", "distill"),
    **dict.fromkeys(
        (
            "data.append_eos",
            "data.prepend_bos",
            "data.weights",
            "data.cache_dir",
            "data.on_bad_record",
            "data.max_bad_records",
            "loss",
            "model.lora",
            "context",
        ),
        ("pretrain", "sft", "dpo", "reward", "distill"),
    ),
}
"""Fields and sections that some tasks read, and these."""


def defaults_of(layer: Layer) -> list[TaskDefault]:
    """The entries of the table that hold for the settings in a layer, which is all of them but the defaults."""
    found: dict[str, TaskDefault] = {}
    for default in TASK_DEFAULTS.get(str(layer.values.get("task", "pretrain")), ()):
        given = [path for path in default.unless if layer.values.get(path) is not None]
        holds = default.when is None or layer.values.get(default.when)
        if default.path not in layer.values and not given and holds:
            found.setdefault(default.path, default)
    return list(found.values())


def with_task_defaults(layer: Layer) -> Layer:
    """The layer with its task's defaults under it."""
    defaults = defaults_of(layer)
    origin = f"the default of task {layer.values.get('task', 'pretrain')}"
    return Layer(
        {default.path: default.value for default in defaults} | layer.values,
        {default.path: f"{default.path} ({origin})" for default in defaults} | layer.origin,
        layer.replaced,
    )


def check_task(config: Config) -> None:
    """Sees that no field is set that the task does not read.

    Raises:
      ConfigError: one is; also for a packing that the task does not have.
    """
    plain = Config()
    for path, tasks in READ_BY.items():
        value, default = (functools.reduce(getattr, path.split("."), c) for c in (config, plain))
        if config.task not in tasks and value != default:
            shown = "" if isinstance(value, Section) else f": {value!r}"
            raise ConfigError(
                f"{path}{shown} with task: {config.task}, which does not read it",
                f"Leave it out, or write task: {' or '.join(tasks)}.",
            )
    data = config.data
    if config.task == "pretrain" and data.packing == "best_fit_split":
        raise ConfigError(
            "data.packing: best_fit_split with task: pretrain, which cuts long documents under best_fit, too",
            "Write data.packing: best_fit.",
        )
    if data.buckets and data.packing != "none":
        raise ConfigError(
            f"data.buckets: {list(data.buckets)} with data.packing: {data.packing}, whose rows are full",
            "Write data.packing: none, or leave data.buckets out.",
        )
    if data.buckets and max(data.buckets) > config.max_length:
        raise ConfigError(
            f"data.buckets: {max(data.buckets)} is over max_length: {config.max_length}",
            f"Write lengths up to {config.max_length}.",
        )
