"""Rotary positions (Su et al. 2021, eq. 15): channel i of the turning part turns with channel i + half.

DeepSeek's order (`rope_interleave`), where 2i turns with 2i + 1, is brought into this one first: queries and keys
alike, so their products are the same.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.models.config import DecoderConfig
from jtrain.models.rope_scaling import RopeScaling, yarn_scale


class Rope(NamedTuple):
    """Cosine and sine of every phase, [B, L, Dr/2] each: Dr channels of a head turn."""

    cos: jax.Array
    sin: jax.Array


def inverse_frequencies(config: DecoderConfig, *, kind: str = "global", length: int = 0) -> tuple[np.ndarray, float]:
    """Radians a position, and the factor on cosine and sine.

    Args:
      config: the decoder.
      kind: `global`, stretched as `rope_scaling` says; or `local`, of base `rope_local_base_freq` and not stretched.
      length: L, tokens of the row; longrope has other factors above `original_length`.

    Returns:
      [Dr/2] float64: theta^(-2i/Dr), stretched; and the factor.
    """
    size = config.rotary_size
    theta = config.rope_theta
    if kind == "local":
        assert config.rope_local_base_freq is not None
        theta = config.rope_local_base_freq
    frequencies = theta ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    scaling = config.rope_scaling
    if scaling is None or kind == "local":
        return frequencies, 1.0
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _by_wavelength(frequencies, scaling), 1.0
    if scaling.rope_type == "yarn":
        return _by_channel(frequencies, scaling, theta), _yarn_factor(scaling)
    factors = scaling.long_factor if length > scaling.original_length else scaling.short_factor
    return frequencies / np.asarray(factors, np.float64), _longrope_factor(scaling)


def _by_wavelength(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    turns = scaling.original_length * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def _by_channel(frequencies: np.ndarray, scaling: RopeScaling, theta: float) -> np.ndarray:
    """YaRN, eq. 17-20 (`find_correction_range` of its reference code)."""
    size = 2 * len(frequencies)

    def channel(turns: float) -> float:
        """The channel that turns so often in the first length."""
        return size * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    stretched = np.clip((np.arange(size // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return stretched * frequencies / scaling.factor + (1.0 - stretched) * frequencies


def _yarn_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_scale(scaling.factor, scaling.mscale) / yarn_scale(scaling.factor, scaling.mscale_all_dim)
    return yarn_scale(scaling.factor)


def _longrope_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(scaling.factor) / math.log(scaling.original_length))


def rope_tables(
    config: DecoderConfig,
    position_ids_BL: jax.Array,
    dtype: jnp.dtype,
    *,
    kind: str = "global",
    length: jax.Array | None = None,
) -> Rope:
    """Cosine and sine of every phase.

    Phases are float32 at least: in bfloat16 a phase at position 16,000 is wrong by up to 32 radians.

    Args:
      config: the decoder.
      position_ids_BL: position of each token.
      dtype: the compute type; float64 gives float64 tables, all others float32.
      kind: `global` or `local`, see `inverse_frequencies`; `none` turns nothing.
      length: tokens of each row [B]; by default L, that of the positions.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    if kind == "none":
        shape = (*position_ids_BL.shape, config.rotary_size // 2)
        return Rope(jnp.ones(shape, wide), jnp.zeros(shape, wide))
    frequencies, factor = inverse_frequencies(config, kind=kind, length=position_ids_BL.shape[1])
    turned = jnp.asarray(frequencies, wide)
    scaling = config.rope_scaling
    if length is not None and scaling is not None and scaling.rope_type == "longrope":
        short, long = (
            jnp.asarray(inverse_frequencies(config, kind=kind, length=scaling.original_length + more)[0], wide)
            for more in (0, 1)
        )
        turned = jnp.where(length[:, None, None] > scaling.original_length, long, short)
    phase = position_ids_BL[..., None].astype(wide) * turned
    cos, sin = jnp.cos(phase), jnp.sin(phase)
    return Rope(cos, sin) if factor == 1.0 else Rope(cos * factor, sin * factor)


def apply_rope(x_BLHDh: jax.Array, rope: Rope | None, *, interleave: bool = False) -> jax.Array:
    """Turns the first Dr channels of every head by its position; the result has the input's type.

    Args:
      x_BLHDh: heads.
      rope: tables of Dr/2 phases; None turns nothing.
      interleave: whether 2i turns with 2i + 1; in the result it is i with i + half all the same.
    """
    if rope is None:
        return x_BLHDh
    cos, sin = rope.cos[:, :, None, :], rope.sin[:, :, None, :]
    half = rope.cos.shape[-1]
    turning, still = x_BLHDh[..., : 2 * half].astype(cos.dtype), x_BLHDh[..., 2 * half :]
    first, second = (turning[..., 0::2], turning[..., 1::2]) if interleave else jnp.split(turning, 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    if not still.shape[-1]:
        return jnp.concatenate(turned, axis=-1).astype(x_BLHDh.dtype)
    return jnp.concatenate([*(part.astype(x_BLHDh.dtype) for part in turned), still], axis=-1)
