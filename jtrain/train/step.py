"""The step: `train_step(state, batch) -> (state, metrics)`, one compiled program.

Read it from top to bottom. For every micro-batch (`jtrain/train/gradients.py`): cast the parameters, build the module,
compute the loss's sum and count, add the gradients of the sum. Then, once: divide by the count of the whole global
batch, take the norm, check that the numbers are finite, clip, update. Everything is a function of the state and the
batch; every figure that a decision hangs on is a global one, so that all devices and processes decide alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jtrain.ops.context import context_options
from jtrain.ops.fp8 import fp8_products
from jtrain.ops.logical import logical_rules
from jtrain.train.across_slices import Exchange, total_loss
from jtrain.train.gradients import Batch, GradientFn, accumulated_gradients
from jtrain.train.loss import Loss, LossFn, call_loss
from jtrain.train.model import FunctionalModel
from jtrain.train.precision import Precision
from jtrain.train.schedules import Schedule
from jtrain.train.spikes import NumbersRule
from jtrain.train.state import TRAIN_STREAM, StatePlan, TrainState, combine, select, stream_key

Metrics = dict[str, Any]
StepHook = Callable[[Any, TrainState, Metrics], tuple[Any, Metrics]]
"""`step_hook(gradients, state, metrics) -> (gradients, metrics)`, traced into the step before clipping."""


def make_train_step(
    model: FunctionalModel,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    plan: StatePlan,
    *,
    seed: int,
    schedule: Schedule | None = None,
    max_grad_norm: float = 0.0,
    nonfinite: str = "skip",
    numbers: NumbersRule | None = None,
    ema_decay: float = 0.0,
    step_hook: StepHook | None = None,
    gradients: GradientFn | None = None,
    exchange: Exchange | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds the jitted step.

    Args:
      model: the split model.
      loss_fn: `loss_fn(module, micro_batch, rng) -> Loss`.
      tx: the optax chain whose state the plan holds.
      plan: the state's layout, to which the step's outputs are pinned, and its precision.
      seed: of the run; the key of a step is a function of (seed, batches used so far).
      schedule: for the figure `learning_rate`; None leaves it out.
      max_grad_norm: gradients are scaled down to this global norm; 0: never.
      nonfinite: skip | stop (both leave the state as it was) | warn (applies the update; an overflow of fp16 gradients,
        which the loss scale answers, is skipped under every policy).
      numbers: what a spike is, and what makes the state stand still; the rule that the plan was made with.
      ema_decay: of the moving average, if the plan has one.
      step_hook: sees and may change gradients and metrics.
      gradients: how the gradients of a batch come about; by default `accumulated_gradients`.
      exchange: adds gradients that come as stacks, one a slice (`jtrain/train/across_slices.py`).
      compiler_options: passed to the compiler.

    Returns:
      `step(state, batch) -> (state, metrics)`. The state is donated. `batch` holds arrays [A, b, ...]: A micro-batches
      of b rows. Metrics: `loss`, `grad_norm` (before clipping), `learning_rate`, `finite`, `spike` (where one is looked
      for), `step`, `skipped`, `tokens` (of this batch, without padding), `sums`: name -> (sum, count), and what the
      model's `end_step` returns.
    """
    precision = plan.precision
    gradients = accumulated_gradients(model, loss_fn, plan) if gradients is None else gradients

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        state = to_device(state, plan.abstract)
        rng = stream_key(seed, TRAIN_STREAM, state.step + state.skipped)
        scale = loss_multiplier(state, batch, precision)

        grads, loss, variables = gradients(state.params, state.variables, batch, rng, scale)
        across = state.across
        if exchange is not None:
            grads, across = exchange(grads, across or {}, scale)
            loss = total_loss(loss)
        variables, figures = model.end_step(state.params, variables)
        count = jnp.where(loss.count > 0, loss.count, 1).astype(loss.sum.dtype)
        grads = jax.tree.map(lambda g: g / (count * scale).astype(g.dtype), grads)
        metrics: Metrics = {"loss": loss.sum / count, "sums": loss.metrics, "tokens": count_tokens(batch)} | figures
        if step_hook is not None:
            grads, metrics = step_hook(grads, state, metrics)
        norm = optax.tree.norm(grads)
        if max_grad_norm:  # torch.nn.utils.clip_grad_norm_'s coefficient
            grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, max_grad_norm / (norm + 1e-6)).astype(g.dtype), grads)

        new = dataclasses.replace(_update(state, grads, variables, tx, plan, ema_decay), across=across or None)
        new, verdict = accept(new, state, metrics["loss"], norm, nonfinite, numbers, precision)
        metrics |= {"grad_norm": norm, "step": new.step, "skipped": new.skipped} | verdict
        if schedule is not None:
            metrics["learning_rate"] = schedule(state.step + 1)
        return new, metrics

    return jit(train_step, plan, compiler_options, out_shardings=(plan.shardings, None), donate_argnums=0)


