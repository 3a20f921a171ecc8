"""Splash attention (Pallas, TPU): JAX's kernel, with grouped heads, segment ids and a mesh."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jtrain.ops.region import by_device

LANES = 128


def splash_attention(
    q_BLHDh: jax.Array,
    k_BLKDh: jax.Array,
    v_BLKDh: jax.Array,
    *,
    segment_ids: jax.Array | None,
    causal: bool,
    window: int | None,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    """See `jtrain.ops.attention.attention`; rows must be a multiple of 128 tokens.

    On a mesh every device runs the kernel on its own rows and heads: XLA can't divide a Pallas call by itself.

    Args:
      q_BLHDh: queries.
      k_BLKDh: keys.
      v_BLKDh: values.
      segment_ids: document of each token [B, L].
      causal: whether a token sees only itself and what comes before.
      window: how many tokens it sees, itself included.
      scale: factor on the scores.
      interpret: runs the kernel's Python on any platform, slowly.
    """
    local = functools.partial(_local, causal=causal, window=window, scale=scale, interpret=interpret)
    if segment_ids is None:
        segment_ids = jnp.ones(q_BLHDh.shape[:2], jnp.int32)
    return by_device(local, q_BLHDh, k_BLKDh, v_BLKDh, segment_ids)


def _local(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    interpret: bool = False,
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    b, length, heads, size = q.shape
    kv_heads = k.shape[2]
    q = (q * scale).astype(q.dtype)
    shape = (length, length)
    if window is not None:
        mask: masks.Mask = masks.LocalMask(shape, (window - 1, 0), 0)
    else:
        mask = masks.CausalMask(shape) if causal else masks.FullMask(shape)
    block = next(n for n in (512, 384, 256, LANES) if length % n == 0)
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    one_group = kernels.make_splash_mqa_single_device(
        masks.MultiHeadMask([mask] * (heads // kv_heads)), block_sizes=sizes, interpret=interpret
    )

    def one_row(q_KGLDh: jax.Array, k_KLDh: jax.Array, v_KLDh: jax.Array, segments_L: jax.Array) -> jax.Array:
        ids = kernels.SegmentIds(q=segments_L, kv=segments_L)
        return jax.vmap(lambda q, k, v: jnp.asarray(one_group(q, k, v, segment_ids=ids)))(q_KGLDh, k_KLDh, v_KLDh)

    def lanes(x: jax.Array) -> jax.Array:
        """Zeros up to whole lanes: they add nothing to a score, and come out as zeros."""
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -size % LANES)])

    q = jnp.moveaxis(lanes(q).reshape(b, length, kv_heads, heads // kv_heads, -1), 1, 3)
    k, v = (jnp.moveaxis(lanes(x), 1, 2) for x in (k, v))
    out_BKGLDh = jax.vmap(one_row)(q, k, v, segments.astype(jnp.int32))
    return jnp.moveaxis(out_BKGLDh, 3, 1)[..., :size].reshape(b, length, heads, size)
