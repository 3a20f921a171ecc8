"""Attention in plain JAX: grouped heads without repeated keys, queries in blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jtrain.ops.window import Window, window_size

BLOCK = 512
"""Queries of a block in rows longer than two blocks: scores are [B, H, BLOCK, L], not [B, H, L, L]."""


def xla_attention(
    q_BLHDh: jax.Array,
    k_BLKDh: jax.Array,
    v_BLKDv: jax.Array,
    *,
    segment_ids: jax.Array | None,
    causal: bool,
    window: Window,
    scale: float,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    block: int = BLOCK,
) -> jax.Array:
    """See `jtrain.ops.attention.attention`. Scores and softmax are float32 at least."""
    b, length, heads, head_size = q_BLHDh.shape
    kv_heads = k_BLKDh.shape[2]
    wide = jnp.promote_types(q_BLHDh.dtype, jnp.float32)
    dtype = q_BLHDh.dtype
    keys_at = jnp.arange(length)
    size = window_size(window, length)
    sinks_KG = None if sinks is None else sinks.reshape(kv_heads, -1).astype(wide)

    def attend(q: jax.Array, at: jax.Array, segments: jax.Array | None, k: jax.Array, v: jax.Array) -> jax.Array:
        """Queries q [B, n, K, G, Dh] at positions `at` [n] over all keys."""
        scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k.astype(dtype), preferred_element_type=wide) * scale
        scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
        distance = at[:, None] - keys_at[None, :]
        seen = jnp.ones(distance.shape, bool)
        if causal:
            seen &= distance >= 0
        if size is not None:
            seen &= distance < size
        mask = seen[None]
        if segments is not None and segment_ids is not None:
            mask = mask & (segments[:, :, None] == segment_ids[:, None, :])
        # A finite floor: a query that sees nothing (it can only be a block's padding) must not become NaN.
        scores = jnp.where(mask[:, None, None], scores, jnp.finfo(wide).min / 2)
        weights = (jax.nn.softmax(scores, axis=-1) if sinks_KG is None else _softmax(scores, sinks_KG)).astype(dtype)
        return jnp.einsum("bkgqs,bskd->bqkgd", weights, v.astype(dtype))

    q = q_BLHDh.reshape(b, length, kv_heads, heads // kv_heads, head_size)
    if length <= 2 * block:
        out = attend(q, keys_at, segment_ids, k_BLKDh, v_BLKDv)
        return out.reshape(b, length, heads, -1)

    count = -(-length // block)
    missing = count * block - length

    def blocks(x: jax.Array) -> jax.Array:
        """[B, L, ...] -> [blocks, B, block, ...]."""
        x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(b, count, block, *x.shape[2:]), 1, 0)

    # The gradients of keys and values are summed over the blocks: in float32, hence the cast outside the loop.
    k, v = k_BLKDh.astype(wide), v_BLKDv.astype(wide)

    @jax.checkpoint
    def one(_: None, xs: tuple[jax.Array, jax.Array, jax.Array | None]) -> tuple[None, jax.Array]:
        index, q_block, segments = xs
        return None, attend(q_block, index * block + jnp.arange(block), segments, k, v)

    segments = None if segment_ids is None else blocks(segment_ids)
    _, out = jax.lax.scan(one, None, (jnp.arange(count), blocks(q), segments))
    return jnp.moveaxis(out, 0, 1).reshape(b, count * block, heads, -1)[:, :length]


def _softmax(scores_BKGQS: jax.Array, sinks_KG: jax.Array) -> jax.Array:
    """The weights of the keys where a sink takes part in every softmax (Xiao et al. 2023, arXiv:2309.17453)."""
    sinks = sinks_KG[:, :, None, None]
    top = jax.lax.stop_gradient(jnp.maximum(scores_BKGQS.max(-1, keepdims=True), sinks))
    weights = jnp.exp(scores_BKGQS - top)
    return weights / (weights.sum(-1, keepdims=True) + jnp.exp(sinks - top))
