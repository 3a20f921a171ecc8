"""Sums over the tokens of a batch that lies on many devices: gradients of weights.

XLA adds over all the axes that divide the tokens at once, and cuts the result afterwards: over data=8, fsdp=8 every
device would receive whole gradients. Here the sum over the axes that divide the stored weight comes first (a
reduce-scatter), and the others (`data`, `context`) add what is left of it: parts.

Legend: B rows, L tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jtrain.ops.logical import axis_sizes, constrain, logical_spec, pin


def weight_gradient(
    x_BLX: jax.Array, d_y_BLY: jax.Array, *stored: str | None, dtype: DTypeLike | None = None
) -> jax.Array:
    """Gradient [*X, *Y] of a weight: the sum over rows and tokens of the outer product of input and gradient.

    Args:
      x_BLX: input [B, L, *X].
      d_y_BLY: gradient of the product [B, L, *Y].
      *stored: logical names of the weight's dimensions, which say where it is stored.
      dtype: type of the result; None: that of the operands.
    """
    shape = (*x_BLX.shape[2:], *d_y_BLY.shape[2:])
    axes = _token_axes(x_BLX.shape[:2])
    later = _later(axes, shape, stored)
    if not later:
        return jax.lax.dot_general(x_BLX, d_y_BLY, (((0, 1), (0, 1)), ((), ())), preferred_element_type=dtype)
    x, d_y = (_apart(operand, axes) for operand in (x_BLX, d_y_BLY))
    split = x.ndim - (x_BLX.ndim - 2)
    kept = [axis for axis, place in _places(axes) if axis in later]
    places = [place for axis, place in _places(axes) if axis in later]
    summed = [place for place in range(split) if place not in places]
    parts = jax.lax.dot_general(x, d_y, ((summed, summed), (places, places)), preferred_element_type=dtype)
    return meet(parts, kept, *stored)


def meet(parts: jax.Array, axes: Sequence[str], *stored: str | None) -> jax.Array:
    """The sum of `parts` [n, m, ..., *shape] over its leading dimensions, which lie on one mesh axis each.

    Args:
      parts: one entry of every leading dimension on every device.
      axes: mesh axes of the leading dimensions.
      *stored: logical names of the dimensions of the sum, which say where it is stored.
    """
    spec = logical_spec(parts.shape[len(axes) :], *stored)
    held = _mesh_axes(spec)
    first = tuple(place for place, axis in enumerate(axes) if axis in held)
    later = [axis for axis in axes if axis not in held]
    if first and later:
        parts = pin(parts.sum(first), PartitionSpec(*later, *spec))
        return constrain(_sum(parts, len(later)), *stored)
    if not first:
        parts = pin(parts, PartitionSpec(*later, *spec))
    return constrain(_sum(parts, len(axes)), *stored)


def _sum(parts: jax.Array, count: int) -> jax.Array:
    """The sum over the leading dimensions, in the type of the parts, which is what travels: `jnp.sum` would widen."""
    return jax.lax.reduce(parts, jnp.zeros((), parts.dtype), jax.lax.add, tuple(range(count)))


def rank_axes(name: str, size: int) -> tuple[list[str], list[int]]:
    """The mesh axes that cut a logical axis of this size, and their sizes."""
    axes = _mesh_axes(logical_spec((size,), name))
    return axes, axis_sizes(axes)


def by_group(x_BL: jax.Array, stored_shape: Sequence[int], *stored: str | None) -> tuple[jax.Array, list[str]]:
    """[B, L, ...] as [n, m, ..., tokens, ...]: a leading dimension for each axis that adds last; and these axes."""
    axes = _token_axes(x_BL.shape[:2])
    later = _later(axes, stored_shape, stored)
    places = [place for axis, place in _places(axes) if axis in later]
    x = _apart(x_BL, axes)
    split = x.ndim - (x_BL.ndim - 2)
    x = jnp.moveaxis(x, places, range(len(places)))
    x = x.reshape(*x.shape[: len(places)], -1, *x.shape[split:])
    return x, [axis for axis, _ in _places(axes) if axis in later]


_TokenAxes = tuple[tuple[list[str], list[int]], tuple[list[str], list[int]]]


def _token_axes(shape: Sequence[int]) -> _TokenAxes:
    """Axes and sizes that cut the rows, and those that cut the tokens."""
    return rank_axes("batch", shape[0]), rank_axes("sequence", shape[1])


def _later(axes: _TokenAxes, shape: Sequence[int], stored: Sequence[str | None]) -> list[str]:
    """The axes that add parts; none where nothing is cut by the others, and one sum does."""
    held = _mesh_axes(logical_spec(shape, *stored))
    cut = [axis for names, _ in axes for axis in names]
    return [axis for axis in cut if axis not in held] if any(axis in held for axis in cut) else []


def _places(axes: _TokenAxes) -> list[tuple[str, int]]:
    """Where an axis stands in what `_apart` returns."""
    rows, tokens = axes[0][0], axes[1][0]
    return [*zip(rows, range(len(rows)), strict=True)] + [
        *zip(tokens, range(len(rows) + 1, len(rows) + 1 + len(tokens)), strict=True)
    ]


def _apart(x_BLX: jax.Array, axes: _TokenAxes) -> jax.Array:
    """[B, L, *X] as [*row axes, rows, *token axes, tokens, *X]: a device keeps what it has."""
    (_, rows), (_, tokens) = axes
    b, length = x_BLX.shape[:2]
    return x_BLX.reshape(*rows, b // math.prod(rows), *tokens, length // math.prod(tokens), *x_BLX.shape[2:])


def _mesh_axes(spec: PartitionSpec) -> list[str]:
    return [axis for entry in spec for axis in ([entry] if isinstance(entry, str) else entry or ())]
