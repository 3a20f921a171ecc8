"""Splash attention (Pallas, TPU): JAX's kernel, with grouped heads, segment ids and a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jtrain.ops.region import by_device
from jtrain.ops.window import Window, WindowChoice, over_windows

LANES = 128


def splash_attention(
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
    interpret: bool = False,
) -> jax.Array:
    """See `jtrain.ops.attention.attention`; rows must be a multiple of 128 tokens.

    On a mesh every device runs the kernel on its own rows and heads: XLA can't divide a Pallas call by itself.

    Args:
      q_BLHDh: queries.
      k_BLKDh: keys.
      v_BLKDv: values.
      segment_ids: document of each token [B, L].
      causal: whether a token sees only itself and what comes before.
      window: how many tokens it sees, itself included; of a choice every size is compiled.
      scale: factor on the scores.
      softcap: bound of the scores.
      sinks: logits [H] without a value; the kernel takes them in the type of q.
      interpret: runs the kernel's Python on any platform, slowly.
    """
    sizes = window.sizes if isinstance(window, WindowChoice) else None

    def local(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array,
        sinks: jax.Array | None = None,
        index: jax.Array | None = None,
    ) -> jax.Array:
        def one(size: int | None) -> jax.Array:
            return _local(q, k, v, segment_ids, sinks, causal, size, scale, softcap, interpret)

        return over_windows(one, window if sizes is None or index is None else WindowChoice(sizes, index))

    if segment_ids is None:
        segment_ids = jnp.ones(q_BLHDh.shape[:2], jnp.int32)
    index = window.index if isinstance(window, WindowChoice) else None
    return by_device(local, q_BLHDh, k_BLKDh, v_BLKDv, segment_ids=segment_ids, sinks=sinks, index=index)


def _local(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: jax.Array,
    sinks: jax.Array | None,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    interpret: bool,
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    b, length, heads, _ = q.shape
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
        masks.MultiHeadMask([mask] * (heads // kv_heads)),
        block_sizes=sizes,
        interpret=interpret,
        attn_logits_soft_cap=softcap,
    )

    # In the type of q: so does the kernel of jax 0.10 return their gradient. It computes in float32.
    sinks_KG = None if sinks is None else sinks.astype(q.dtype).reshape(kv_heads, -1)

    def one_row(q_KGLDh: jax.Array, k_KLDh: jax.Array, v_KLDv: jax.Array, segments_L: jax.Array) -> jax.Array:
        ids = kernels.SegmentIds(q=segments_L, kv=segments_L)

        def group(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
            return jnp.asarray(one_group(q, k, v, segment_ids=ids, sinks=sinks))

        return jax.vmap(group)(q_KGLDh, k_KLDh, v_KLDv, sinks_KG)

    def lanes(x: jax.Array) -> jax.Array:
        """Zeros up to whole lanes: they add nothing to a score, and come out as zeros."""
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % LANES)])

    q = jnp.moveaxis(lanes(q).reshape(b, length, kv_heads, heads // kv_heads, -1), 1, 3)
    k_BKLDh, v_BKLDv = (jnp.moveaxis(lanes(x), 1, 2) for x in (k, v))
    out_BKGLDv = jax.vmap(one_row)(q, k_BKLDh, v_BKLDv, segments.astype(jnp.int32))
    return jnp.moveaxis(out_BKGLDv, 3, 1)[..., : v.shape[-1]].reshape(b, length, heads, -1)
