"""Checksums of a state: one of every array on every device, and one of the whole.

A checksum is a sum modulo 2^32 of an array's bits, 32 at a time, each times an odd weight that follows from its place
in the whole array. A single flipped bit always changes it. Sums may be added in any order, so that the checksum of a
shard is the same on every device that holds it, and that of an array on every mesh. It guards against faults, not
against someone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.checkpoint import arrays
from jtrain.train.state import StatePlan, TrainState
from jtrain.train.step import to_device

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


class Checksums:
    """Takes the checksums of states of a plan, in one compiled program.

    Args:
      plan: the states' layout.

    Attributes:
      paths: of the arrays ("params/layers/kernel").
      devices: of the mesh, flat.
    """

    def __init__(self, plan: StatePlan):
        self._plan = plan
        self._leaves = {path: leaf for path, leaf in arrays.flatten(plan.abstract).items() if math.prod(leaf.shape)}
        self.paths = list(self._leaves)
        self.devices = list(plan.mesh.devices.flat)
        self._compiled = jax.jit(self._tables, out_shardings=NamedSharding(plan.mesh, PartitionSpec()))

    def __call__(self, state: TrainState) -> np.ndarray:
        """uint32 [arrays, devices], the same on all processes: the checksum of what each device holds of each array."""
        return np.asarray(self._compiled(state)).reshape(len(self.paths), -1)

    def replicas(self, path: str) -> np.ndarray:
        """[G, R] places in `devices`: each row holds the devices that have the same part of an array."""
        mesh, used = self._plan.mesh, _axes(self._leaves[path].sharding.spec)
        places = np.arange(mesh.size).reshape(mesh.devices.shape)
        copies = [i for i, name in enumerate(mesh.axis_names) if name not in used]
        places = np.moveaxis(places, copies, range(-len(copies), 0)) if copies else places[..., None]
        return places.reshape(-1, math.prod(mesh.devices.shape[i] for i in copies))

    def digest(self, table: np.ndarray) -> str:
        """One text for a whole state: the same on every mesh, and another one for other bits."""
        lines = []
        for path, row in zip(self.paths, table, strict=True):
            leaf = self._leaves[path]
            value = int(row[self.replicas(path)[:, 0]].sum(dtype=np.uint64)) % 2**32
            lines.append(f"{path} {leaf.dtype} {leaf.shape} {value:08x}\n")
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def _tables(self, state: TrainState) -> jax.Array:
        """uint32 [arrays, *mesh]."""
        flat = arrays.flatten(to_device(state, self._plan.abstract))
        mesh = self._plan.mesh
        specs = [leaf.sharding.spec for leaf in self._leaves.values()]

        def local(*shards: jax.Array) -> jax.Array:
            sums = jnp.stack([_checksum(x, spec) for x, spec in zip(shards, specs, strict=True)])
            return sums.reshape(len(shards), *[1] * len(mesh.axis_names))

        run: Callable[..., jax.Array] = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=PartitionSpec(None, *mesh.axis_names),
            check_vma=False,
        )
        return run(*(flat[path] for path in self.paths))


def _checksum(x: jax.Array, spec: Any) -> jax.Array:
    """uint32 scalar of one shard, inside of a manual region."""
    entries = [*spec, *[None] * (x.ndim - len(spec))]
    place = jnp.zeros(x.shape, jnp.uint32)  # of each element in the whole array, modulo 2^32
    for dimension, axes in enumerate(entries):
        names = _axes((axes,))
        size = x.shape[dimension] * math.prod(jax.lax.axis_size(name) for name in names)
        index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, dimension)
        if names:
            index += jax.lax.axis_index(names).astype(jnp.uint32) * jnp.uint32(x.shape[dimension])
        place = place * jnp.uint32(size % 2**32) + index
    bits = x.astype(jnp.uint8) if x.dtype == bool else x
    bits = jax.lax.bitcast_convert_type(bits, _UNSIGNED[bits.dtype.itemsize]).astype(jnp.uint32)
    if bits.ndim > x.ndim:  # eight bytes are two words
        place = 2 * place[..., None] + jnp.arange(2, dtype=jnp.uint32)
    weight = (place * jnp.uint32(2654435761)) ^ (place >> 15) | jnp.uint32(1)
    return (bits * weight).sum(dtype=jnp.uint32)


def _axes(spec: Any) -> tuple[str, ...]:
    """The mesh axes that a spec divides by."""
    found: list[str] = []
    for entry in spec:
        found += [entry] if isinstance(entry, str) else list(entry or ())
    return tuple(found)
