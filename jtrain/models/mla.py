"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1.2, eq. 9-19; DeepSeek-V3, eq. 1-11).

Keys and values of all heads come from one latent of `kv_lora_rank` numbers a token, and positions from one turning key
of `qk_rope_head_dim` channels that the heads share: these two are all that a cache has to keep.

Legend: R rank of the latent, Dn channels of a head that do not turn, Dr channels that do, Dv size of a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jtrain.models import remat
from jtrain.models.config import DecoderConfig
from jtrain.models.lora import merged_kernel
from jtrain.models.norm import HeadNorm
from jtrain.models.projection import Projection, project
from jtrain.models.rope import Rope, apply_rope
from jtrain.ops.attention import WindowChoice, attention
from jtrain.ops.logical import constrain

_LATENT_EPS = 1e-6
"""Of the latents' norms, whatever `norm_eps` (DeepSeek-V3's reference code)."""


class LatentAttention(nnx.Module):
    """Latents, their norms, heads made of them, causal attention within segments, output projection.

    Args:
      config: the decoder; `kv_lora_rank` is set.
      keys: four keys; the first is split for what this has more than `Attention`.
      dtype: type of the parameters.
    """

    def __init__(self, config: DecoderConfig, keys: jax.Array, dtype: jnp.dtype):
        self.config = config
        assert config.kv_lora_rank is not None and config.qk_nope_head_dim and config.qk_rope_head_dim
        std, heads = config.initializer_range, ("heads", config.num_attention_heads)
        embed = (("embed", config.hidden_size),)
        query = (heads, ("head_dim", config.head_size))

        def projection(key: jax.Array, inputs: tuple, outputs: tuple) -> Projection:
            return Projection(key, std, inputs, outputs, bias=False, dtype=dtype)

        first, second = jax.random.split(keys[0])
        if config.q_lora_rank is None:
            self.q_proj = projection(first, embed, query)
        else:
            latent = (("latent", config.q_lora_rank),)
            self.q_a_proj = projection(first, embed, latent)
            self.q_a_norm = HeadNorm(config, latent, dtype, eps=_LATENT_EPS)
            self.q_b_proj = projection(second, latent, query)
        latent = (("latent", config.kv_lora_rank),)
        self.kv_a_proj = projection(keys[1], embed, (("latent", config.kv_lora_rank + config.qk_rope_head_dim),))
        self.kv_a_norm = HeadNorm(config, latent, dtype, eps=_LATENT_EPS)
        self.kv_b_proj = projection(keys[2], latent, (heads, ("head_dim", config.qk_nope_head_dim + config.value_size)))
        self.o_proj = projection(keys[3], (heads, ("head_dim", config.value_size)), embed)

    def __call__(
        self,
        x_BLD: jax.Array,
        rope: Rope | None,
        segment_ids_BL: jax.Array | None,
        window: int | WindowChoice | None = None,
    ) -> jax.Array:
        """[B, L, D] -> [B, L, D]; the arguments are those of `Attention`."""
        return self.with_entry(x_BLD, rope, segment_ids_BL, window)[0]

    def with_entry(
        self,
        x_BLD: jax.Array,
        rope: Rope | None,
        segment_ids_BL: jax.Array | None,
        window: int | WindowChoice | None = None,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """As `__call__`, and what a cache keeps of the tokens: latent and shared key [B, L, 1, R + Dr]."""
        q, latent_BLR, k_rope_BLDr = self.queries_and_latent(x_BLD, rope)
        k, v = self.keys_and_values(latent_BLR, k_rope_BLDr)
        q, k, v = (checkpoint_name(a, remat.QKV) for a in (q, k, v))
        y = attention(
            q, k, v, segment_ids=segment_ids_BL, window=window, kernel=self.config.attention, **self._scores()
        )
        return self.output(y), (jnp.concatenate([latent_BLR, k_rope_BLDr], axis=-1)[:, :, None],)

    def step(
        self, x_B1D: jax.Array, rope: Rope | None, attend: Callable[..., jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """One token a row; the arguments are those of `Attention.step`, and the cache keeps [B, 1, R + Dr].

        The latent is never made into heads: what makes keys of it is multiplied with the query instead, and what makes
        values of it with the result (DeepSeek-V2, section 2.1.2: both are absorbed). All heads then share one key.
        """
        config = self.config
        nope, rank = config.qk_nope_head_dim or 0, config.kv_lora_rank or 0
        q, latent, k_rope = self.queries_and_latent(x_B1D, rope)
        kernel_RHC = self._kernel_of_heads(q.dtype)
        q_latent = jnp.einsum("bhn,rhn->bhr", q[:, 0, :, :nope], kernel_RHC[..., :nope])
        query = jnp.concatenate([q_latent, q[:, 0, :, nope:]], axis=-1)
        entry = jnp.concatenate([latent, k_rope], axis=-1)  # [B, 1, R + Dr]: the token is the head
        scale = config.head_size**-0.5 if config.attention_scale is None else config.attention_scale
        mixed = attend(query, entry, entry, **self._scores() | {"scale": scale})[..., :rank]
        return self.output(jnp.einsum("bhr,rhv->bhv", mixed, kernel_RHC[..., nope:])[:, None]), (entry,)

    def _kernel_of_heads(self, dtype: jnp.dtype) -> jax.Array:
        """What makes keys and values of the latent [R, H, Dn + Dv], with what an adapter adds."""
        projection = self.kv_b_proj
        kernel = projection.kernel[...] if projection.adapter is None else merged_kernel(projection)
        return constrain(kernel.astype(dtype), None, "heads", None)

    def _scores(self) -> dict[str, Any]:
        return {"scale": self.config.attention_scale, "softcap": self.config.attn_logit_softcapping}

    def queries_and_latent(self, x_BLD: jax.Array, rope: Rope | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, L, H, Dn + Dr], the latent [B, L, R] and the shared key [B, L, Dr], as a cache keeps them."""
        config = self.config
        nope, rank = config.qk_nope_head_dim or 0, config.kv_lora_rank or 0
        if config.q_lora_rank is None:
            q, latent = project((self.q_proj, self.kv_a_proj), x_BLD)
        else:
            q_latent, latent = project((self.q_a_proj, self.kv_a_proj), x_BLD)
            q = self.q_b_proj(self.q_a_norm(q_latent))
        q = constrain(q, "batch", "sequence", "heads", None)
        turn = {"interleave": config.rope_interleave}
        q = jnp.concatenate([q[..., :nope], apply_rope(q[..., nope:], rope, **turn)], axis=-1)
        k_rope = apply_rope(latent[:, :, None, rank:], rope, **turn)[:, :, 0]
        return q, self.kv_a_norm(latent[..., :rank]), k_rope

    def keys_and_values(self, latent_BLR: jax.Array, k_rope_BLDr: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys [B, L, H, Dn + Dr] and values [B, L, H, Dv] of every head."""
        nope = self.config.qk_nope_head_dim or 0
        kv = constrain(self.kv_b_proj(latent_BLR), "batch", "sequence", "heads", None)
        shared = jnp.broadcast_to(k_rope_BLDr[:, :, None], (*kv.shape[:3], k_rope_BLDr.shape[-1]))
        return jnp.concatenate([kv[..., :nope], shared], axis=-1), kv[..., nope:]

    def output(self, y_BLHDv: jax.Array) -> jax.Array:
        """[B, L, H, Dv] -> [B, L, D]."""
        return checkpoint_name(self.o_proj(constrain(y_BLHDv, "batch", "sequence", "heads", None)), remat.OUT)
