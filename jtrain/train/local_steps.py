"""Local steps: every slice trains by itself for H updates, then the slices meet (DiLoCo, Douillard et al. 2023).

An update changes the parameters and the optimizer state of each slice, which nobody else sees. Every H-th update ends
a round: the mean change of the parameters over the slices is the gradient of an outer SGD with Nesterov momentum
(algorithm 1 of the paper), whose result all slices go on from. The exchange stands in a conditional of the one step
program, so that the slow network carries a few scalars in every update, and parameters in every H-th.

Step k still means k updates, and everything is a function of (seed, k): the round ends where H divides k, and what it
needs (`TrainState.across`: each slice's parameters, the outer momentum) is in the state. `TrainState.params` are the
outer parameters, those of the last round's end: they are what is evaluated, averaged, sampled from and exported.

Legend: S slices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jtrain.train.across_slices import Exchange, Kept, by_slice, gradients_of_slices, total_loss
from jtrain.train.gradients import Batch, accumulated_gradients
from jtrain.train.loss import LossFn
from jtrain.train.model import FunctionalModel
from jtrain.train.schedules import Schedule
from jtrain.train.spikes import NumbersRule
from jtrain.train.state import TRAIN_STREAM, StatePlan, TrainState, combine, select, stream_key
from jtrain.train.step import Metrics, accept, count_tokens, jit, loss_multiplier, moving_average, to_device


def make_local_step(
    model: FunctionalModel,
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    plan: StatePlan,
    exchange: Exchange,
    *,
    seed: int,
    schedule: Schedule | None = None,
    max_grad_norm: float = 0.0,
    nonfinite: str = "skip",
    numbers: NumbersRule | None = None,
    ema_decay: float = 0.0,
    compiler_options: dict[str, Any] | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Builds the jitted step; see `jtrain.train.step.make_train_step`.

    A slice divides its gradient by its own count, and clips by its own norm. A number that is not finite on one slice
    skips the update on all of them. The metric `grad_norm` is the mean of the slices' norms, `loss` that of all rows.

    Args:
      exchange: adds the changes of the parameters at the end of a round; its config section says how long a round is.
    """
    dcn, slices, precision = exchange.dcn, exchange.slices, plan.precision
    gradients = gradients_of_slices(accumulated_gradients(model, loss_fn, plan), plan, own_params=True)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        state = to_device(state, plan.abstract)
        rng = stream_key(seed, TRAIN_STREAM, state.step + state.skipped)
        scale = loss_multiplier(state, batch, precision)
        own = state.across["params"]

        grads, loss, variables = gradients(_whole(own, state.params, plan, slices), state.variables, batch, rng, scale)

        def update(grads: Any, count: jax.Array, opt_state: Any, params: Any) -> tuple[Any, Any, jax.Array]:
            divisor = jnp.where(count > 0, count, 1) * scale
            grads = jax.tree.map(lambda g: g / divisor.astype(g.dtype), grads)
            norm = optax.tree.norm(grads)
            factor = jnp.minimum(1.0, max_grad_norm / (norm + 1e-6)) if max_grad_norm else jnp.ones_like(norm)
            grads = jax.tree.map(lambda g, p: (g * factor.astype(g.dtype)).astype(p.dtype), grads, params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, norm

        variables, figures = model.end_step(state.params, variables)
        own, opt_state, norms = by_slice(update, 0)(grads, loss.count, state.opt_state, own)
        loss, norm = total_loss(loss), norms.mean()
        mean = loss.sum / jnp.where(loss.count > 0, loss.count, 1).astype(loss.sum.dtype)

        params, across = jax.lax.cond(
            (state.step + 1) % dcn.local_steps == 0,
            lambda params, across: _end_round(params, across, plan, exchange),
            lambda params, across: (params, across),
            state.params,
            state.across | {"params": own},
        )
        new = dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            variables=variables,
            ema=moving_average(state, params, plan, ema_decay),
            across=across,
        )
        new, verdict = accept(new, state, mean, norm, nonfinite, numbers, precision)  # of all slices: they decide alike
        metrics: Metrics = {"loss": mean, "sums": loss.metrics, "tokens": count_tokens(batch), "grad_norm": norm}
        metrics |= figures | verdict | {"step": new.step, "skipped": new.skipped}
        if schedule is not None:
            metrics["learning_rate"] = schedule(state.step + 1)
        return new, metrics

    return jit(train_step, plan, compiler_options, out_shardings=(plan.shardings, None), donate_argnums=0)


def _end_round(params: Any, across: Kept, plan: StatePlan, exchange: Exchange) -> tuple[Any, Kept]:
    """The outer update: m = b m + d; p = p - r (d + b m) (Nesterov) or p - r m, with d the mean change so far, negated.

    As torch.optim.SGD(lr=r, momentum=b, nesterov=True), which the paper's authors use.
    """
    dcn, slices = exchange.dcn, exchange.slices
    outer = select(params, plan.trainable)
    changes = jax.tree.map(lambda p, own, m: p.astype(m.dtype) - own.astype(m.dtype), outer, across["params"],
                           across["momentum"])  # fmt: skip
    sums, across = exchange(changes, across)
    mean = jax.tree.map(lambda d: d / slices, sums)
    momentum = jax.tree.map(lambda m, d: dcn.outer_momentum * m + d, across["momentum"], mean)
    ahead = jax.tree.map(lambda m, d: d + dcn.outer_momentum * m if dcn.outer_nesterov else m, momentum, mean)
    outer = jax.tree.map(lambda p, d: (p - dcn.outer_learning_rate * d).astype(p.dtype), outer, ahead)
    own = jax.tree.map(lambda p: jnp.broadcast_to(p, (slices, *p.shape)), outer)
    return combine(outer, params, plan.trainable), across | {"params": own, "momentum": momentum}


def _whole(own: Any, params: Any, plan: StatePlan, slices: int) -> Any:
    """Every slice's parameters as stacks, the frozen ones (which no update changes) among them."""
    frozen = jax.tree.map(lambda p: jnp.broadcast_to(p, (slices, *p.shape)), params)
    return combine(own, frozen, plan.trainable)
