"""Tensors go from the disk to the devices one by one; a stack of layers exists on the devices only.

Every process works on the shards of its own devices and leaves out what none of them holds. Nothing is sent between
devices, so the processes need not keep step. On the host there are at most the tensor and one rearranged copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jtrain.checkpoint.hf.weights import Match, Weights
from jtrain.models.families.keys import Slot
from jtrain.parallel.xla import compiler_options

Leaves = Mapping[str, jax.ShapeDtypeStruct]


def load(weights: Weights, pairs: Iterable[Match], params: Leaves, variables: Leaves | None = None) -> dict[str, Any]:
    """Reads tensors into arrays with the given types and shardings.

    Args:
      weights: where they are read from.
      pairs: as `match` returns them.
      params: path -> shape, type and sharding.
      variables: the same for what the model keeps beside its parameters; only those that a slot names are read.

    Returns:
      path -> array, for every path that the slots name.

    Raises:
      RuntimeError: the slots leave a part of an array unfilled (a family's map is wrong).
    """
    pairs = list(pairs)
    targets: dict[str, _Target] = {}
    for pair in pairs:
        for slot in pair.tensor.slots:
            if slot.path not in targets:
                leaves = variables if slot.variable else params
                targets[slot.path] = _Target(slot.path, (leaves or {})[slot.path])
            targets[slot.path].expects(slot)
    for target in targets.values():
        target.check()
    for name, tensor in pairs:
        if not any(targets[slot.path].wants(slot) for slot in tensor.slots):
            continue
        # No name holds the tensor itself while its parts are placed: they may be copies.
        parts = list(tensor.split(weights.read(name)))
        for slot in reversed(tensor.slots):
            targets[slot.path].put(slot, parts.pop())
    return {path: target.array() for path, target in targets.items()}


class _Target:
    """One array that is filled part by part, as the shards of this process' devices."""

    def __init__(self, path: str, leaf: jax.ShapeDtypeStruct):
        self.path, self.leaf = path, leaf
        self.shape = tuple(leaf.shape)
        self._places: dict[jax.Device, tuple[slice, ...]] = {
            device: tuple(slice(*part.indices(size)) for part, size in zip(index, self.shape, strict=True))
            for device, index in leaf.sharding.addressable_devices_indices_map(self.shape).items()
        }
        self._local = leaf.sharding.shard_shape(self.shape)
        mesh = Mesh(np.array(list(self._places), dtype=object), ("local",))
        self._everywhere = NamedSharding(mesh, PartitionSpec("local"))
        self._buffer: jax.Array | None = None
        self._depth: int | None = None
        self._filled: set[tuple[int, ...]] = set()

    def expects(self, slot: Slot) -> None:
        """Takes note that a part will come."""
        if self._depth not in (None, len(slot.index)) or slot.index in self._filled:
            raise RuntimeError(f"{self.path}{list(slot.index)} is filled twice")
        self._depth = len(slot.index)
        self._filled.add(slot.index)

    def check(self) -> None:
        """Sees that the parts that will come are the whole array."""
        assert self._depth is not None
        if len(self._filled) != int(np.prod(self.shape[: self._depth], dtype=np.int64)):
            raise RuntimeError(f"{self.path} {self.shape} is filled by {len(self._filled)} parts only")

    def wants(self, slot: Slot) -> bool:
        """Whether a device of this process holds any of that part."""
        return any(_holds(place, slot.index) for place in self._places.values())

    def put(self, slot: Slot, part: np.ndarray) -> None:
        """Copies a part to the devices that hold it, and waits until it is there."""
        depth = len(slot.index)
        if part.shape != self.shape[depth:]:
            raise RuntimeError(f"{self.path}{list(slot.index)} is {self.shape[depth:]}, not {part.shape}")
        pieces: dict[tuple[tuple[int, int], ...], np.ndarray] = {}
        shards, offsets = [], []
        for device, place in self._places.items():
            inner = place[depth:]
            if _holds(place, slot.index):
                key = tuple((cut.start, cut.stop) for cut in inner)
                if key not in pieces:  # one copy, however many devices have it
                    pieces[key] = np.ascontiguousarray(part[inner])[None]
                shards.append(jax.device_put(pieces[key], device))
                offsets.append([at - cut.start for at, cut in zip(slot.index, place, strict=False)])
            else:
                shape = (1, *(cut.stop - cut.start for cut in inner))
                shards.append(jnp.zeros(shape, jax.dtypes.canonicalize_dtype(part.dtype), device=device))
                offsets.append([-1] * depth)
        shape = (len(shards), *shards[0].shape[1:])
        moved = jax.make_array_from_single_device_arrays(shape, self._everywhere, shards)
        del shards, pieces
        if not depth:
            self._buffer = self._run(_whole, moved)
        else:
            if self._buffer is None:
                self._buffer = self._run(_zeros, shape=self._local)
            places = jax.device_put(np.asarray(offsets, np.int32), self._everywhere)
            self._buffer = self._run(_update, self._buffer, moved, places)
        jax.block_until_ready(self._buffer)

    def array(self) -> jax.Array:
        """The whole array, in its sharding."""
        assert self._buffer is not None
        by_device = {shard.device: shard.data for shard in self._buffer.addressable_shards}
        place = self.leaf.sharding
        on_host = place.memory_kind == "pinned_host"
        array = jax.make_array_from_single_device_arrays(
            self.shape, place.with_memory_kind("device") if on_host else place, [by_device[d] for d in self._places]
        )
        self._buffer = None
        return jax.device_put(array, place) if on_host else array

    def _run(self, function: Callable[..., Any], *arrays: jax.Array, **static: Any) -> jax.Array:
        return _program(function, self._everywhere, str(self.leaf.dtype), len(arrays), **static)(*arrays)


def _holds(place: tuple[slice, ...], index: tuple[int, ...]) -> bool:
    """Whether a shard has (a part of) the entry with these leading indices."""
    return all(cut.start <= at < cut.stop for cut, at in zip(place, index, strict=False))


@cache
def _program(function: Callable[..., Any], everywhere: NamedSharding, dtype: str, inputs: int, **static: Any) -> Any:
    """`function` on every device for itself; the first of several arguments is overwritten."""
    platform = everywhere.mesh.devices.flat[0].platform
    mapped = jax.shard_map(
        partial(function, dtype=dtype, **static),
        mesh=everywhere.mesh,
        in_specs=(everywhere.spec,) * inputs,
        out_specs=everywhere.spec,
        check_vma=False,
    )
    options = compiler_options(platform, run_once=True)
    return jax.jit(mapped, donate_argnums=0 if inputs > 1 else (), compiler_options=options)


def _zeros(*, dtype: str, shape: tuple[int, ...]) -> jax.Array:
    return jnp.zeros(shape, dtype)


def _whole(part: jax.Array, *, dtype: str) -> jax.Array:
    return part[0].astype(dtype)


def _update(stack: jax.Array, part: jax.Array, place: jax.Array, *, dtype: str) -> jax.Array:
    """The stack with a part in its place [1, depth]; place -1: this device holds none of it."""
    at, here = jnp.maximum(place[0], 0), place[0, 0] >= 0
    begin = (*at, *[at.dtype.type(0)] * (stack.ndim - at.size))  # of one type also under x64
    size = ((1,) * at.size) + part.shape[1:]
    old = jax.lax.dynamic_slice(stack, begin, size)
    return jax.lax.dynamic_update_slice(stack, jnp.where(here, part.astype(dtype).reshape(size), old), begin)
