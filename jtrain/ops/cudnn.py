"""cuDNN's fused attention, as JAX calls it, with segment ids, windows that differ by layer, and a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jtrain.ops.region import by_device
from jtrain.ops.window import Window, WindowChoice, over_windows


def cudnn_attention(
    q_BLHDh: jax.Array,
    k_BLKDh: jax.Array,
    v_BLKDv: jax.Array,
    *,
    segment_ids: jax.Array | None,
    causal: bool,
    window: Window,
    scale: float,
) -> jax.Array:
    """See `jtrain.ops.attention.attention`. Every device runs it on its own rows and heads.

    Args:
      q_BLHDh: queries.
      k_BLKDh: keys.
      v_BLKDv: values; where their heads have another size than the keys', both are filled up to the larger with zeros.
      segment_ids: document of each token [B, L].
      causal: whether a token sees only itself and what comes before.
      window: how many tokens it sees, itself included.
      scale: factor on the scores.
    """
    sizes = None if not isinstance(window, WindowChoice) else window.sizes
    value_size = v_BLKDv.shape[-1]
    largest = max(value_size, q_BLHDh.shape[-1])

    def filled(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * 3 + [(0, largest - x.shape[-1])])

    def local(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array | None = None,
        index: jax.Array | None = None,
    ) -> jax.Array:
        same = None if segment_ids is None else (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])

        def one(size: int | None) -> jax.Array:
            return jax.nn.dot_product_attention(
                *(filled(x) for x in (q, k, v)),
                mask=same,
                scale=scale,
                is_causal=causal,
                local_window_size=None if size is None else (size - 1, 0),
                implementation="cudnn",
            )

        chosen = window if sizes is None or index is None else WindowChoice(sizes, index)
        return over_windows(one, chosen)[..., :value_size]

    index = window.index if isinstance(window, WindowChoice) else None
    return by_device(local, q_BLHDh, k_BLKDh, v_BLKDv, segment_ids=segment_ids, index=index)