def make_eval_step(
    model: FunctionalModel,
    loss_fn: LossFn,
    plan: StatePlan,
    *,
    batch_loss: Callable[[Any, Any, Batch], Loss] | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Callable[[Any, Any, Batch], Loss]:
    """Builds `eval_step(params, variables, batch) -> Loss`, summed over the batch's micro-batches.

    Nothing is random: the module is in evaluation mode and `rng` is None. `batch_loss(params, variables, batch)`, with
    parameters in the compute type, takes the place of the loop over micro-batches (pipelines).
    """
    if batch_loss is not None:

        def eval_step(params: Any, variables: Any, batch: Batch) -> Loss:
            return batch_loss(plan.cast(to_device(params, plan.abstract.params)), variables, batch)

        return jit(eval_step, plan, compiler_options)

    def sum_losses(module: Any, batch: Batch) -> Loss:
        losses = jax.lax.map(lambda micro: call_loss(loss_fn, module, micro, None), batch)
        return jax.tree.map(lambda x: x.sum(0), losses)

    return make_forward(model, plan, sum_losses, name="eval_step", compiler_options=compiler_options)


def make_forward(
    model: FunctionalModel,
    plan: StatePlan,
    function: Callable[..., Any],
    *,
    name: str | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Jits `function(module, *arguments)` as `forward(params, variables, *arguments)`, for everything but training.

    The module is in evaluation mode and computes in the plan's precision; what the plan keeps in host memory is brought
    to the device.
    """

    def forward(params: Any, variables: Any, *arguments: Any) -> Any:
        module = model.merge(plan.cast(to_device(params, plan.abstract.params)), variables)
        module.eval()
        return function(module, *arguments)

    forward.__name__ = name or function.__name__
    return jit(forward, plan, compiler_options)


def jit(function: Callable, plan: StatePlan, options: dict | None, **keywords: Any) -> Callable:
    """`jax.jit` with the table of logical axes and the matmul precision in force while it traces."""

    def traced(*arguments: Any) -> Any:
        with (
            logical_rules(plan.mesh, plan.rules),
            context_options(plan.context),
            jax.default_matmul_precision(plan.precision.matmul),
            fp8_products(plan.precision.fp8),
        ):
            return function(*arguments)

    traced.__name__ = function.__name__
    return jax.jit(traced, compiler_options=options or None, **keywords)


def accept(
    new: TrainState,
    state: TrainState,
    loss: jax.Array,
    norm: jax.Array,
    nonfinite: str,
    rule: NumbersRule | None,
    precision: Precision,
) -> tuple[TrainState, Metrics]:
    """The new state where the step's numbers are good, else the old one with one more skipped batch.

    Returns:
      The state, and the metrics `finite` and, where spikes are looked for, `spike`.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    overflow = jnp.isfinite(loss) & ~finite & precision.loss_scaling
    applied = ~overflow if nonfinite == "warn" else finite
    verdict, halted = {"finite": finite}, jnp.bool_(False)
    numbers = state.numbers if rule is not None else None
    if rule is not None and numbers is not None:
        halted = ~finite & ~overflow & rule.halts_on_nonfinite
        if rule.window:
            spike = finite & numbers.is_spike(loss, norm, rule.threshold)
            applied, halted = applied & ~spike, halted | (spike & rule.halts_on_spike)
            verdict["spike"] = spike
        applied &= ~numbers.halted
    if nonfinite != "warn" or precision.loss_scaling or numbers is not None:
        new = jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, state)
    new = dataclasses.replace(new, skipped=state.skipped + ~applied)
    if state.loss_scale is not None:
        scale = state.loss_scale.update(finite)
        still = halted if numbers is None else halted | numbers.halted
        scale = jax.tree.map(lambda a, b: jnp.where(still, b, a), scale, state.loss_scale)
        new = dataclasses.replace(new, loss_scale=scale)
    if numbers is not None:
        new = dataclasses.replace(new, numbers=numbers.after(loss, norm, applied & finite, halted))
    return new, verdict


def _update(
    state: TrainState, grads: Any, variables: Any, tx: optax.GradientTransformation, plan: StatePlan, ema_decay: float
) -> TrainState:
    trained = select(state.params, plan.trainable)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, trained)
    updates, opt_state = tx.update(grads, state.opt_state, trained)
    params = combine(optax.apply_updates(trained, updates), state.params, plan.trainable)
    changed = {"params": params, "opt_state": opt_state, "variables": variables}
    return dataclasses.replace(
        state, step=state.step + 1, ema=moving_average(state, params, plan, ema_decay), **changed
    )


