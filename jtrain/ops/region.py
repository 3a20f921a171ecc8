"""A manual region over all mesh axes that are not manual yet: for parts of a model that do their own exchanges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jtrain.ops.logical import current_mesh, logical_spec, region_mesh


class Region(NamedTuple):
    """Where a manual region can be opened.

    Attributes:
      mesh: the mesh in force; inside another region, with that one's axes marked.
      free: mesh axes that become manual.
      platform: of the devices: cpu, gpu or tpu.
    """

    mesh: Mesh | AbstractMesh
    free: frozenset[str]
    platform: str

    def axis(self, name: str, axis: str, *sizes: int) -> str | None:
        """`axis`, if the table gives it to the logical axis `name` and it divides all these sizes; else None."""
        return axis if all(axis in axes_of(logical_spec((size,), name)[0]) for size in sizes) else None

    def size(self, axis: str | None) -> int:
        """Ways in which an axis divides; 1 for None."""
        return 1 if axis is None else self.mesh.shape[axis]

    def shard_map(self, function: Callable[..., Any], *, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` on the shares of one device.

        What the specs do not divide is the same on all devices of an axis; its cotangents are added up over them, each
        with its part (this is what `check_vma=False` means), so that what is computed twice is not counted twice.
        """
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.free),
            check_vma=False,
        )


def free_region() -> Region | None:
    """The region that can be opened here; None where nothing is left to divide."""
    mesh = current_mesh()
    if mesh is None:
        return None
    inner = region_mesh(mesh)
    types = dict(zip(inner.axis_names, inner.axis_types, strict=True))
    free = frozenset(axis for axis, kind in types.items() if kind != AxisType.Manual)
    if all(mesh.shape[axis] == 1 for axis in free):
        return None
    return Region(inner, free, mesh.devices.flat[0].platform)


def by_device(
    kernel: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    sinks: jax.Array | None = None,
    index: jax.Array | None = None,
) -> jax.Array:
    """An attention kernel that XLA does not divide by itself, on every device's own rows and heads.

    Args:
      kernel: `kernel(q, k, v, **given)`; given are, by name, those of the following that are not None.
      q: queries [B, L, H, Dh].
      k: keys [B, L, K, Dh].
      v: values [B, L, K, Dv].
      segment_ids: [B, L].
      sinks: [H].
      index: a scalar, the same on all devices.
    """
    every = {"segment_ids": segment_ids, "sinks": sinks, "index": index}
    given = {name: x for name, x in every.items() if x is not None}
    region = free_region()
    if region is None:
        return kernel(q, k, v, **given)
    rows = logical_spec(q.shape[:2], "batch", None)
    spec_q = logical_spec(q.shape, "batch", None, "heads", None)
    spec_kv = logical_spec(k.shape, "batch", None, "kv_heads", None)
    if spec_q[2] != spec_kv[2]:
        # A device would hold query heads without their key-value head: leave the heads whole.
        spec_q = spec_kv = PartitionSpec(rows[0], None, None, None)
    places = {"segment_ids": rows, "sinks": PartitionSpec(spec_q[2]), "index": PartitionSpec()}
    specs = (spec_q, spec_kv, spec_kv, {name: places[name] for name in given})
    mapped = region.shard_map(lambda q, k, v, given: kernel(q, k, v, **given), in_specs=specs, out_specs=spec_q)
    return mapped(q, k, v, given)


def axes_of(entry: PartitionSpec | tuple[str, ...] | str | None) -> tuple[str, ...]:
    """Mesh axes of one entry of a spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
