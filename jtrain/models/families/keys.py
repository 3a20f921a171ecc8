"""How a tensor of a Hugging Face folder lies in our parameters: one `Tensor` a key, in plain NumPy.

torch keeps a linear kernel as [out, in]; here it is [in..., out...] with the heads apart, one array over all layers.
Every constructor below gives a `split` (theirs to ours) and a `join` that undoes it bit for bit: both only transpose,
reshape, cut and put together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Parts = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Slot:
    """Where a part of a tensor lies.

    Attributes:
      path: of the array in the tree of parameters, "/"-joined: `layers/attention/q_proj/kernel`.
      index: its leading indices: () for the whole array, (layer,) or (layer, expert).
      variable: whether the tree is that of the variables (`router_bias`), not of the parameters.
    """

    path: str
    index: tuple[int, ...] = ()
    variable: bool = False


@dataclass(frozen=True)
class Tensor:
    """One tensor of a Hugging Face folder.

    Attributes:
      key: its name on disk.
      shape: its shape on disk.
      slots: where its parts lie; a fused tensor has several.
      split: the tensor to its parts, in the order of `slots`.
      join: the exact inverse.
    """

    key: str
    shape: tuple[int, ...]
    slots: tuple[Slot, ...]
    split: Callable[[np.ndarray], Parts]
    join: Callable[[Parts], np.ndarray]


def same(key: str, slot: Slot, *shape: int, ours: tuple[int, ...] | None = None) -> Tensor:
    """A table, a norm's scale or a bias: the same numbers in the same order, in our shape if it is another."""
    inner = shape if ours is None else ours
    return Tensor(key, shape, (slot,), lambda x: (x.reshape(inner),), lambda parts: parts[0].reshape(shape))


def linear(key: str, slot: Slot, inputs: Sequence[int], outputs: Sequence[int]) -> Tensor:
    """torch's Linear [out, in] to [*inputs, *outputs]."""
    rows, columns = math.prod(outputs), math.prod(inputs)
    inner = (*inputs, *outputs)
    return Tensor(
        key,
        (rows, columns),
        (slot,),
        lambda x: (x.T.reshape(inner),),
        lambda parts: parts[0].reshape(columns, rows).T,
    )


def conv1d(key: str, slot: Slot, inputs: Sequence[int], outputs: Sequence[int]) -> Tensor:
    """GPT-2's Conv1D [in, out] to [*inputs, *outputs]."""
    return same(key, slot, math.prod(inputs), math.prod(outputs), ours=(*inputs, *outputs))


def fused(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors that lie in one on disk, one after the other along `axis`; the key is that of the first."""
    sizes = [part.shape[axis] for part in parts]
    shape = list(parts[0].shape)
    shape[axis] = sum(sizes)
    cuts = np.cumsum(sizes)[:-1].tolist()
    counts = np.cumsum([len(part.slots) for part in parts])[:-1].tolist()

    def split(x: np.ndarray) -> Parts:
        pieces = np.split(x, cuts, axis)
        return tuple(y for part, piece in zip(parts, pieces, strict=True) for y in part.split(piece))

    def join(ours: Parts) -> np.ndarray:
        begins, ends = [0, *counts], [*counts, len(ours)]
        pieces = [part.join(ours[a:b]) for part, a, b in zip(parts, begins, ends, strict=True)]
        return np.concatenate(pieces, axis)

    return Tensor(parts[0].key, tuple(shape), tuple(s for part in parts for s in part.slots), split, join)


def interleaved(parts: Sequence[Tensor], groups: int, axis: int) -> Tensor:
    """Tensors of one shape that take turns on disk, block by block, as GPT-NeoX keeps q, k and v of every head.

    Args:
      parts: the tensors, each as if it lay on disk alone.
      groups: blocks that each of them has along `axis`.
      axis: along which they take turns.
    """
    alone = parts[0].shape
    before, size, after = alone[:axis], alone[axis], alone[axis + 1 :]
    blocks = (*before, groups, size // groups, *after)
    shape = (*before, size * len(parts), *after)

    def split(x: np.ndarray) -> Parts:
        y = x.reshape((*before, groups, len(parts), size // groups, *after))
        pieces = np.moveaxis(y, axis + 1, 0)
        return tuple(part.split(piece.reshape(alone))[0] for part, piece in zip(parts, pieces, strict=True))

    def join(ours: Parts) -> np.ndarray:
        pieces = [part.join((one,)).reshape(blocks) for part, one in zip(parts, ours, strict=True)]
        return np.stack(pieces, axis + 1).reshape(shape)

    return Tensor(parts[0].key, shape, tuple(part.slots[0] for part in parts), split, join)
