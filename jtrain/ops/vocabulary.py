"""The embedding table on a mesh: padded where `tensor` does not divide the vocabulary, and looked up.

Padding exists inside the traced program only: parameters, gradients and logits that leave it have V rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jtrain.ops.collectives import sum_over
from jtrain.ops.logical import constrain, gathered, logical_spec, manual_axes, mesh_axis_size, pin
from jtrain.ops.token_sums import by_group, meet


def pad_vocabulary(table: jax.Array, axis: int) -> jax.Array:
    """Appends zeros along `axis` up to a multiple of the ways that the vocabulary is cut, and pins it there.

    Args:
      table: an embedding table [V, D] (axis 0) or a head [D, V] (axis 1).
      axis: which axis is the vocabulary.
    """
    missing = -table.shape[axis] % mesh_axis_size("vocab")
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


def local_tokens(ids: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Numbers of tokens within this device's part of a vocabulary that manual axes cut.

    Args:
      ids: tokens, any shape.
      size: tokens of a part.

    Returns:
      The numbers (out of range where the token lies elsewhere), and whether the token lies here.
    """
    axes = manual_axes("vocab")
    local = ids - jax.lax.axis_index(axes) * size if axes else ids
    return local, (local >= 0) & (local < size)


@jax.custom_vjp
def _lookup(table_VD: jax.Array, ids_BL: jax.Array) -> jax.Array:
    if not manual_axes("vocab"):
        return jnp.take(table_VD, ids_BL, axis=0, mode="clip")
    local, here = local_tokens(ids_BL, table_VD.shape[0])
    rows = jnp.where(here[..., None], jnp.take(table_VD, local, axis=0, mode="clip"), 0)
    return sum_over(rows.astype(table_VD.dtype), manual_axes("vocab"))


def _lookup_forward(table_VD: jax.Array, ids_BL: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # An empty slice carries the table's shape and type to the backward pass without keeping the table.
    return _lookup(table_VD, ids_BL), (table_VD[:, :0], ids_BL)


def _lookup_backward(residuals: tuple[jax.Array, jax.Array], d_BLD: jax.Array) -> tuple[jax.Array, np.ndarray]:
    like, ids_BL = residuals
    wide = jnp.promote_types(d_BLD.dtype, jnp.float32)
    if manual_axes("vocab"):
        local, here = local_tokens(ids_BL, like.shape[0])
        ids_BL = jnp.where(here, local, like.shape[0])  # out of range: dropped
    shape = (like.shape[0], d_BLD.shape[-1])
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
    return d_VD.astype(like.dtype), np.zeros(ids_BL.shape, jax.dtypes.float0)


_lookup.defvjp(_lookup_forward, _lookup_backward)
