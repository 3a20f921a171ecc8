"""Activations cut into chunks for the head, so that logits exist for a part of every row at a time.

Legend: B rows, L tokens, N chunks, P parts of a row that lie apart between blocks, C tokens of a chunk and part,
D model, V vocabulary (padded for the mesh), R data ranks, S spans of a row that lie apart inside blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jtrain.ops.logical import constrain, logical_size, mesh_axis_size, ways

IGNORED = -100
CHUNK_BYTES = 512 * 2**20
"""Logits of a chunk on one device, in bytes of float32: large enough to keep a matrix unit busy."""


class Cut(NamedTuple):
    """How rows are cut.

    Attributes:
      vocab: size of the vocabulary without padding.
      ranks: data-parallel ranks that the rows are divided over.
      spans: spans of a row that lie apart inside blocks, too (`context`); they divide the parts.
    """

    vocab: int
    ranks: int
    spans: int


def cut(hidden: jax.Array, targets: jax.Array, vocab: int, chunk_size: int | None) -> tuple[jax.Array, jax.Array, Cut]:
    """Activations [B, L, D] and targets [B, L] as [N, B, P, C, D] and [N, B, P, C].

    A chunk takes as many tokens from every part of a row that the mesh has cut: each device has some of them at hand.

    Args:
      hidden: activations.
      targets: what each must predict, IGNORED: nothing.
      vocab: columns of the head here.
      chunk_size: tokens of a row whose logits exist at a time; None: by size. Two tokens and more make two chunks.
    """
    b, length, _ = hidden.shape
    parts = ways(length, "residual_sequence")
    chunks = min(_chunk_count(b, length, vocab, chunk_size), length // parts)
    missing = -(length // parts) % chunks
    x = jnp.pad(hidden.reshape(b, parts, -1, hidden.shape[-1]), ((0, 0), (0, 0), (0, missing), (0, 0)))
    t = jnp.pad(targets.reshape(b, parts, -1), ((0, 0), (0, 0), (0, missing)), constant_values=IGNORED)
    x_NBPCD = jnp.moveaxis(x.reshape(b, parts, chunks, -1, x.shape[-1]), 2, 0)
    t_NBPC = jnp.moveaxis(t.reshape(b, parts, chunks, -1), 2, 0)
    x_NBPCD = constrain(x_NBPCD, None, "batch", "residual_sequence", None, None)
    ranks = mesh_axis_size("batch")
    whole = logical_size("vocab", vocab)
    return x_NBPCD, t_NBPC, Cut(whole, ranks if b % ranks == 0 else 1, ways(parts, "sequence"))


def cut_alike(x_BLX: jax.Array, t_NBPC: jax.Array) -> jax.Array:
    """Numbers of the tokens [B, L, *X] as [N, B, P, C, *X], cut as the targets are; zeros where these are filled up."""
    n, b, parts, c = t_NBPC.shape
    rest = x_BLX.shape[2:]
    x = x_BLX.reshape(b, parts, -1, *rest)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, n * c - x.shape[2]), *[(0, 0)] * len(rest)))
    return jnp.moveaxis(x.reshape(b, parts, n, c, *rest), 2, 0)


def joined(x_NBPCX: jax.Array, length: int) -> jax.Array:
    """The inverse of `cut` for numbers of the tokens: [N, B, P, C, *X] as [B, L, *X]."""
    n, b, parts, c, *rest = x_NBPCX.shape
    x = jnp.moveaxis(x_NBPCX, 0, 2).reshape(b, parts, n * c, *rest)
    return x[:, :, : length // parts].reshape(b, length, *rest)


def at_use(x_BPCD: jax.Array) -> jax.Array:
    """A chunk with all its tokens on every device that holds a part of the vocabulary."""
    return constrain(x_BPCD, "batch", "sequence", None, None)


def by_rank(cut: Cut, x_BPCX: jax.Array) -> jax.Array:
    """[B, P, C, X] as [ranks, rows, spans, parts, C, X]."""
    b, parts, tokens, size = x_BPCX.shape
    return x_BPCX.reshape(cut.ranks, b // cut.ranks, cut.spans, parts // cut.spans, tokens, size)


def _chunk_count(rows: int, length: int, vocab: int, chunk_size: int | None) -> int:
    least = min(2, length)
    if chunk_size is not None:
        return max(least, -(-length // min(chunk_size, length)))
    token_bytes: float = 4 * max(1, rows // mesh_axis_size("batch")) * (vocab // mesh_axis_size("vocab"))
    token_bytes /= ways(length, "sequence")
    chunks = least
    # Doubling divides rows of 2^n tokens evenly, so that none is padded.
    while chunks < length and token_bytes * (length / chunks) > CHUNK_BYTES:
        chunks *= 2
    return min(chunks, length)
