"""The device mesh: six named axes, ICI inside a slice, DCN across slices.

`data fsdp pipeline context tensor expert`, outermost first: neighbours in the device order share the later axes, so
that the axes that talk most (`tensor`, `expert`) lie on the fastest links.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jtrain.config.load import load_config
from jtrain.config.mesh_rules import AXES, BATCH_AXES, resolve_mesh
from jtrain.config.schema import MeshConfig
from jtrain.errors import ConfigError

_ACROSS_SLICES = ("data", "fsdp")
"""Axes that may span the slow network between slices, in order of preference."""


def make_mesh(
    mesh: MeshConfig | Mapping[str, int] | str | None = None, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Builds the mesh over all devices, in an order that suits the network.

    Args:
      mesh: a config section, a dict, or the short form `"fsdp=4,tensor=2"` (unnamed axes are 1, `data` takes the rest).
      devices: the devices; by default all of the run.

    Returns:
      A mesh with the axes `data fsdp pipeline context tensor expert`, all of type Auto.

    Raises:
      ConfigError: the axes do not multiply to the number of devices, or no axis can span the slices.
    """
    if not isinstance(mesh, MeshConfig):
        mesh = load_config({"mesh": mesh} if mesh else None, env={}).mesh
    devices = list(jax.devices() if devices is None else devices)
    sizes = resolve_mesh(mesh, len(devices))
    shape = tuple(sizes[axis] for axis in AXES)
    groups = _slices_of(devices, mesh.slices)
    array = _arrange(shape, groups[0]) if len(groups) == 1 else _arrange_slices(shape, groups)
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def data_ranks(mesh: Mesh | Mapping[str, int]) -> int:
    """Number of data-parallel ranks: the ways in which the rows of a batch are divided."""
    sizes = mesh.shape if isinstance(mesh, Mesh) else mesh
    return math.prod(sizes[axis] for axis in BATCH_AXES)


def describe(mesh: Mesh) -> str:
    """The axes that are larger than 1, for the log: `data=2 fsdp=2 tensor=2`."""
    return " ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "one device"


def _arrange(shape: tuple[int, ...], devices: list[jax.Device]) -> np.ndarray:
    if devices[0].platform == "cpu":
        return np.asarray(devices, dtype=object).reshape(shape)
    return mesh_utils.create_device_mesh(shape, devices=devices, allow_split_physical_axes=True)


def _arrange_slices(shape: tuple[int, ...], groups: list[list[jax.Device]]) -> np.ndarray:
    """Slices across the first axis that they divide; every other axis stays inside a slice."""
    slices = len(groups)
    sizes = dict(zip(AXES, shape, strict=True))
    across = next(axis for axis in _ACROSS_SLICES if sizes[axis] % slices == 0)  # resolve_mesh made sure
    inside = tuple(size // slices if axis == across else size for axis, size in sizes.items())
    position = AXES.index(across)
    return np.concatenate([_arrange(inside, group) for group in groups], axis=position)


def _slices_of(devices: list[jax.Device], slices: int) -> list[list[jax.Device]]:
    """The devices of each slice. TPUs say which; elsewhere equal runs of the device order, hosts that belong together
    (as the hardware says) side by side: several may be one island."""
    by_slice: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_slice.setdefault(getattr(device, "slice_index", 0) or 0, []).append(device)
    ordered = [device for index in sorted(by_slice) for device in by_slice[index]]
    if len(by_slice) == 1 or devices[0].platform != "tpu":
        size = len(devices) // slices
        return [ordered[i * size : (i + 1) * size] for i in range(slices)]
    if len(by_slice) != slices or len({len(group) for group in by_slice.values()}) != 1:
        found = ", ".join(f"slice {index}: {len(group)}" for index, group in sorted(by_slice.items()))
        raise ConfigError(
            f"mesh.slices={slices}, but the devices lie in {len(by_slice)} slices ({found})",
            f"write mesh.slices: {len(by_slice)}",
        )
    return [by_slice[index] for index in sorted(by_slice)]
