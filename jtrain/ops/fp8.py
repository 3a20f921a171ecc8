"""Products of matrices in 8-bit floats: e4m3 forward, e5m2 for gradients (Micikevicius et al. 2022, "FP8 formats").

Current scaling: a tensor is multiplied by the power of two that brings its largest absolute value just under the
format's, then rounded. The power is a figure of the tensor at hand, so that nothing is kept between steps. Products
add in float32 and come out in the operands' own type; scaling that by a power of two is exact.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Mode = Literal["native", "emulate"]
Dimensions = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]

FORWARD, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2

_mode: contextvars.ContextVar[Mode | None] = contextvars.ContextVar("fp8", default=None)


@contextlib.contextmanager
def fp8_products(mode: Mode | None) -> Iterator[None]:
    """Says how projections multiply while a function is traced.

    Args:
      mode: native: products of 8-bit operands, which the backend has to have; emulate: the operands are rounded to
        8 bits and multiplied in their own type, on any backend; None: no fp8.
    """
    token = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(token)


def fp8_mode() -> Mode | None:
    """How projections multiply at present."""
    return _mode.get()


def has_fp8(device: jax.Device) -> bool:
    """Whether the device multiplies 8-bit floats: NVIDIA GPUs from compute capability 8.9 (L4, L40S, H100) on."""
    capability = str(getattr(device, "compute_capability", "") or "")
    with contextlib.suppress(ValueError):
        major, _, minor = capability.partition(".")
        return (int(major), int(minor or 0)) >= (8, 9)
    return False


def rounded(x: jax.Array, kind: DTypeLike, mode: Mode) -> tuple[jax.Array, jax.Array]:
    """x as (values, scale), x ≈ values * scale: values in 8 bits (emulate: the same values in x's type).

    Args:
      x: any shape; one scale for all of it.
      kind: `FORWARD` or `GRADIENT`.
      mode: see `fp8_products`.

    Returns:
      The values, and a power of two in x's type. A tensor with a number that is not finite stays so.
    """
    largest = float(jnp.finfo(kind).max)
    amax = jnp.abs(x).max().astype(jnp.float32)
    # 2^ceil(log2(amax / largest)), exactly: frexp gives amax / largest = m 2^e with m in [0.5, 1).
    mantissa, exponent = jnp.frexp(jnp.where((amax > 0) & jnp.isfinite(amax), amax, largest) / largest)
    scale = jnp.ldexp(jnp.float32(1.0), jnp.where(mantissa == 0.5, exponent - 1, exponent))
    values = jnp.clip(x.astype(jnp.float32) / scale, -largest, largest).astype(kind)  # clip keeps a NaN
    values = jnp.where(jnp.isfinite(amax), values, jnp.full((), jnp.nan, kind))
    return (values.astype(x.dtype) if mode == "emulate" else values), scale.astype(x.dtype)


def dot_general(a: jax.Array, b: jax.Array, dimensions: Dimensions, kinds: tuple[DTypeLike, DTypeLike]) -> jax.Array:
    """`jax.lax.dot_general` in the type of `a`, in fp8 where `fp8_products` says so; `kinds` of both operands."""
    mode = _mode.get()
    if mode is None:
        return jax.lax.dot_general(a, b, dimensions)
    (a8, scale_a), (b8, scale_b) = (rounded(x, kind, mode) for x, kind in zip((a, b), kinds, strict=True))
    return jax.lax.dot_general(a8, b8, dimensions, preferred_element_type=a.dtype) * (scale_a * scale_b)
