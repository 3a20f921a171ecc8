"""Weights in few bits: int8 with a scale a channel, NF4 with quantised scales (QLoRA, Dettmers et al. 2023).

A quantised weight is a tuple of arrays and knows how to become a weight again; it is never differentiated. Writing a
weight out is elementwise but for the look-up of NF4's table (selects in its place would be quicker to fuse, but XLA
moves their 16 broadcast constants out of the loop over layers, each as large as a weight).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Axes = tuple[str | None, ...]
Kind = Literal["int8", "nf4"]

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The 16 values of a 4-bit NormalFloat: bitsandbytes, `functional.py::get_4bit_type("nf4")`; QLoRA, appendix E."""

BLOCK = 64
"""Weights that share a scale."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Weight:
    """w = codes * scale, with a scale for every output.

    Attributes:
      codes: int8, of the weight's shape.
      scale: float32, of the shape of the output axes: the largest absolute weight of the output / 127.
    """

    codes: jax.Array
    scale: jax.Array

    parts: ClassVar[tuple[str, ...]] = ("codes", "scale")

    @classmethod
    def quantize(cls, weight: jax.Array, inputs: int) -> Int8Weight:
        """Rounds a weight [*inputs, *outputs] whose first `inputs` axes are summed over."""
        wide = weight.astype(jnp.float32)
        scale = jnp.abs(wide).max(tuple(range(inputs))) / 127.0
        return cls(jnp.round(wide / _nonzero(scale)).astype(jnp.int8), scale)

    def dequantize(self, dtype: DTypeLike) -> jax.Array:
        return (self.codes.astype(jnp.float32) * self.scale).astype(dtype)

    @staticmethod
    def names(axes: Axes, inputs: int) -> dict[str, Axes]:
        """Logical axes of the parts, from those of the weight."""
        return {"codes": axes, "scale": axes[inputs:]}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Nf4Weight:
    """w = NF4[codes] * absmax, blocks of up to 64 weights along one axis sharing an absmax, which is quantised as well.

    Double quantisation: absmax = codes8 * scale + mean, in int8, where mean and scale are those of all blocks in line
    along the axis. (The paper takes 256 blocks in a row; lines are as long in a model of width 16,384, and a mesh that
    divides other axes then divides these figures alike: a weight has the same bits on every mesh.)

    Attributes:
      codes: uint8; two codes a byte, those of the first and second half of every block. `axis` is half as long.
      absmax: int8; `axis` counts blocks.
      scale, mean: float32, without `axis`.
      axis: along which blocks lie.
    """

    codes: jax.Array
    absmax: jax.Array
    scale: jax.Array
    mean: jax.Array
    axis: int = dataclasses.field(metadata={"static": True})

    parts: ClassVar[tuple[str, ...]] = ("codes", "absmax", "scale", "mean")

    @classmethod
    def quantize(cls, weight: jax.Array, axis: int) -> Nf4Weight:
        """Rounds a weight to the nearest value of the table, block by block along `axis`, whose size is even."""
        block = block_size(weight.shape[axis])
        blocks = _blocks(weight.astype(jnp.float32), axis, block)
        absmax = jnp.abs(blocks).max(axis + 1)
        share = blocks / jnp.expand_dims(_nonzero(absmax), axis + 1)
        middles = [(low + high) / 2 for low, high in itertools.pairwise(NF4)]
        code = sum((share > middle).astype(jnp.uint8) for middle in middles)
        first, second = jnp.split(code, 2, axis + 1)
        codes = (first | (second << 4)).reshape(*weight.shape[:axis], -1, *weight.shape[axis + 1 :])
        mean = absmax.mean(axis)
        apart = absmax - jnp.expand_dims(mean, axis)
        scale = jnp.abs(apart).max(axis) / 127.0
        rounded = jnp.round(apart / jnp.expand_dims(_nonzero(scale), axis)).astype(jnp.int8)
        return cls(codes, rounded, scale, mean, axis)

    def dequantize(self, dtype: DTypeLike) -> jax.Array:
        axis = self.axis
        scale, mean = (jnp.expand_dims(part, axis) for part in (self.scale, self.mean))
        absmax = self.absmax.astype(jnp.float32) * scale + mean
        halves = _blocks(self.codes, axis, self.codes.shape[axis] // absmax.shape[axis])
        code = jnp.concatenate([halves & 15, halves >> 4], axis + 1)
        weight = jnp.asarray(NF4, jnp.float32)[code.astype(jnp.int32)] * jnp.expand_dims(absmax, axis + 1)
        return weight.reshape(*weight.shape[:axis], -1, *weight.shape[axis + 2 :]).astype(dtype)

    @staticmethod
    def names(axes: Axes, axis: int) -> dict[str, Axes]:
        """Logical axes of the parts, from those of the weight."""
        line = axes[:axis] + axes[axis + 1 :]
        return {"codes": axes, "absmax": axes, "scale": line, "mean": line}


Weight = Int8Weight | Nf4Weight


def quantize(kind: Kind, weight: jax.Array, axes: Axes, inputs: int) -> Weight:
    """Quantises a weight [*inputs, *outputs]; see the classes.

    Raises:
      ValueError: nf4, and every axis is odd.
    """
    if kind == "int8":
        return Int8Weight.quantize(weight, inputs)
    return Nf4Weight.quantize(weight, block_axis(weight.shape, axes))


def part_names(kind: Kind, shape: Sequence[int], axes: Axes, inputs: int) -> dict[str, Axes]:
    """Logical axes of the parts of a weight that is to be quantised."""
    return Int8Weight.names(axes, inputs) if kind == "int8" else Nf4Weight.names(axes, block_axis(shape, axes))


def restore(kind: Kind, parts: dict[str, Any], axis: int) -> Weight:
    """A quantised weight from its parts; `axis` as `block_axis` says (not read for int8)."""
    return Int8Weight(**parts) if kind == "int8" else Nf4Weight(**parts, axis=axis)


def block_axis(shape: Sequence[int], axes: Axes) -> int:
    """The axis along which blocks lie: that of the largest blocks, `embed` (which `tensor` never cuts) before others.

    Raises:
      ValueError: all axes are odd.
    """
    even = [i for i, size in enumerate(shape) if size % 2 == 0]
    if not even:
        raise ValueError(f"a weight of shape {list(shape)} has no axis of even size to put two codes into a byte")
    return max(even, key=lambda i: (block_size(shape[i]), axes[i] == "embed", -i))


def block_size(size: int) -> int:
    """The largest even divisor of `size` up to 64."""
    return next(n for n in range(min(BLOCK, size), 1, -1) if size % n == 0 and n % 2 == 0)


def _blocks(weight: jax.Array, axis: int, block: int) -> jax.Array:
    """[..., n, ...] as [..., n / block, block, ...]."""
    shape = weight.shape
    return weight.reshape(*shape[:axis], shape[axis] // block, block, *shape[axis + 1 :])


def _nonzero(scale: jax.Array) -> jax.Array:
    return jnp.where(scale == 0, 1.0, scale)


def bytes_per_weight(shapes: dict[str, Any], size: int) -> float:
    """Bytes of the parts (arrays or ShapeDtypeStructs) for each of `size` weights."""
    return sum(math.prod(part.shape) * part.dtype.itemsize for part in shapes.values()) / size
