"""Self-attention with grouped key-value heads (Ainslie et al. 2023) and rotary positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jtrain.models import remat
from jtrain.models.config import DecoderConfig
from jtrain.models.norm import HeadNorm
from jtrain.models.parameters import constant
from jtrain.models.projection import Projection, project
from jtrain.models.rope import Rope, apply_rope
from jtrain.ops.attention import WindowChoice, attention
from jtrain.ops.logical import constrain, mesh_axis_size


class Attention(nnx.Module):
    """q, k, v projections, rotation, causal attention within segments, output projection.

    Args:
      config: the decoder.
      keys: four keys, one a kernel.
      dtype: type of the parameters.
    """

    def __init__(self, config: DecoderConfig, keys: jax.Array, dtype: jnp.dtype):
        self.config = config
        d, std, bias = config.hidden_size, config.initializer_range, config.attention_bias
        embed = (("embed", d),)
        query = (("heads", config.num_attention_heads), ("head_dim", config.head_size))
        key_value = (("kv_heads", config.kv_heads), ("head_dim", config.head_size))
        self.q_proj = Projection(keys[0], std, embed, query, bias=bias, dtype=dtype)
        self.k_proj = Projection(keys[1], std, embed, key_value, bias=bias, dtype=dtype)
        self.v_proj = Projection(keys[2], std, embed, key_value, bias=bias, dtype=dtype)
        self.o_proj = Projection(keys[3], std, query, embed, bias=config.out_bias, dtype=dtype)
        if config.qk_norm != "none":
            first = 1 if config.qk_norm == "head" else 0
            self.q_norm = HeadNorm(config, query[first:], dtype)
            self.k_norm = HeadNorm(config, key_value[first:], dtype)
        if config.attention_sinks:
            self.sinks = constant(0.0, (config.num_attention_heads,), ("heads",), dtype)

    def __call__(
        self,
        x_BLD: jax.Array,
        rope: Rope | None,
        segment_ids_BL: jax.Array | None,
        window: int | WindowChoice | None = None,
    ) -> jax.Array:
        """[B, L, D] -> [B, L, D]; a token sees the tokens before it (all, in an encoder) that have its own segment id.

        Args:
          x_BLD: activations.
          rope: tables of the layer; None: nothing turns.
          segment_ids_BL: document of each token.
          window: tokens that are seen, itself included; None: all.
        """
        return self.with_entry(x_BLD, rope, segment_ids_BL, window)[0]

    def with_entry(
        self,
        x_BLD: jax.Array,
        rope: Rope | None,
        segment_ids_BL: jax.Array | None,
        window: int | WindowChoice | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """As `__call__`, and what a cache keeps of the tokens: keys and values [B, L, K, Dh]."""
        q, k, v = (checkpoint_name(a, remat.QKV) for a in self.heads(x_BLD, rope))
        config = self.config
        y = attention(
            q,
            k,
            v,
            segment_ids=segment_ids_BL,
            causal=config.causal,
            window=window,
            kernel=config.attention,
            **self._scores(),
        )
        return self.output(y), (k, v)

    def step(
        self, x_B1D: jax.Array, rope: Rope | None, attend: Callable[..., jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """One token a row.

        Args:
          x_B1D: activations.
          rope: as for `__call__`.
          attend: `attend(q, k, v, scale, softcap, sinks)`, attention over what a cache holds and the token itself.

        Returns:
          [B, 1, D], and what the cache has to keep: key and value [B, K, Dh].
        """
        q, k, v = (a[:, 0] for a in self.heads(x_B1D, rope))
        return self.output(attend(q, k, v, **self._scores())[:, None]), (k, v)

    def _scores(self) -> dict[str, Any]:
        config = self.config
        return {
            "scale": config.attention_scale,
            "softcap": config.attn_logit_softcapping,
            "sinks": self.sinks[...] if config.attention_sinks else None,
        }

    def heads(self, x_BLD: jax.Array, rope: Rope | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, L, H, Dh], keys and values [B, L, K, Dh], as they meet.

        Key-value heads are repeated where that gives every device of `tensor` whole ones.
        """
        config = self.config
        repeats = kv_repeats(config, mesh_axis_size("kv_heads"))
        q, k, v = project((self.q_proj, self.k_proj, self.v_proj), x_BLD, (1, repeats, repeats))
        q = constrain(q, "batch", "sequence", "heads", None)
        k = constrain(k, "batch", "sequence", "kv_heads", None)
        v = constrain(v, "batch", "sequence", "kv_heads", None)
        if config.qk_norm != "none":
            q, k = self.q_norm(q), self.k_norm(k, repeats=repeats)
        if config.clip_qkv is not None:
            q, k, v = (jnp.clip(a, -config.clip_qkv, config.clip_qkv) for a in (q, k, v))
        return apply_rope(q, rope), apply_rope(k, rope), v

    def output(self, y_BLHDh: jax.Array) -> jax.Array:
        """[B, L, H, Dh] -> [B, L, D]."""
        return checkpoint_name(self.o_proj(constrain(y_BLHDh, "batch", "sequence", "heads", None)), remat.OUT)


def kv_repeats(config: DecoderConfig, ways: int) -> int:
    """How often a key-value head is repeated so that `ways` devices get whole heads; 1 where nothing helps.

    The least common multiple of key-value heads and ways divides the query heads when both do.
    """
    heads = math.lcm(config.kv_heads, ways)
    return heads // config.kv_heads if config.num_attention_heads % heads == 0 else 1
