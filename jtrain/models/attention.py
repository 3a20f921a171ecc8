"""Self-attention with grouped key-value heads (Ainslie et al. 2023) and rotary positions."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jtrain.models import remat
from jtrain.models.config import DecoderConfig
from jtrain.models.projection import Projection, project
from jtrain.models.rope import apply_rope
from jtrain.ops.attention import attention
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
        self.o_proj = Projection(keys[3], std, query, embed, bias=bias, dtype=dtype)

    def __call__(
        self, x_BLD: jax.Array, rope: tuple[jax.Array, jax.Array], segment_ids_BL: jax.Array | None
    ) -> jax.Array:
        """[B, L, D] -> [B, L, D]; a token sees the tokens before it that have its own segment id."""
        repeats = kv_repeats(self.config, mesh_axis_size("kv_heads"))
        q, k, v = project((self.q_proj, self.k_proj, self.v_proj), x_BLD, (1, repeats, repeats))
        q = apply_rope(constrain(q, "batch", "sequence", "heads", None), *rope)
        k = apply_rope(constrain(k, "batch", "sequence", "kv_heads", None), *rope)
        v = constrain(v, "batch", "sequence", "kv_heads", None)
        q, k, v = (checkpoint_name(a, remat.QKV) for a in (q, k, v))
        y = attention(q, k, v, segment_ids=segment_ids_BL, kernel=self.config.attention)
        return checkpoint_name(self.o_proj(constrain(y, "batch", "sequence", "heads", None)), remat.OUT)


def kv_repeats(config: DecoderConfig, ways: int) -> int:
    """How often a key-value head is repeated so that `ways` devices get whole heads; 1 where nothing helps.

    The least common multiple of key-value heads and ways divides the query heads when both do.
    """
    heads = math.lcm(config.kv_heads, ways)
    return heads // config.kv_heads if config.num_attention_heads % heads == 0 else 1
