"""Rules across fields that need numbers only: mesh, batch, lengths. They fail before any device is touched.

Rules that need the model's shape stand with the task; those that need devices, with the mesh.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, NamedTuple

from jtrain.config import ladder
from jtrain.config.contrastive_rules import check_contrastive
from jtrain.config.distill_rules import check_distill
from jtrain.config.mesh_rules import AXES, BATCH_AXES, data_ranks, mesh_numbers, mesh_text
from jtrain.config.names import nearest
from jtrain.config.preference_rules import check_dpo
from jtrain.config.role_rules import check_role_options, check_roles, policy_sizes
from jtrain.config.schema import Config, MeshConfig
from jtrain.config.section import DURATION, Duration
from jtrain.config.section_rules import check_data, check_hardware, check_lora, check_patterns, check_processes
from jtrain.config.task_defaults import check_task
from jtrain.errors import ConfigError

DEFAULT_GLOBAL_BATCH = 32
DEFAULT_EPOCHS = 1.0


class BatchSize(NamedTuple):
    """global_ = per_device * data ranks * accumulation."""

    global_: int
    per_device: int
    accumulation: int


def check(config: Config) -> Config:
    """The config with its defaults across fields filled in, or the first contradiction in it.

    Raises:
      ConfigError: fields that contradict each other, or a value that is not built yet.
    """
    check_task(config)
    check_dpo(config)
    check_distill(config)
    check_contrastive(config)
    check_role_options(config)
    config = apply_strategy(_length(config))
    mesh_numbers(config.mesh)
    _axes_exist(config)
    check_processes(config)
    check_patterns(config)
    check_data(config)
    check_hardware(config)
    ladder.check(config)
    _schedule(config)
    if config.checkpoint.init_from and isinstance(config.checkpoint.resume, int):
        raise ConfigError(
            f"checkpoint.resume: {config.checkpoint.resume} beside checkpoint.init_from",
            "init_from starts a new run, resume continues one: keep one of them.",
        )
    _across_slices(config)
    _context_kernel(config)
    check_lora(config)
    if isinstance(config.devices, int):
        mesh = policy_sizes(config, config.devices)
        check_context_length(config, mesh["context"])
        check_slices(config, mesh)
        size = resolve_batch(config, data_ranks(mesh))
        check_roles(config, config.devices, size.per_device * data_ranks(mesh))
    else:
        check_context_length(config, max(config.mesh.context, 1))
        _batch_numbers(config)
    return config


# -- length of the run ------------------------------------------------------------------------------------------------


def _length(config: Config) -> Config:
    steps, epochs = config.max_steps, config.num_train_epochs
    if steps is not None and epochs is not None:
        raise ConfigError(
            f"max_steps: {steps} beside num_train_epochs: {epochs:g}", "One length is enough: leave one of them out."
        )
    if steps is None and epochs is None:
        return config.model_copy(update={"num_train_epochs": DEFAULT_EPOCHS})
    if isinstance(steps, float) or (isinstance(steps, str) and steps.endswith("%")):
        raise ConfigError(f"max_steps: {steps} is a share of itself", "Write steps (1000), `2 epochs` or `1e9 tokens`.")
    if steps is not None and _parsed(steps)[0] == 0:
        raise ConfigError(f"max_steps: {steps} trains nothing", "Write a number above 0, `2 epochs` or `1e9 tokens`.")
    return config


def _parsed(duration: Duration) -> tuple[Fraction, str]:
    """Number and unit (empty, `%`, `epoch`, `token`) of a length."""
    match = DURATION.fullmatch(str(duration))
    assert match is not None  # the schema let it through
    return Fraction(match["number"]), (match["unit"] or "").rstrip("s")


def resolve_steps(
    duration: Duration,
    total: int | None = None,
    *,
    tokens_per_step: int | None = None,
    steps_per_epoch: float | Fraction | None = None,
) -> int:
    """The number of optimizer steps that a length means, rounded up.

    Args:
      duration: steps, a ratio below 1, or a text: `5%`, `2 epochs`, `1e9 tokens`.
      total: steps of the run, for ratios and percent.
      tokens_per_step: tokens of a step (global batch * max_length).
      steps_per_epoch: steps of a pass over the training data; may be a fraction.

    Raises:
      ConfigError: the length counts in something that is not known here.
    """
    if isinstance(duration, int):
        return duration
    number, unit = _parsed(duration)  # exact: 0.1 of 30 is 3, where floats give 3.0000000000000004, hence 4
    if unit in ("", "%"):
        return math.ceil(number / (100 if unit else 1) * _known(total, duration, "the run's steps"))
    if unit == "epoch":
        return math.ceil(number * Fraction(_known(steps_per_epoch, duration, "the size of an epoch")))
    return math.ceil(number / _known(tokens_per_step, duration, "the tokens of a step"))


def _known(value: Any, duration: Duration, what: str) -> Any:
    if value is None:
        raise ConfigError(f"{duration!r} needs {what}, which is not known here", "Write a number of steps.")
    return value


def _schedule(config: Config) -> None:
    if config.schedule.name != "wsd" or not isinstance(config.max_steps, int):
        return
    lengths = (config.schedule.warmup_steps, config.schedule.decay_steps)
    if any(isinstance(length, str) and not length.endswith("%") for length in lengths):
        return  # epochs and tokens are known when the data is
    warmup, decay = (resolve_steps(length, config.max_steps) for length in lengths)
    if warmup + decay > config.max_steps:
        raise ConfigError(
            f"schedule: {warmup} warmup_steps + {decay} decay_steps = {warmup + decay} > max_steps {config.max_steps}",
            "Shorten one of them.",
        )


# -- mesh -------------------------------------------------------------------------------------------------------------


def apply_strategy(config: Config) -> Config:
    """The config with the mesh and sharding that its `strategy` stands for; idempotent.

    Raises:
      ConfigError: the mesh or sharding says something else.
    """
    strategy = config.strategy
    if strategy is None:
        return config
    zero3 = strategy in ("zero3", "fsdp")
    mesh = MeshConfig(data=1 if zero3 else -1, fsdp=-1 if zero3 else 1, slices=config.mesh.slices)
    said = {axis: getattr(config.mesh, axis) for axis in AXES}
    if said not in ({axis: getattr(mesh, axis) for axis in AXES}, {axis: getattr(MeshConfig(), axis) for axis in AXES}):
        raise ConfigError(
            f"strategy: {strategy} stands for mesh {mesh_text(mesh)}, and the mesh is {mesh_text(config.mesh)}",
            "Leave out strategy, or the mesh.",
        )
    update = {}
    for field, value in (
        ("optimizer_axes", ("data",) if strategy in ("zero1", "zero2") else ()),
        ("gradient_axes", ("data",) if strategy == "zero2" else ()),
    ):
        given = getattr(config.sharding, field)
        if given not in ((), value):
            raise ConfigError(
                f"sharding.{field}: {list(given)} beside strategy: {strategy}, which makes it {list(value)}",
                "Leave out one of them.",
            )
        update[field] = value
    return config.model_copy(update={"mesh": mesh, "sharding": config.sharding.model_copy(update=update)})


def slices_by_themselves(config: Config) -> str | None:
    """The `dcn` field that makes slices compute gradients by themselves, as `dcn.local_steps: 50`; None: none does."""
    dcn = config.dcn
    if dcn.local_steps > 1:
        return f"dcn.local_steps: {dcn.local_steps}"
    return None if dcn.compression == "none" else f"dcn.compression: {dcn.compression}"


def _across_slices(config: Config) -> None:
    """What `dcn` asks of the other sections, whatever the number of devices."""
    field = slices_by_themselves(config)
    if field is None:
        return
    if config.mesh.slices == 1:
        raise ConfigError(
            f"{field} with mesh.slices: 1: there is no slow network", "Write mesh.slices, or leave the dcn section out."
        )
    sharding = config.sharding
    named = {"optimizer_axes": sharding.optimizer_axes, "gradient_axes": sharding.gradient_axes}
    named |= {f"rules.{name}": axes for name, axes in sharding.rules.items() if name != "batch"}
    for name, axes in named.items():
        if "data" in axes:
            raise ConfigError(
                f"{field} with data in sharding.{name}: {list(axes)}: whole arrays would cross the slow network "
                "beside the gradients",
                "Divide them inside a slice: write fsdp in place of data (and leave strategy out).",
            )
    if sharding.rules.get("batch", BATCH_AXES)[:1] != ("data",):
        raise ConfigError(
            f"{field} with sharding.rules.batch: {list(sharding.rules['batch'])}: a slice has no rows of its own",
            "Begin sharding.rules.batch with data.",
        )


def check_slices(config: Config, sizes: dict[str, int]) -> None:
    """Sees that `data` is the slow network and nothing else where slices compute by themselves.

    Args:
      config: the config.
      sizes: of all mesh axes.

    Raises:
      ConfigError: it is not; the message names the mesh that divides a slice by `fsdp` instead.
    """
    field, slices = slices_by_themselves(config), config.mesh.slices
    if field is None:
        return
    if sizes["pipeline"] > 1:
        raise ConfigError(
            f"{field} with mesh.pipeline: {sizes['pipeline']}: the pipeline adds the gradients of all slices itself",
            "Write mesh.pipeline: 1, or leave the dcn section out.",
        )
    if sizes["data"] == slices:
        return
    near = sizes | {"data": slices, "fsdp": sizes["data"] * sizes["fsdp"] // slices}
    raise ConfigError(
        f"{field}: mesh.data={sizes['data']} is not mesh.slices={slices}, and the slow network has to be an axis "
        "of its own",
        f"Write mesh: {mesh_text(near)},slices={slices}" + (" and leave strategy out." if config.strategy else "."),
    )


def _axes_exist(config: Config) -> None:
    named = [("optimizer_axes", config.sharding.optimizer_axes), ("gradient_axes", config.sharding.gradient_axes)]
    named += [(f"rules.{name}", axes) for name, axes in config.sharding.rules.items()]
    for field, axes in named:
        for axis in axes:
            if axis not in AXES:
                meant = nearest(axis, AXES)
                raise ConfigError(
                    f"sharding.{field}: {axis!r} is not a mesh axis",
                    f"Did you mean {meant}?" if meant else f"Mesh axes: {', '.join(AXES)}.",
                )
        if len(set(axes)) != len(axes):
            raise ConfigError(f"sharding.{field}: {list(axes)} names an axis twice", "Name it once.")


# -- context ----------------------------------------------------------------------------------------------------------


def check_context_length(config: Config, context: int) -> None:
    """Sees that rows can be cut for `context` devices.

    Raises:
      ConfigError: they can't; the message names the nearest lengths.
    """
    zigzag = context > 1 and config.context.layout == "zigzag" and config.context.method != "ulysses"
    unit, length = 2 * context if zigzag else context, config.max_length
    if length % unit:
        below, above = length // unit * unit, -(-length // unit) * unit
        chunks = f"2 x {context} mesh.context = {unit} chunks" if zigzag else f"{context} mesh.context"
        other = ", or context.layout: contiguous" if zigzag and length % context == 0 else ""
        raise ConfigError(
            f"max_length: {length} / {chunks} = {length / unit:.4g} tokens, not a whole number",
            f"Write max_length: {f'{below} or {above}' if below else above}{other}.",
        )


def _context_kernel(config: Config) -> None:
    kernel = config.model.attention
    if config.mesh.context != 1 and config.context.method == "ring" and kernel in ("splash", "cudnn"):
        raise ConfigError(
            f"model.attention: {kernel} with context.method: ring: it needs whole rows, and under the ring no device "
            "has one",
            "Write model.attention: auto, or context.method: ulysses.",
        )


# -- batch ------------------------------------------------------------------------------------------------------------


def resolve_batch(config: Config, data_ranks: int) -> BatchSize:
    """Global batch, rows of a micro-batch on one data-parallel rank, and micro-batches of a step.

    Any two of the three give the third. One alone is completed by accumulation 1; none, by 32 rows as well.

    Args:
      config: the config.
      data_ranks: data * fsdp * expert.

    Raises:
      ConfigError: they contradict each other or leave a remainder; the message shows the arithmetic.
    """
    total, rows, accumulation = _batch_fields(config)
    if rows is not None and total is not None and accumulation is None:
        return BatchSize(total, rows, _divide("gradient_accumulation_steps", total, rows, data_ranks))
    accumulation = accumulation or 1
    if rows is None:
        total = total or DEFAULT_GLOBAL_BATCH
        return BatchSize(total, _divide("per_device_batch_size", total, accumulation, data_ranks), accumulation)
    product = rows * data_ranks * accumulation
    if total is not None and total != product:
        raise ConfigError(
            f"global_batch_size: {total} is not {rows} per_device_batch_size x {data_ranks} data ranks x "
            f"{accumulation} gradient_accumulation_steps = {product}",
            "Give two of the three, the third follows.",
        )
    return BatchSize(product, rows, accumulation)


def _batch_fields(config: Config) -> tuple[int | None, int | None, int | None]:
    return config.global_batch_size, config.per_device_batch_size, config.gradient_accumulation_steps


def _divide(field: str, total: int, known: int, ranks: int) -> int:
    if total % (known * ranks):
        other = "per_device_batch_size" if field == "gradient_accumulation_steps" else "gradient_accumulation_steps"
        unit = known * ranks
        below, above = total // unit * unit, -(-total // unit) * unit
        near = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            f"global_batch_size: {total} / ({ranks} data ranks x {known} {other}) = {total / unit:.4g} {field}, "
            "not a whole number",
            f"Write global_batch_size: {near}.",
        )
    return total // (known * ranks)


def _batch_numbers(config: Config) -> None:
    """What is wrong with any number of data ranks; the rest waits for the devices."""
    total, rows, accumulation = _batch_fields(config)
    product = (rows or 1) * (accumulation or 1)
    if total is not None and total % product:
        _divide("data ranks", total, product, 1) if rows and accumulation else resolve_batch(config, 1)
