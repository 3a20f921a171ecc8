"""Which mesh axes a collective runs over, from the groups of devices that XLA prints.

There are three forms: `{{0,1},{2,3}}`, `[4,2]<=[2,4]T(1,0)` (an iota, transposed and cut into rows) and
`mesh['data'=2,'fsdp'=4] {'fsdp'}` (axes by name, with `'fsdp':(2)2` for a part of one). The names in the third are
XLA's, not always the mesh's. Numbers are positions in the mesh's row-major order of devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

_LISTED = re.compile(r"replica_groups=\{(\{[\d,]*\}(?:,\{[\d,]*\})*)?\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{\d+,\d+\}(?:,\{\d+,\d+\})*)?\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\[[\d,]+\]T\([\d,]+\)|[\d,]+)\))? ?\{([^}]*)\}")


def device_groups(attributes: str, devices: int) -> list[list[int]]:
    """Groups of devices of a collective; of a permutation: the pairs (source, target).

    Args:
      attributes: the instruction's attributes.
      devices: of the whole program: a collective without groups runs over all of them.
    """
    if match := _IOTA.search(attributes):
        dims = _numbers(match[3])
        order = np.arange(math.prod(dims)).reshape(dims)
        if match[4]:
            order = order.transpose(_numbers(match[4]))
        return order.reshape(int(match[1]), int(match[2])).tolist()
    if match := _MESH.search(attributes):
        return _mesh_groups(match[1], match[2], match[3])
    if match := _PAIRS.search(attributes) or _LISTED.search(attributes):
        groups = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", match[1] or "")]
        if groups or "source_target_pairs" in match[0]:
            return groups
    return [list(range(devices))]


def mesh_axes(groups: list[list[int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which the members of a group differ, in the mesh's order.

    Args:
      groups: positions in the mesh's row-major order of devices.
      mesh: axis -> size.
    """
    names, sizes = list(mesh), tuple(mesh.values())
    if not names:
        return ()
    used: set[str] = set()
    for group in groups:
        coordinates = np.array(np.unravel_index(group, sizes))
        used.update(name for name, row in zip(names, coordinates, strict=True) if len(np.unique(row)) > 1)
    return tuple(name for name in names if name in used)


def _mesh_groups(axes: str, device_ids: str | None, used: str) -> list[list[int]]:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    parts = {name: (int(before or 1), int(size or sizes[name])) for name, before, size in _used_axes(used)}
    # Every axis becomes (before, part, after); the parts in use go last, so that a row is a group.
    shape: list[int] = []
    place: dict[str, int] = {}
    for name, size in sizes.items():
        before, part = parts.get(name, (1, 1))
        place[name] = len(shape) + 1
        shape += [before, part, size // (before * part)]
    last = [place[name] for name in parts]
    order = _device_order(device_ids, math.prod(sizes.values())).reshape(shape)
    rest = [dim for dim in range(len(shape)) if dim not in last]
    return order.transpose(rest + last).reshape(-1, math.prod(shape[dim] for dim in last)).tolist()


def _used_axes(text: str) -> list[tuple[str, str, str]]:
    return re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", text)


def _device_order(device_ids: str | None, devices: int) -> np.ndarray:
    if device_ids is None:
        return np.arange(devices)
    if iota := re.fullmatch(r"\[([\d,]+)\]T\(([\d,]+)\)", device_ids):
        return np.arange(devices).reshape(_numbers(iota[1])).transpose(_numbers(iota[2])).reshape(-1)
    return np.array(_numbers(device_ids))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
