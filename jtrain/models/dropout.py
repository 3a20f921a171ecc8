"""Dropout whose masks depend on the global row alone, never on the device, micro-batch or mesh that holds it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

from jtrain.ops.zigzag import token_index, zigzag_ways


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
      keys_B: key of every row; a token's mask depends on it and on the token's index in the row alone.
    """
    mask_BLD = _uniform(keys_B, x_BLD.shape[1:]) < jnp.float32(1.0 - rate)  # jax.random.bernoulli's numbers
    # The scale is applied in float32: 1 / 0.9 rounded to bfloat16 would bias every activation by 0.2 %.
    scaled = (x_BLD.astype(jnp.promote_types(x_BLD.dtype, jnp.float32)) / (1.0 - rate)).astype(x_BLD.dtype)
    return jnp.where(mask_BLD, scaled, jnp.zeros((), x_BLD.dtype))


def embedding_noise(
    x_BLD: jax.Array, alpha: float, rng: jax.Array, row_B: jax.Array, segment_ids_BL: jax.Array | None
) -> jax.Array:
    """Adds uniform noise in [-m, m], m = alpha / sqrt(length * D), to embeddings (NEFTune, Jain et al. 2023, eq. 1).

    The length is that of a token's own document, so that neither packing nor padding changes m.

    Args:
      x_BLD: embeddings.
      alpha: the paper's; 5 to 15.
      rng: scalar typed key of the step.
      row_B: global number of each row within the step: noise depends on it, on the key and on the token's index.
      segment_ids_BL: document of each token, 0 for padding (no noise); None: a row is one document.
    """
    keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.fold_in(rng, _NOISE), row_B)
    noise = 2.0 * _uniform(keys_B, x_BLD.shape[1:]) - 1.0
    length = jnp.full(x_BLD.shape[:2], x_BLD.shape[1], jnp.float32)
    if segment_ids_BL is not None:
        same = jax.vmap(lambda segments: jnp.zeros(segments.shape[0] + 1, jnp.float32).at[segments].add(1.0)[segments])
        length = same(segment_ids_BL)
        noise = noise * (segment_ids_BL > 0)[..., None]
    size = alpha / jnp.sqrt(length * x_BLD.shape[-1])
    return x_BLD + (noise * size[..., None]).astype(x_BLD.dtype)


_NOISE = 0x6E656674
"""Beyond every place of `dropout_keys`."""


def _uniform(keys_B: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """`jax.random.uniform(key, [L, D])` for every key, its tokens in the order that rows have now [B, L, D]."""
    draw = _in_order if zigzag_ways() > 1 else jax.random.uniform
    return jax.vmap(lambda key: draw(key, shape))(keys_B)


def _in_order(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """`jax.random.uniform(key, [L, D])` with its tokens in zig-zag order.

    Threefry's bits are a hash of each number's own index (Salmon et al. 2011; `jax_threefry_partitionable`), so every
    device draws those of its tokens; to draw in natural order and permute would be an exchange of the whole mask.
    """
    length, width = shape
    token = token_index(length)
    if str(jax.random.key_impl(key)) != "threefry2x32" or width >= 2**16:
        return jax.random.uniform(key, shape)[token]
    words = jax.random.key_data(key)
    first, second = threefry2x32_p.bind(words[0], words[1], *flat_index(token, width))
    return ((first ^ second) >> 9).astype(jnp.float32) * jnp.float32(2.0**-23)


def flat_index(token_L: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """token * width + column as two 32-bit words, high and low, [L, width]; width is below 2^16."""
    token, column = token_L.astype(jnp.uint32)[:, None], jnp.arange(width, dtype=jnp.uint32)[None]
    low, high = (token & 0xFFFF) * width, (token >> 16) * width  # products of 16-bit halves
    middle = high + (low >> 16)
    start = (middle << 16) | (low & 0xFFFF)
    word = start + column
    return jnp.broadcast_to(middle >> 16, word.shape) + (word < start), word
