"""Gradients of a whole batch, micro-batch after micro-batch: sums, which only the step divides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.train.loss import Loss, LossFn, call_loss
from jtrain.train.model import FunctionalModel
from jtrain.train.state import StatePlan, combine, select

Batch = dict[str, jax.Array]
GradientFn = Callable[[Any, Any, Batch, jax.Array, jax.Array], tuple[Any, Loss, Any]]
"""`gradients(params, variables, batch, rng, scale)` -> gradients of `scale` times the loss's sum over the whole batch
(float32 at least, in their place), the loss summed over it, and the variables after it."""


def accumulated_gradients(model: FunctionalModel, loss_fn: LossFn, plan: StatePlan) -> GradientFn:
    """Gradients of one micro-batch after the other."""

    def gradients_of(params: Any, variables: Any, micro: Batch, rng: jax.Array, scale: jax.Array) -> Any:
        """Gradients of the scaled sum of one micro-batch, its loss, and the variables after it."""

        def scaled_sum(trained: Any) -> tuple[jax.Array, tuple[Loss, Any]]:
            whole = plan.cast(combine(trained, params, plan.trainable))
            module = model.merge(whole, variables, per_micro_batch(rng, micro))
            module.train()
            loss = call_loss(loss_fn, module, micro, rng)
            return loss.sum * scale, (loss, model.variables_of(module))

        grads, (loss, variables) = jax.grad(scaled_sum, has_aux=True)(select(params, plan.trainable))
        return accumulation_dtype(grads, plan), loss, variables

    def gradients(params: Any, variables: Any, batch: Batch, rng: jax.Array, scale: jax.Array) -> Any:
        def one(carry: Any, micro: Batch) -> tuple[Any, None]:
            total, variables = carry
            grads, loss, variables = gradients_of(params, variables, micro, rng, scale)
            return (jax.tree.map(jnp.add, total, (grads, loss)), variables), None

        first = jax.tree.map(lambda x: x[0], batch)
        if next(iter(batch.values())).shape[0] == 1:
            return gradients_of(params, variables, first, rng, scale)
        shapes = jax.eval_shape(gradients_of, params, variables, first, rng, scale)[:2]
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        zeros = (in_their_place(zeros[0], plan), zeros[1])
        ((grads, loss), variables), _ = jax.lax.scan(one, (zeros, variables), batch)
        return grads, loss, variables

    return gradients


def per_micro_batch(rng: jax.Array, micro: Batch) -> jax.Array:
    """Seed of a module's own random streams: differs between micro-batches (their first row's number)."""
    return jax.random.fold_in(rng, micro["row"][0]) if "row" in micro else rng


def accumulation_dtype(grads: Any, plan: StatePlan) -> Any:
    """Gradients in float32 (or wider) and in their place: in Auto mode a gradient can lose a mesh axis."""
    wide = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)
    return in_their_place(wide, plan)


def in_their_place(grads: Any, plan: StatePlan) -> Any:
    """Gradients pinned where the plan has them (nothing to do on one device)."""
    if plan.mesh.size == 1:
        return grads
    return jax.tree.map(jax.lax.with_sharding_constraint, grads, plan.gradients)
