"""Rotary positions (Su et al. 2021, eq. 15) in Hugging Face's layout: channel i turns with channel i + Dh/2."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.models.config import DecoderConfig, RopeScaling


def inverse_frequencies(config: DecoderConfig) -> np.ndarray:
    """Radians a position, [Dh/2] float64: theta^(-2i/Dh), stretched as `rope_scaling` says."""
    frequencies = config.rope_theta ** (-np.arange(0, config.head_size, 2, dtype=np.float64) / config.head_size)
    return frequencies if config.rope_scaling is None else _stretch(frequencies, config.rope_scaling)


def _stretch(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    turns = scaling.original_length * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def rope_tables(config: DecoderConfig, position_ids_BL: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every phase, two [B, L, Dh/2] arrays.

    Phases are float32 at least: in bfloat16 a phase at position 16,000 is wrong by up to 32 radians.

    Args:
      config: the decoder.
      position_ids_BL: position of each token.
      dtype: the compute type; float64 gives float64 tables, all others float32.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    phase = position_ids_BL[..., None].astype(wide) * jnp.asarray(inverse_frequencies(config), wide)
    return jnp.cos(phase), jnp.sin(phase)


def apply_rope(x_BLHDh: jax.Array, cos_BLDh2: jax.Array, sin_BLDh2: jax.Array) -> jax.Array:
    """Turns every head by its position; the result has the input's type."""
    cos, sin = cos_BLDh2[:, :, None, :], sin_BLDh2[:, :, None, :]
    first, second = jnp.split(x_BLHDh.astype(cos.dtype), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BLHDh.dtype)
