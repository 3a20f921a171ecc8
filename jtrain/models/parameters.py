"""How parameters are made: drawn in float32 from a key, with the logical name of every axis as metadata.

Drawing in float32 and casting gives all precisions the same initial numbers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

Axes = tuple[str, ...]

FROZEN = {"frozen": True}
"""Metadata of a parameter that is never trained: it has no gradient and no optimizer state."""
OWN_TYPE = {"own_type": True}
"""Metadata of a parameter that is stored in the type that it has, whatever the run's precision."""
COMPUTE_TYPE = {"compute_type": True}
"""Metadata of a parameter that is stored in bfloat16 where the step computes in it, and would round it anyway."""
EXACT = {"exact": True}
"""Metadata of a parameter that is stored and used in the type that it has (scales of quantised weights)."""


def normal(key: jax.Array, std: float, shape: tuple[int, ...], axes: Axes, dtype: jnp.dtype) -> nnx.Param:
    """A parameter from a normal distribution of mean 0 and standard deviation `std`."""
    value = jax.random.normal(key, shape, jnp.float32) * jnp.float32(std)
    return nnx.Param(value.astype(dtype), out_sharding=axes)


def constant(value: float, shape: tuple[int, ...], axes: Axes, dtype: jnp.dtype) -> nnx.Param:
    """A parameter that is `value` everywhere."""
    return nnx.Param(jnp.full(shape, value, dtype), out_sharding=axes)
