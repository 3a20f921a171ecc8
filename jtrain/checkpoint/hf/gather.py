"""One layer of a stack, from the devices to the host: the way back of `placement`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.models.families.keys import Slot, Tensor
from jtrain.parallel.xla import compiler_options

_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def tensor_of(tensor: Tensor, params: Mapping[str, jax.Array], variables: Mapping[str, jax.Array], dtype: str) -> Any:
    """A tensor as it stands on disk, on the host.

    With several processes all of them call it in the same order, and all get it. On the devices there is one part more
    than before, on the host there are at most the parts and the tensor.

    Args:
      tensor: the family's.
      params: path -> array.
      variables: path -> array.
      dtype: of the result; numbers are rounded on the devices.
    """
    parts = [part_of((variables if slot.variable else params)[slot.path], slot, dtype) for slot in tensor.slots]
    joined = tensor.join(tuple(parts))
    del parts
    return np.ascontiguousarray(joined).reshape(tensor.shape)  # which would else have an axis at least


def part_of(array: jax.Array, slot: Slot, dtype: str) -> np.ndarray:
    """`array[slot.index]` in another type, on the host.

    Where the stack is divided over layers, the device that has the layer gives it to the others: only that layer is
    sent, bit for bit.
    """
    index = tuple(np.int32(at) for at in slot.index)
    return np.asarray(_slicer(array.sharding, array.shape, len(index), dtype, jax.process_count() > 1)(array, *index))


@cache
def _slicer(
    sharding: NamedSharding, shape: tuple[int, ...], depth: int, dtype: str, everywhere: bool
) -> Callable[..., jax.Array]:
    mesh = sharding.mesh
    spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    leading = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec[:depth]]
    axes = tuple(axis for entry in leading for axis in entry if mesh.shape[axis] > 1)
    inner = PartitionSpec(*spec[depth:])

    def local(stack: jax.Array, *index: jax.Array) -> jax.Array:
        here, begin = jnp.bool_(True), []
        for at, size, entry in zip(index, stack.shape, leading, strict=False):
            at = at - jax.lax.axis_index(entry) * size if entry else at
            here &= (at >= 0) & (at < size)
            begin.append(jnp.clip(at, 0, size - 1))
        begin += [jnp.int32(0)] * (stack.ndim - depth)
        part = jax.lax.dynamic_slice(stack, begin, (1,) * depth + stack.shape[depth:]).reshape(stack.shape[depth:])
        part = part.astype(dtype)
        if not axes:
            return part
        # As whole numbers: 0.0 + -0.0 would lose its sign.
        bits = jax.lax.bitcast_convert_type(part, _BITS[part.dtype.itemsize])
        return jax.lax.bitcast_convert_type(jax.lax.psum(jnp.where(here, bits, 0), axes), part.dtype)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(*spec), *[PartitionSpec()] * depth),
        out_specs=inner,
        check_vma=False,
    )
    place = NamedSharding(mesh, PartitionSpec() if everywhere else inner)
    options = compiler_options(mesh.devices.flat[0].platform, run_once=True)
    return jax.jit(mapped, out_shardings=place, compiler_options=options)
