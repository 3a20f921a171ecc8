"""The compiled heart of a run: mesh, model, optimizer, layout and the jitted step, built from a config.

Needs no data and allocates nothing: the same function serves a run on real devices and the compilation of a step for
hardware that is not here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from jtrain.checkpoint import arrays
from jtrain.config.role_rules import own_devices, policy_sizes
from jtrain.config.rules import apply_strategy, check_slices, resolve_batch, resolve_steps, slices_by_themselves
from jtrain.config.schema import Config
from jtrain.errors import ConfigError
from jtrain.ops.context import ContextOptions
from jtrain.parallel.mesh import data_ranks, make_mesh
from jtrain.parallel.pipeline.layout import auto_microbatches
from jtrain.parallel.pipeline.schedule import choose_schedule
from jtrain.parallel.sharding import Rules, make_rules, pipeline_rules
from jtrain.parallel.xla import options_of_run
from jtrain.train.across_slices import AcrossSlices, Exchange, gradients_of_slices
from jtrain.train.adapters import BaseWeights, has_adapters
from jtrain.train.gradients import GradientFn, accumulated_gradients
from jtrain.train.local_steps import make_local_step
from jtrain.train.loss import LossFn
from jtrain.train.model import FunctionalModel, ModelFactory, functional_model
from jtrain.train.optimizers import make_optimizer, parameter_paths, trainable_mask
from jtrain.train.pipelined import Pipeline, pipelined_gradients, pipelined_loss
from jtrain.train.precision import Precision, precision_policy
from jtrain.train.schedules import Schedule, make_schedule
from jtrain.train.spikes import NumbersRule
from jtrain.train.state import StatePlan, TrainState, init_state, plan_state, select
from jtrain.train.step import StepHook, make_eval_step, make_forward, make_train_step


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """Rows of a step: `total` = `accumulation` micro-batches of `rows` rows, divided over the data-parallel ranks."""

    total: int
    rows: int
    accumulation: int


@dataclasses.dataclass(frozen=True)
class Program:
    """What a config compiles to.

    Attributes:
      config: with its strategy written out as mesh and sharding.
      train_step: jitted `(state, batch) -> (state, metrics)`.
      eval_step: jitted `(params, variables, batch) -> Loss`.
      batch_sharding: of every array [A, b, ...] of a batch.
      pipeline: how the step is pipelined; None without stages.
      loss_fn: the loss.
      gradients: of a batch, as the step takes them; None with local steps, where every slice has parameters of its own.
    """

    config: Config
    mesh: Mesh
    rules: Rules
    precision: Precision
    model: FunctionalModel
    tx: optax.GradientTransformation
    schedule: Schedule | None
    plan: StatePlan
    batch: BatchShape
    train_step: Any
    eval_step: Any
    batch_sharding: NamedSharding
    pipeline: Pipeline | None = None
    loss_fn: Any = None
    gradients: GradientFn | None = None

    def init(self) -> TrainState:
        """The initial state, in its shards."""
        return init_state(self.model, self.tx, self.plan, seed=self.config.seed)

    def forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Jits `function(module, *arguments)` as `forward(params, variables, *arguments)`; see `make_forward`."""
        return make_forward(self.model, self.plan, function, compiler_options=_options(self.config, self.mesh))

    def init_from(self, source: str) -> TrainState:
        """The initial state with what a run or checkpoint has learned in place of what would be drawn.

        That is its parameters, and what its model keeps beside them where this model keeps it as well. A model with
        adapters takes those of another run with adapters, or a plain one's as its base.

        Raises:
          CheckpointError: it holds no intact checkpoint, or one of another model.
        """
        from jtrain.checkpoint.parameters import saved_parameters

        if has_adapters(parameter_paths(self.model.params)) and not has_adapters(saved_parameters(source)):
            return self.init_with(_Checkpoint(source, cast=True))
        return self._begin_with(_Checkpoint(source))

    def init_with(self, weights: InitialWeights) -> TrainState:
        """The initial state with loaded weights in place of those that would be drawn.

        Of a model with adapters they are the base: cast or quantised as the run has them, with adapters that are drawn.

        Raises:
          JtrainError: what loading them raises.
        """
        if has_adapters(parameter_paths(self.model.params)):
            weights = BaseWeights(weights, self.model, self.plan)
        return self._begin_with(weights)

    def _begin_with(self, weights: InitialWeights) -> TrainState:
        wanted = arrays.flatten(self.plan.abstract.params)
        rest = arrays.unflatten(self.plan.abstract.params, {path: not weights.fills(path) for path in wanted})
        fresh = init_state(self.model, self.tx, self.plan, seed=self.config.seed, drawn=rest)
        drawn = arrays.flatten(fresh.params)
        loaded, variables = weights.load(
            {path: leaf for path, leaf in wanted.items() if path not in drawn}, arrays.flatten(fresh.variables)
        )
        params = arrays.unflatten(self.plan.abstract.params, drawn | loaded)
        ema = self.plan.abstract.ema
        if ema is not None:  # a copy: the step donates both, and a buffer can be given away once
            trained = select(params, self.plan.trainable)
            ema = jax.tree.map(lambda p, e: jax.device_put(jnp.array(p, e.dtype), e.sharding), trained, ema)
        across = None
        if self.plan.across is not None:
            across = jax.jit(self.plan.across.begin, out_shardings=self.plan.shardings.across)(params)
        kept = arrays.unflatten(fresh.variables, variables)
        return dataclasses.replace(fresh, params=params, variables=kept, ema=ema, across=across)


