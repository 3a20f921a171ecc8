"""Writes safetensors tensor by tensor, in shards with an index: no shard is ever in memory as a whole.

The format (github.com/huggingface/safetensors): 8 bytes little endian, the length of the header; the header, JSON, name
-> dtype, shape and place; the tensors, one after the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jtrain.checkpoint.hf.folder import INDEX, WEIGHTS

WORDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""Types that are written."""


class Planned(NamedTuple):
    """A tensor that will be written, in one of the types of `WORDS`."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def plan_shards(tensors: Iterable[Planned], limit: int) -> list[list[Planned]]:
    """Tensors in order, as many to a shard as fit in `limit` bytes; a larger one has a shard of its own."""
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        more = nbytes(tensor)
        if shards[-1] and size + more > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += more
    return shards


def nbytes(tensor: Planned) -> int:
    """Its size on disk."""
    return int(np.prod(tensor.shape, dtype=np.int64)) * (4 if tensor.dtype == "float32" else 2)


def write(
    folder: Path,
    shards: Sequence[Sequence[Planned]],
    read: Callable[[str], np.ndarray],
    *,
    writes: bool = True,
) -> None:
    """Writes all shards, and the index where there are several.

    Args:
      folder: exists.
      shards: as `plan_shards` makes them.
      read: name -> the tensor in its planned type; called once for each, in order.
      writes: False: only calls `read` (a process beside the one that writes).

    Raises:
      OSError: the disk is full, or can't be written.
    """
    table: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        table |= {tensor.name: name for tensor in shard}
        if not writes:
            for tensor in shard:
                read(tensor.name)
            continue
        with open(folder / name, "wb") as file:
            file.write(_header(shard))
            for tensor in shard:
                array = read(tensor.name)
                if array.shape != tensor.shape or str(array.dtype) != tensor.dtype:
                    raise RuntimeError(f"{array.dtype}{array.shape} is not as planned: {tensor}")
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
    if writes and len(shards) > 1:
        size = sum(nbytes(tensor) for shard in shards for tensor in shard)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(table.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _header(shard: Sequence[Planned]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in shard:
        begin, end = end, end + nbytes(tensor)
        header[tensor.name] = {"dtype": WORDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text
