"""Attention of one new token a row over the keys and values that a cache holds, and over its own.

Legend: B rows, S slots, H query heads, K key-value heads, G = H / K, Dk size of a key, Dv of a value.

The cache is only read: what is new is added to the softmax by itself, and written after all layers have run, in one
piece. Heads stand before slots, so that both products take the cache as it lies.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def cached_attention(
    q_BHDk: jax.Array,
    k_BKDk: jax.Array,
    v_BKDv: jax.Array,
    keys_BKSDk: jax.Array,
    values_BKSDv: jax.Array,
    seen_BS: jax.Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """What `jtrain.ops.attention` gives for the last token of a row whose tokens before lie in the cache.

    Args:
      q_BHDk: queries; head h reads key-value head h // G.
      k_BKDk, v_BKDv: key and value of the token itself.
      keys_BKSDk, values_BKSDv: the cache.
      seen_BS: slots that the token sees.
      scale: factor on the scores; 1 / sqrt(Dk) by default.
      softcap: c: scores become c * tanh(scores / c), before anything is left out.
      sinks: a logit a head [H] that takes its share of the softmax and has no value.

    Returns:
      [B, H, Dv] in the type of q. Scores and softmax are float32 at least.
    """
    rows, heads, size = q_BHDk.shape
    kv_heads, dtype = k_BKDk.shape[1], q_BHDk.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    q = q_BHDk.reshape(rows, kv_heads, heads // kv_heads, size)

    def capped(scores: jax.Array) -> jax.Array:
        scores = scores * (size**-0.5 if scale is None else scale)
        return scores if softcap is None else softcap * jnp.tanh(scores / softcap)

    old = capped(jnp.einsum("bkgd,bksd->bkgs", q, keys_BKSDk.astype(dtype), preferred_element_type=wide))
    old = jnp.where(seen_BS[:, None, None], old, -jnp.inf)
    new = capped(jnp.einsum("bkgd,bkd->bkg", q, k_BKDk, preferred_element_type=wide))
    top = jnp.maximum(old.max(-1), new)  # finite: a token sees itself
    if sinks is not None:
        sinks = sinks.astype(wide).reshape(kv_heads, -1)
        top = jnp.maximum(top, sinks)
    old, new = jnp.exp(old - top[..., None]), jnp.exp(new - top)
    total = old.sum(-1) + new
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    old, new = (old / total[..., None]).astype(dtype), (new / total).astype(dtype)
    y = jnp.einsum("bkgs,bksd->bkgd", old, values_BKSDv.astype(dtype), preferred_element_type=wide)
    y = y + new[..., None].astype(wide) * v_BKDv[:, :, None].astype(wide)
    return y.astype(dtype).reshape(rows, heads, -1)
