"""Ulysses (Jacobs et al. 2023, arXiv:2309.14509): from a part of every row with all heads to whole rows of some heads.

One exchange brings every device the whole rows of H / c query heads, the ordinary kernel runs there, and one exchange
takes the result back. Legend: B rows, L tokens, N = L / c, H query heads, K key-value heads, Dh and Dv head sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jtrain.ops.context import attention_places
from jtrain.ops.region import axes_of


def ulysses_attention(
    q_BLHDh: jax.Array,
    k_BLKDh: jax.Array,
    v_BLKDv: jax.Array,
    *,
    segment_ids: jax.Array | None,
    sinks: jax.Array | None = None,
    index: jax.Array | None = None,
    local: Callable[..., jax.Array],
) -> jax.Array:
    """See `jtrain.ops.attention.attention`; tokens are cut over the mesh axes of `sequence`, in natural order.

    Args:
      q_BLHDh: queries; `context` divides the heads of a device.
      k_BLKDh: keys; fewer heads than devices are repeated, so that every query head finds its own.
      v_BLKDv: values.
      segment_ids: document of each token [B, L].
      sinks: logits [H], cut with the heads.
      index: the number of a window, a scalar.
      local: attention on one device, `local(q, k, v, segment_ids, sinks, index)`, of whole rows.
    """
    region, axes, ways, rows, of_q, of_kv = attention_places(q_BLHDh.shape, k_BLKDh.shape)
    whole_rows = PartitionSpec(rows[0], None)
    some_heads = PartitionSpec((*axes_of(of_q[2]), *axes))  # those of this device in the exchange

    def exchanged(q: jax.Array, k: jax.Array, v: jax.Array, given: Any) -> jax.Array:
        repeats = math.lcm(k.shape[2], ways) // k.shape[2]
        k, v = (jnp.repeat(x, repeats, axis=2) if repeats > 1 else x for x in (k, v))
        q, k, v = (jax.lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True) for x in (q, k, v))
        out = local(q, k, v, *given)
        return jax.lax.all_to_all(out, axes, split_axis=1, concat_axis=2, tiled=True)

    given = (segment_ids, sinks, index)
    specs = (whole_rows, some_heads, PartitionSpec())
    mapped = region.shard_map(exchanged, in_specs=(of_q, of_kv, of_kv, specs), out_specs=of_q)
    return mapped(q_BLHDh, k_BLKDh, v_BLKDv, given)
