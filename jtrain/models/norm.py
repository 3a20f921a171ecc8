"""RMSNorm and LayerNorm over the last axes, computed in float32 at least."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jtrain.models.config import DecoderConfig
from jtrain.models.parameters import constant


class Norm(nnx.Module):
    """`rmsnorm`: x / rms(x) * scale (Zhang and Sennrich 2019, eq. 4). `layernorm`: centred, with a bias.

    The result has the input's type, whatever the type of the scale.

    Args:
      config: the decoder.
      dtype: type of the parameters.
    """

    def __init__(self, config: DecoderConfig, dtype: jnp.dtype):
        self.centred = config.norm == "layernorm"
        self.eps = config.norm_eps
        self.offset = float(config.norm_unit_offset)
        self.scale = constant(1.0 - self.offset, (config.hidden_size,), ("norm",), dtype)
        if self.centred:
            self.bias = constant(0.0, (config.hidden_size,), ("norm",), dtype)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        y = _normalised(x_BLD, 1, self.eps, centred=self.centred)
        y = y * (self.scale[...].astype(y.dtype) + self.offset)
        if self.centred:
            y = y + self.bias[...].astype(y.dtype)
        return y.astype(x_BLD.dtype)


class HeadNorm(nnx.Module):
    """RMSNorm of heads or latents, over as many of the last axes as the scale has.

    Args:
      config: the decoder.
      axes: name and size of every axis of the scale.
      dtype: type of the parameters.
      eps: what is added to the mean square; None: the decoder's.
    """

    def __init__(
        self, config: DecoderConfig, axes: tuple[tuple[str, int], ...], dtype: jnp.dtype, *, eps: float | None = None
    ):
        names, shape = zip(*axes, strict=True)
        self.eps = config.norm_eps if eps is None else eps
        self.offset = float(config.norm_unit_offset)
        self.scale = constant(1.0 - self.offset, shape, names, dtype)

    def __call__(self, x: jax.Array, *, repeats: int = 1) -> jax.Array:
        """[..., *axes] -> the same; with `repeats`, x has every head so many times (which leaves the mean as it is)."""
        scale = self.scale[...]
        if repeats > 1 and scale.ndim > 1:
            scale = jnp.repeat(scale, repeats, axis=0)
        y = _normalised(x, scale.ndim, self.eps)
        return (y * (scale.astype(y.dtype) + self.offset)).astype(x.dtype)


def _normalised(x: jax.Array, axes: int, eps: float, *, centred: bool = False) -> jax.Array:
    """x over its root mean square along the last axes, in float32 at least."""
    over = tuple(range(-axes, 0))
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if centred:
        y = y - jnp.mean(y, axis=over, keepdims=True)
    return y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=over, keepdims=True) + eps)
