"""The embedding table on a mesh: padded where `tensor` does not divide the vocabulary, and looked up.

Padding exists inside the traced program only: parameters, gradients and logits that leave it have V rows.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jtrain.ops.collectives import sum_over
from jtrain.ops.logical import constrain, gathered, logical_spec, manual_axes, mesh_axis_size, pin
from jtrain.ops.region import axes_of, free_region
from jtrain.ops.token_sums import by_group, meet


def pad_vocabulary(table: jax.Array, axis: int) -> jax.Array:
    """Appends zeros along `axis` up to a multiple of the ways that the vocabulary is cut, and pins it there.

    Args:
      table: an embedding table [V, D] (axis 0) or a head [D, V] (axis 1).
      axis: which axis is the vocabulary.
    """
    # A stage's part of the vocabulary keeps its size, which says where the next part begins.
    missing = 0 if manual_axes("vocab") else -table.shape[axis] % mesh_axis_size("vocab")
    if missing:
        # Such a table is stored divided along D. In two moves: whole in V first, then cut there; in one, the
        # partitioner would gather everything everywhere.
        table = constrain(table, *(None if i == axis else "embed" for i in range(table.ndim)))
        table = jnp.pad(table, [(0, missing if i == axis else 0) for i in range(table.ndim)])
        table = constrain(table, *("vocab" if i == axis else "embed" for i in range(table.ndim)))
    at_use = tuple("vocab" if i == axis else None for i in range(table.ndim))
    return gathered(table, at_use, tuple("vocab" if i == axis else "embed" for i in range(table.ndim)))


def embedding_lookup(table_VD: jax.Array, ids_BL: jax.Array) -> jax.Array:
    """Rows of the table, [B, L, D]; the table's gradient is summed in float32 at least and rounded once.

    A token that stands a thousand times in a batch would otherwise lose most of its bfloat16 gradient. Where manual
    axes cut the vocabulary, every device looks up the tokens that it holds, and the rows are summed over the devices.
    """
    return _lookup(pad_vocabulary(table_VD, 0), ids_BL)


@jax.custom_vjp
def _lookup(table_VD: jax.Array, ids_BL: jax.Array) -> jax.Array:
    if not manual_axes("vocab"):
        return jnp.take(table_VD, ids_BL, axis=0, mode="clip")

    def local(table_VD: jax.Array, ids_BL: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        places = _places(ids_BL, table_VD.shape[0], axes)
        here = (places >= 0) & (places < table_VD.shape[0])
        return jnp.where(here[..., None], jnp.take(table_VD, places, axis=0, mode="clip"), 0).astype(table_VD.dtype)

    rows = _by_hand(local, table_VD.shape, (ids_BL,), backward=False)(table_VD, ids_BL)
    return sum_over(rows, manual_axes("vocab"))


def _places(ids: jax.Array, size: int, axes: tuple[str, ...]) -> jax.Array:
    """Numbers of tokens within this device's part [size] of the vocabulary that `axes` cut; elsewhere out of range."""
    return ids - jax.lax.axis_index(axes) * size


def _by_hand(local: Any, shape_VD: tuple[int, ...], tokens: tuple[jax.Array, ...], *, backward: bool) -> Any:
    """`local(*arrays, axes of the vocabulary)` on the shares of a device, whatever axes are still automatic here.

    XLA's partitioner aborts on a gather from a table that an automatic axis cuts, at tokens that another one cuts,
    inside of a manual region (jaxlib 0.12.0.1, spmd_partitioner_util.cc): so every axis is manual.
    """
    region, held = free_region(), manual_axes("vocab")
    if region is None:
        return lambda *arrays: local(*arrays, held)
    table = logical_spec(shape_VD, "vocab", None)
    specs = [logical_spec(x.shape, "batch", "sequence", *[None] * (x.ndim - 2)) for x in tokens]
    cut, divided = axes_of(table[0]), (*axes_of(specs[0][0]), *axes_of(specs[0][1]))

    def summed(*arrays: jax.Array) -> jax.Array:
        return sum_over(local(*arrays, (*held, *cut)), divided if backward else cut)

    if backward:
        return region.shard_map(summed, in_specs=tuple(specs), out_specs=table)
    return region.shard_map(summed, in_specs=(table, *specs), out_specs=PartitionSpec(*specs[0], None))


def _lookup_forward(table_VD: jax.Array, ids_BL: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # An empty slice carries the table's shape and type to the backward pass without keeping the table.
    return _lookup(table_VD, ids_BL), (table_VD[:, :0], ids_BL)


def _lookup_backward(residuals: tuple[jax.Array, jax.Array], d_BLD: jax.Array) -> tuple[jax.Array, np.ndarray]:
    like, ids_BL = residuals
    wide = jnp.promote_types(d_BLD.dtype, jnp.float32)
    shape = (like.shape[0], d_BLD.shape[-1])
    none = np.zeros(ids_BL.shape, jax.dtypes.float0)
    if manual_axes("vocab"):

        def local(ids_BL: jax.Array, d_BLD: jax.Array, axes: tuple[str, ...]) -> jax.Array:
            size = shape[0] // math.prod(jax.lax.axis_size(axis) for axis in axes if axis not in manual_axes("vocab"))
            places = _places(ids_BL, size, axes)
            places = jnp.where(places < 0, size, places)  # out of range: dropped
            return jnp.zeros((size, shape[1]), wide).at[places].add(d_BLD, mode="drop")

        d = d_BLD.astype(wide)
        return _by_hand(local, shape, (ids_BL, d), backward=True)(ids_BL, d).astype(like.dtype), none
    ids, axes = by_group(ids_BL, shape, "vocab", "embed")
    d, _ = by_group(d_BLD.astype(wide), shape, "vocab", "embed")
    zeros = jnp.zeros((*ids.shape[: len(axes)], *shape), wide)
    zeros = pin(zeros, PartitionSpec(*axes, *logical_spec(shape, "vocab", None)))

    def add(zeros_VD: jax.Array, ids_N: jax.Array, d_ND: jax.Array) -> jax.Array:
        return zeros_VD.at[ids_N].add(d_ND, mode="drop")

    for _ in axes:
        add = jax.vmap(add)
    # The sum over the ranks goes straight to where the table is stored.
    d_VD = meet(add(zeros, ids, d), axes, "vocab", "embed")
    return d_VD.astype(like.dtype), none


_lookup.defvjp(_lookup_forward, _lookup_backward)