def moving_average(state: TrainState, params: Any, plan: StatePlan, ema_decay: float) -> Any:
    """The average of the trainable parameters after an update to `params`; None where none is kept."""
    if state.ema is None:
        return None
    # The first averages follow quickly, as in tf.train.ExponentialMovingAverage: min(decay, (1 + k) / (10 + k)).
    k = state.step + 1
    decay = jnp.minimum(ema_decay, (1 + k) / (10 + k))
    return jax.tree.map(
        lambda e, p: (e * decay + p * (1 - decay)).astype(e.dtype), state.ema, select(params, plan.trainable)
    )


def loss_multiplier(state: TrainState, batch: Batch, precision: Precision) -> Any:
    """What the loss's sum is multiplied by before it is differentiated.

    In fp16 the gradient of a *sum* over a batch would overflow at any useful loss scale, so it is also divided by the
    number of targets, rounded up to a power of two (exact in floating point).
    """
    if not precision.loss_scaling or state.loss_scale is None:
        return jnp.ones((), precision.parameter_dtype if precision.parameter_dtype == jnp.float64 else jnp.float32)
    # Rows, or places of whole numbers: labels are among these.
    of_tokens = [x for x in batch.values() if x.ndim > 2 and jnp.issubdtype(x.dtype, jnp.integer)]
    shapes = [x.shape[:3] for x in of_tokens] or [x.shape[:2] for x in batch.values()]
    targets = max(math.prod(shape) for shape in shapes)
    return state.loss_scale.scale / 2.0 ** math.ceil(math.log2(max(targets, 1)))


_SEGMENTS = ("segment_ids", "chosen_segment_ids", "rejected_segment_ids")


def count_tokens(batch: Batch) -> jax.Array:
    """Tokens of the batch without padding; its rows where it has no tokens."""
    segments = [x for name, x in batch.items() if name in _SEGMENTS]
    if segments:
        return jnp.stack([(x > 0).sum(dtype=jnp.int32) for x in segments]).sum()
    if "attention_mask" in batch:
        return (batch["attention_mask"] > 0).sum(dtype=jnp.int32)
    return jnp.int32(math.prod(next(iter(batch.values())).shape[:2]))


def to_device(tree: Any, abstract: Any) -> Any:
    """Brings what the plan keeps in host memory to the device; the step's out_shardings take it back."""

    def one(leaf: jax.Array, planned: jax.ShapeDtypeStruct) -> jax.Array:
        place = planned.sharding
        return jax.device_put(leaf, place.with_memory_kind("device")) if place.memory_kind == "pinned_host" else leaf

    return jax.tree.map(one, tree, abstract)
