"""RMSNorm and LayerNorm over the last axis, computed in float32 at least."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jtrain.models.config import DecoderConfig
from jtrain.models.parameters import constant


class Norm(nnx.Module):
    """`rmsnorm`: x / rms(x) * scale (Zhang and Sennrich 2019, eq. 4). `layernorm`: centred, with a bias.

    The result has the input's type, whatever the type of the scale.
    """

    def __init__(self, config: DecoderConfig, dtype: jnp.dtype):
        self.centred = config.norm == "layernorm"
        self.eps = config.norm_eps
        self.scale = constant(1.0, (config.hidden_size,), ("norm",), dtype)
        if self.centred:
            self.bias = constant(0.0, (config.hidden_size,), ("norm",), dtype)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
        y = x_BLD.astype(wide)
        if self.centred:
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        y = y * self.scale[...].astype(wide)
        if self.centred:
            y = y + self.bias[...].astype(wide)
        return y.astype(x_BLD.dtype)
