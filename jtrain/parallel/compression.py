"""Sums over a slow network in fewer bytes: pure functions over one named axis (of `vmap` or `shard_map`).

Every member of the axis has an addend of the same shape; all of them get the same sum. What a member sent is never
quite what it had: `error` is the difference, which it adds to its next addend (error feedback, Seide et al. 2014;
Karimireddy et al. 2019), so that over many steps nothing is lost:

    sum of all addends = sum of all results + sum over the members of their last errors.

Legend: S members, C elements of a chunk, N matrices of a stack, I rows and J columns of a matrix, R rank.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

INT8_BLOCK = 256
"""Elements that share a scale: 4 bytes on 256, so that int8 costs 1.016 bytes an element."""


class Codec(Protocol):
    """A code of fewer bytes for the last axis of an array."""

    def encode(self, x: jax.Array) -> jax.Array:
        """x [S, C] as integers [S, bytes or so]: XLA may widen floats before it sends them."""
        ...

    def decode(self, code: jax.Array, length: int, dtype: Any) -> jax.Array:
        """[S, length] again, in `dtype`."""
        ...


class Bfloat16:
    """Rounded to bfloat16, sent as 16-bit integers: XLA:CPU would widen bfloat16 to float32 on the way."""

    def encode(self, x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)

    def decode(self, code: jax.Array, length: int, dtype: Any) -> jax.Array:
        return jax.lax.bitcast_convert_type(code, jnp.bfloat16)[:, :length].astype(dtype)


class Int8:
    """Rounded to the nearest of 255 steps of its block's largest magnitude (Dettmers et al. 2022, without the tree).

    A block that holds a number that is not finite comes back as numbers that are not finite, so that a check of the
    sum sees them.
    """

    def encode(self, x: jax.Array) -> jax.Array:
        length = x.shape[-1]
        block = min(INT8_BLOCK, length)
        blocks = jnp.pad(x, ((0, 0), (0, -length % block))).reshape(x.shape[0], -1, block)
        scale = (jnp.max(jnp.abs(blocks), axis=-1) / 127).astype(jnp.float32)
        steps = blocks / jnp.where(scale > 0, scale, 1)[..., None]
        code = jnp.clip(jnp.round(steps), -127, 127).astype(jnp.int8)
        # One message: the steps, then the bytes of the scales.
        parts = (code, jax.lax.bitcast_convert_type(scale, jnp.int8))
        return jnp.concatenate([part.reshape(x.shape[0], -1) for part in parts], axis=1)

    def decode(self, code: jax.Array, length: int, dtype: Any) -> jax.Array:
        members, block = code.shape[0], min(INT8_BLOCK, length)
        count = -(-length // block)
        steps, scale = code[:, : count * block], code[:, count * block :]
        scale = jax.lax.bitcast_convert_type(scale.reshape(members, count, 4), jnp.float32)
        blocks = steps.reshape(members, count, block).astype(dtype) * scale[..., None].astype(dtype)
        return blocks.reshape(members, -1)[:, :length]


def sum_coded(x: jax.Array, error: jax.Array | None, axis: str, codec: Codec) -> tuple[jax.Array, jax.Array | None]:
    """The sum over `axis`, sent in a code of fewer bytes.

    A reduce-scatter and an all-gather, as in a ring: each member gets one chunk of all others (all-to-all), adds them
    in the addends' own type and sends the sum, coded again, to all. 2 (S-1)/S codes of x leave a member, as many as
    an all-reduce sends elements. What the second code loses is owed by the member that sent it.

    Args:
      x: the member's addend, of any shape.
      error: what it still owes, of that shape; None: errors are forgotten.
      axis: the named axis.
      codec: `Bfloat16()` or `Int8()`.

    Returns:
      The sum, the same bits on every member, and what the member owes now (None where `error` was).
    """
    members = jax.lax.axis_size(axis)
    flat = (x if error is None else x + error).reshape(-1)
    chunk = -(-flat.size // members)
    mine_SC = jnp.pad(flat, (0, members * chunk - flat.size)).reshape(members, chunk)
    code = codec.encode(mine_SC)
    arrived = jax.lax.all_to_all(code, axis, 0, 0, tiled=True)
    total_C = codec.decode(arrived, chunk, x.dtype).sum(0)
    answer = codec.encode(total_C[None])
    answers = jax.lax.all_gather(answer, axis, axis=0, tiled=True)

    def whole(chunks_SC: jax.Array) -> jax.Array:
        return chunks_SC.reshape(-1)[: flat.size].reshape(x.shape)

    total = whole(codec.decode(answers, chunk, x.dtype))
    if error is None:
        return total, None
    own = (jnp.arange(members) == jax.lax.axis_index(axis))[:, None]
    lost_C = total_C - codec.decode(answer, chunk, x.dtype)[0]
    owed_SC = mine_SC - codec.decode(code, chunk, x.dtype) + jnp.where(own, lost_C, 0)
    return total, whole(owed_SC)


@dataclasses.dataclass(frozen=True)
class MatrixShape:
    """A parameter as a stack of matrices.

    Attributes:
      stack: N, matrices of the stack (layers, experts).
      rows: I.
      columns: J.
    """

    stack: int
    rows: int
    columns: int

    def sketch(self, rank: int) -> tuple[int, int, int]:
        """Shape [N, J, R] of what is kept from step to step."""
        return self.stack, self.columns, rank


def matrix_shape(shape: Sequence[int], rank: int, stacked: int = 0) -> MatrixShape | None:
    """How PowerSGD sees a parameter: the cut between its dimensions that makes I + J least.

    Args:
      shape: of the parameter.
      rank: R.
      stacked: leading dimensions that number layers or experts: every one of them is a matrix of its own.

    Returns:
      None for what is sent as it is: vectors, and matrices whose factors R (I + J) are no smaller than I J.
    """
    inner = tuple(shape[stacked:])
    cuts = [(math.prod(inner[:k]), math.prod(inner[k:])) for k in range(1, len(inner))]
    if not cuts:
        return None
    rows, columns = min(cuts, key=sum)
    if rank * (rows + columns) >= rows * columns:
        return None
    return MatrixShape(math.prod(shape[:stacked]), rows, columns)


def sum_low_rank(
    x: jax.Array, error: jax.Array | None, sketch_NJR: jax.Array, axis: str, shape: MatrixShape
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """The sum over `axis` as matrices of rank R: PowerSGD (Vogels et al. 2019, algorithms 1 and 2).

    One step of subspace iteration from the last step's right factor; two all-reduces of R (I + J) elements a matrix.
    P is made orthonormal by Householder QR, which also holds where P has less than full rank.

    Args:
      x: the member's addend.
      error: what it still owes, of that shape; None: errors are forgotten.
      sketch_NJR: the right factor of the step before, the same on every member; random at first.
      axis: the named axis.
      shape: `matrix_shape` of x.

    Returns:
      The sum, what the member owes now (its addend without what the left factor spans), and the new right factor.
    """
    m_NIJ = (x if error is None else x + error).reshape(shape.stack, shape.rows, shape.columns)
    p_NIR = jnp.linalg.qr(jax.lax.psum(jnp.einsum("nij,njr->nir", m_NIJ, sketch_NJR), axis))[0]
    own_NJR = jnp.einsum("nij,nir->njr", m_NIJ, p_NIR)
    q_NJR = jax.lax.psum(own_NJR, axis)
    total = jnp.einsum("nir,njr->nij", p_NIR, q_NJR).reshape(x.shape)
    owed = None if error is None else (m_NIJ - jnp.einsum("nir,njr->nij", p_NIR, own_NJR)).reshape(x.shape)
    return total, owed, q_NJR