class InitialWeights(Protocol):
    """Weights that a run begins with; paths are those of the flattened trees (`layers/attention/q_proj/kernel`)."""

    def fills(self, path: str) -> bool:
        """Whether `load` brings this parameter; the others are drawn."""
        ...

    def load(self, params: dict[str, Any], variables: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Parameters in the types and shardings that are asked for; variables, by default those that are given."""
        ...


@dataclasses.dataclass(frozen=True)
class _Checkpoint:
    """Weights from a run's newest intact checkpoint, or from one checkpoint."""

    source: str
    cast: bool = False

    def fills(self, path: str) -> bool:
        return True

    def load(self, params: dict[str, Any], variables: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        from jtrain.checkpoint.parameters import load_parameters, load_variables

        params = load_parameters(self.source, params, cast=self.cast)
        return params, load_variables(self.source, variables)


def mesh_and_batch(config: Config, devices: Sequence[jax.Device]) -> tuple[Config, Mesh, BatchShape]:
    """The config with its strategy written out, the mesh over `devices` (but those of roles), and the batch on it."""
    config = apply_strategy(config)
    policy_sizes(config, len(devices))  # its message knows of the roles' devices
    mesh = make_mesh(config.mesh, devices=devices[: len(devices) - own_devices(config, len(devices))])
    check_slices(config, dict(mesh.shape))
    size = resolve_batch(config, data_ranks(mesh))
    config = config.model_copy(update={"global_batch_size": size.global_})  # what a resume is compared with
    return config, mesh, BatchShape(size.global_, size.per_device * data_ranks(mesh), size.accumulation)


def build_program(
    config: Config,
    model: ModelFactory | Any,
    loss_fn: LossFn,
    *,
    mesh: Mesh,
    batch: BatchShape,
    max_steps: int,
    tokens_per_step: int | None = None,
    steps_per_epoch: float | Fraction | None = None,
    optimizer: optax.GradientTransformation | None = None,
    step_hook: StepHook | None = None,
) -> Program:
    """Builds the program of a run.

    Args:
      config: as `mesh_and_batch` returns it.
      model: module class, function of `rngs`, or module.
      loss_fn: the loss.
      mesh: the mesh; its devices need not exist on this machine.
      batch: as `mesh_and_batch` returns it.
      max_steps: N, the updates of the run.
      tokens_per_step: for schedule lengths in tokens.
      steps_per_epoch: for schedule lengths in epochs.
      optimizer: any optax chain, in place of `config.optimizer` and `config.schedule`.
      step_hook: traced into the step before clipping.
    """
    split = functional_model(model)
    device = mesh.devices.flat[0]
    precision = precision_policy(config.precision, device, config.fp8)
    if config.sharding.offload_optimizer or config.sharding.offload_parameters:
        _check_offload(device)
    rules = make_rules(config.sharding.rules)
    pipeline = pipeline_of(config, mesh, batch)
    if pipeline is not None:
        rules = pipeline_rules(rules, pipeline.chunks)
    trainable = trainable_mask(split.params, config.optimizer.freeze, split.has("frozen"))
    schedule: Schedule | None = None
    if optimizer is None:
        section = config.schedule

        def steps(value: Any) -> int:
            return resolve_steps(value, max_steps, tokens_per_step=tokens_per_step, steps_per_epoch=steps_per_epoch)

        schedule = make_schedule(
            section.name,
            peak=config.optimizer.learning_rate,
            total=max_steps,
            warmup=steps(section.warmup_steps),
            min_ratio=section.min_ratio,
            decay=steps(section.decay_steps),
        )
        names = jax.tree.map(lambda keep, n: n if keep else None, trainable, split.names)
        optimizer = make_optimizer(config.optimizer, schedule, select(split.params, trainable), names)
    rule = NumbersRule.of(config.faults)
    plan = plan_state(
        split,
        optimizer,
        mesh,
        rules,
        precision,
        trainable=trainable,
        optimizer_axes=config.sharding.optimizer_axes,
        gradient_axes=config.sharding.gradient_axes,
        offload_optimizer=config.sharding.offload_optimizer,
        offload_parameters=config.sharding.offload_parameters,
        ema=config.optimizer.ema_decay > 0,
        numbers=rule,
        context=ContextOptions(config.context.method, config.context.layout),
    )
    options = _options(config, mesh)
    keywords: dict[str, Any] = {
        "seed": config.seed,
        "schedule": schedule,
        "max_grad_norm": config.optimizer.max_grad_norm,
        "nonfinite": config.faults.nonfinite,
        "numbers": rule,
        "ema_decay": config.optimizer.ema_decay,
        "compiler_options": options,
    }
    if slices_by_themselves(config):
        exchange = Exchange(plan, config.dcn, split.names)
        plan = AcrossSlices(exchange, config.seed).extend(plan)
        keywords["exchange"] = exchange
    if config.dcn.local_steps > 1:
        if step_hook is not None:
            raise ConfigError(
                f"step_hook with dcn.local_steps: {config.dcn.local_steps}: every slice has a gradient of its own",
                "leave out step_hook, or write dcn.local_steps: 1",
            )
        gradients = None
        train_step = make_local_step(split, loss_fn, optimizer, plan, **keywords)
    else:
        gradients = accumulated_gradients(split, loss_fn, plan)
        if slices_by_themselves(config):
            gradients = gradients_of_slices(gradients, plan)
        if pipeline is not None:
            gradients = pipelined_gradients(split, loss_fn, plan, pipeline)
        keywords["gradients"] = gradients
        train_step = make_train_step(split, loss_fn, optimizer, plan, step_hook=step_hook, **keywords)
    batch_loss = None if pipeline is None else pipelined_loss(split, loss_fn, plan, pipeline)
    eval_step = make_eval_step(split, loss_fn, plan, batch_loss=batch_loss, compiler_options=options)
    return Program(
        config, mesh, rules, precision, split, optimizer, schedule, plan, batch, train_step, eval_step,
        plan.batch_sharding, pipeline, loss_fn, gradients,
    )  # fmt: skip


def pipeline_of(config: Config, mesh: Mesh, batch: BatchShape) -> Pipeline | None:
    """How the step is pipelined; None on a mesh without stages.

    Raises:
      ConfigError: micro-batches that do not divide the rows, a schedule that does not fit its virtual stages.
    """
    stages, section = mesh.shape["pipeline"], config.pipeline
    if stages == 1:
        return None
    rows = batch.rows // data_ranks(mesh)
    count = auto_microbatches(rows, stages) if section.microbatches == "auto" else section.microbatches
    if rows % count:
        legal = [n for n in range(1, rows + 1) if rows % n == 0]
        nearest = min(legal, key=lambda n: (abs(n - count), n))
        raise ConfigError(
            f"pipeline.microbatches={count} does not divide the {rows} rows that a data-parallel rank has of each of "
            f"the {batch.accumulation} micro-batches (global_batch_size={batch.total})",
            f"write pipeline.microbatches: {nearest} (it may be {', '.join(map(str, legal[:12]))}), or auto",
        )
    chunks = section.virtual_stages
    name: str = section.schedule
    if name == "auto":
        name = choose_schedule(stages, count * batch.accumulation, chunks)
    if name != "gpipe" and (name == "interleaved") != (chunks > 1):
        raise ConfigError(
            f"pipeline.schedule={name!r} with pipeline.virtual_stages={chunks}",
            "write virtual_stages: 2 (or more), or schedule: 1f1b"
            if chunks == 1
            else "write schedule: interleaved, or virtual_stages: 1",
        )
    return Pipeline(name, stages, count, chunks, recompute=section.residuals == "recompute")


def _options(config: Config, mesh: Mesh) -> dict[str, Any]:
    mine = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return options_of_run(
        (mine or list(mesh.devices.flat))[0],
        config.xla_options,
        overlap=config.overlap == "auto",
        slices=config.mesh.slices > 1,
        deterministic=config.deterministic,
    )


def _check_offload(device: jax.Device) -> None:
    if device.platform == "cpu":
        raise ConfigError(
            "sharding.offload_optimizer/offload_parameters: on CPU devices everything is in host memory",
            "leave both false with accelerator: cpu",
        )
