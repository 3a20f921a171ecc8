"""The loss contract: a loss is a sum and a count; only the step divides, once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.errors import ConfigError

Metric = tuple[jax.Array, jax.Array]
"""(sum, count): two scalars that may be added over micro-batches, devices and batches before they are divided."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Loss:
    """What a loss function returns.

    Attributes:
      sum: scalar, the loss summed over everything that counts (tokens, pairs, images, ...).
      count: scalar, how many of them there are. The step divides the sum over all micro-batches and devices by the
        count over all of them.
      metrics: name -> (sum, count), further figures that are averaged in the same way.
    """

    sum: jax.Array
    count: jax.Array
    metrics: dict[str, Metric] = dataclasses.field(default_factory=dict)


LossFn = Callable[[Any, dict[str, jax.Array], jax.Array | None], Loss]
"""`loss_fn(model, batch, rng) -> Loss`.

`batch` holds the rows of one micro-batch ([b, ...] each, with `row`: the global row numbers). `rng` is one typed key,
the same for all micro-batches and devices of a step: draw per row with `row_keys(rng, batch["row"])`, and the result
does not depend on how the batch is divided. In evaluation `rng` is None: nothing random happens.
"""


def call_loss(loss_fn: LossFn, model: Any, batch: dict[str, jax.Array], rng: jax.Array | None) -> Loss:
    """Calls a loss function and sees that it keeps the contract; a matter of shapes, so tracing suffices.

    Raises:
      ConfigError: what it returned is no `Loss` of scalars.
    """
    loss = loss_fn(model, batch, rng)
    if not isinstance(loss, Loss):
        raise ConfigError(f"loss_fn returned a {type(loss).__name__}", "return jtrain.Loss(sum, count, metrics)")
    if not isinstance(loss.metrics, dict):
        raise ConfigError(f"loss_fn: metrics is a {type(loss.metrics).__name__}", "return name -> (sum, count)")
    for name, pair in {"the loss": (loss.sum, loss.count), **loss.metrics}.items():
        shapes = [jnp.shape(value) for value in pair] if isinstance(pair, tuple | list) else jnp.shape(pair)
        if shapes != [(), ()]:
            raise ConfigError(f"loss_fn: {name} is no (sum, count) of two scalars: {shapes}", "sum it over the rows")
    return loss


def row_keys(rng: jax.Array, row: jax.Array) -> jax.Array:
    """One key a row: `fold_in(rng, row[i])`, for randomness that neither accumulation nor the mesh changes.

    Args:
      rng: scalar typed key.
      row: int32 [b], global row numbers.

    Returns:
      Typed keys [b]; draw with `jax.vmap`.
    """
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(rng, row)
