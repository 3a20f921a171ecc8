"""Dropout whose masks depend on the global row alone, never on the device, micro-batch or mesh that holds it."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dropout_keys(rng: jax.Array, layers: int, row_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One key for every place and row: functions of (rng, layer, place, global row), made all at once.

    Args:
      rng: scalar typed key of the step.
      layers: number of layers; it changes no key of the layers before.
      row_B: global number of each row within the step.

    Returns:
      The embedding's keys [B], and those of both branches of every layer [layers, 2, B].
    """
    by_row = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys = jax.vmap(lambda place: by_row(jax.random.fold_in(rng, place), row_B))(jnp.arange(1 + 2 * layers))
    return keys[0], keys[1:].reshape(layers, 2, row_B.shape[0])


def dropout(x_BLD: jax.Array, rate: float, keys_B: jax.Array) -> jax.Array:
    """Drops elements with probability `rate` and scales the rest by 1 / (1 - rate).

    Args:
      x_BLD: activations.
      rate: probability, at least 0 and below 1.
      keys_B: key of every row; a row's mask depends on nothing else.
    """
    mask_BLD = jax.vmap(lambda key: jax.random.bernoulli(key, jnp.float32(1.0 - rate), x_BLD.shape[1:]))(keys_B)
    # The scale is applied in float32: 1 / 0.9 rounded to bfloat16 would bias every activation by 0.2 %.
    scaled = (x_BLD.astype(jnp.promote_types(x_BLD.dtype, jnp.float32)) / (1.0 - rate)).astype(x_BLD.dtype)
    return jnp.where(mask_BLD, scaled, jnp.zeros((), x_BLD.dtype))
