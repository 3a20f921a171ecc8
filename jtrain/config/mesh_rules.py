"""Numbers of a mesh: the size of every axis, and what is wrong with them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jtrain.config.schema import MeshConfig
from jtrain.errors import ConfigError

AXES = ("data", "fsdp", "pipeline", "context", "tensor", "expert")
"""Mesh axes, outermost first."""
BATCH_AXES = ("data", "fsdp", "expert")
"""Axes that divide the rows of a batch."""


def mesh_text(mesh: MeshConfig | dict[str, int]) -> str:
    """`data=2,fsdp=4`: the axes that are not 1."""
    sizes = mesh if isinstance(mesh, dict) else {axis: getattr(mesh, axis) for axis in AXES}
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "data=1"


def mesh_numbers(mesh: MeshConfig, name: str = "mesh") -> None:
    """Sees that every axis has a size, and that one of them at most takes what is left.

    Args:
      mesh: the section.
      name: of the field, for messages.

    Raises:
      ConfigError: it is not so.
    """
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    for axis, size in sizes.items():
        if size == 0 or size < -1:
            raise ConfigError(f"{name}.{axis}: {size} is not a size", "Write a number above 0, or -1: what is left.")
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        remedy = f"Only one axis takes what is left: give {' or '.join(free)} a number."
        if free[0] == "data":
            remedy += " (data is -1 unless it is given.)"
        raise ConfigError(f"{name}: {' and '.join(f'{axis}=-1' for axis in free)}", remedy)


def resolve_mesh(
    mesh: MeshConfig,
    n_devices: int,
    *,
    name: str = "mesh",
    devices: str | None = "devices",
    taken: int = 0,
    by: str = "",
) -> dict[str, int]:
    """Size of every mesh axis, in the order of `AXES`, with -1 filled in.

    Args:
      mesh: the section.
      n_devices: devices of this mesh.
      name: of the field, for messages.
      devices: the field that says how many devices there are; None: none does.
      taken: devices of the run that are not this mesh's, for messages.
      by: the field that says so.

    Raises:
      ConfigError: the product is not the number of devices; the message shows it and the nearest legal meshes.
    """
    mesh_numbers(mesh, name)
    sizes = {axis: getattr(mesh, axis) for axis in AXES}
    fixed = math.prod(size for size in sizes.values() if size != -1)
    free = next((axis for axis, size in sizes.items() if size == -1), None)
    if n_devices % fixed or (free is None and fixed != n_devices):
        shown = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or (axis, size) == ("data", 1))
        relation = f"does not divide {n_devices} devices" if free else f"is not {n_devices} devices"
        near = ", or ".join(mesh_text(mesh) for mesh in _nearest_meshes(sizes, n_devices))
        less = f" ({n_devices + taken} less the {taken} of {by})" if taken else ""
        other = f"; or {devices}: {fixed + taken}" if devices else ""
        raise ConfigError(f"{name}: {shown} = {fixed} {relation}{less}", f"Write {name}: {near}{other}.")
    if free is not None:
        sizes[free] = n_devices // fixed
    slices = mesh.slices
    if slices > 1 and sizes["data"] % slices and sizes["fsdp"] % slices:
        raise ConfigError(
            f"mesh.slices: {slices} divides neither data={sizes['data']} nor fsdp={sizes['fsdp']}"
            + ("" if name == "mesh" else f" of {name}"),
            f"Make {name}.data a multiple of {slices}: it carries the network between slices.",
        )
    return sizes


def _nearest_meshes(sizes: dict[str, int], n_devices: int, count: int = 3) -> list[dict[str, int]]:
    """The legal meshes with the least change (sum of |log2| of the factors)."""

    def change(mesh: dict[str, int]) -> float:
        return sum(abs(math.log2(mesh[axis] / size)) for axis, size in sizes.items() if size != -1)

    # Axes that were not asked for stay 1, but for those that fit any model.
    asked = [axis for axis in AXES if axis in ("fsdp", "tensor") or (axis != "data" and sizes[axis] != 1)]

    def legal(axes: list[str], left: int) -> Iterator[dict[str, int]]:
        if not axes:
            yield dict.fromkeys(AXES, 1) | {"data": left}
            return
        for size in (d for d in range(1, left + 1) if left % d == 0):
            for rest in legal(axes[1:], left // size):
                yield rest | {axes[0]: size}

    return sorted(legal(asked, n_devices), key=change)[:count]


def data_ranks(mesh: dict[str, int]) -> int:
    """How many ways the rows of a batch are divided."""
    return math.prod(mesh[axis] for axis in BATCH_AXES)
