"""A loss over chunks of logits, with its gradients in the same pass: no matrix product is done twice.

What losses share that are one sum over the tokens: the loss says what a chunk of logits costs and how that changes with
them; this makes of it the gradients of activations and head.

Legend: see `jtrain.ops.chunks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.ops.chunks import Cut, at_use, by_rank
from jtrain.ops.collectives import sum_over
from jtrain.ops.logical import constrain, manual_axes
from jtrain.ops.token_sums import meet, rank_axes

Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def sums_and_gradients(
    cut: Cut,
    x_NBPCD: jax.Array,
    head_DV: jax.Array,
    per_chunk: Any,
    chunk: Callable[[jax.Array, Any], tuple[tuple[jax.Array, ...], jax.Array]],
) -> tuple[tuple[jax.Array, ...], Residuals]:
    """The sums over all chunks, and what `gradients_of` makes the gradients of the first one from.

    Args:
      cut: how the rows are cut.
      x_NBPCD: activations.
      head_DV: the head, padded for the mesh.
      per_chunk: tree of arrays with a leading axis N.
      chunk: `chunk(x_BPCD, its share of per_chunk) -> (sums, gradient of the first sum by the logits [B, P, C, V])`.
    """
    half = x_NBPCD.dtype
    wide = jnp.promote_types(half, jnp.float32)
    kept = wide if half == jnp.float16 else half

    def body(carry: Any, xs: Any) -> Any:
        sums, d_head_RSDV = carry
        x = at_use(xs[0])
        found, d_z = chunk(x, xs[1])
        d_z = constrain((d_z * _lift(half)).astype(half), "batch", "sequence", None, "vocab")
        parts = manual_axes("vocab")
        d_x = jnp.einsum("bpcv,dv->bpcd", d_z, head_DV, preferred_element_type=wide if parts else kept)
        # A sum over the parts of the vocabulary, of which a device keeps the tokens that it brought.
        d_x = constrain(sum_over(d_x, parts).astype(kept), "batch", "residual_sequence", None, None)
        # Every rank sums its own tokens; the ranks meet once, after the loop, instead of once a chunk.
        d_head = jnp.einsum("rbspcd,rbspcv->rsdv", by_rank(cut, x), by_rank(cut, d_z), preferred_element_type=wide)
        d_head_RSDV = constrain(d_head_RSDV + d_head, "batch", "sequence", None, "vocab")
        return (tuple(a + b for a, b in zip(sums, found, strict=True)), d_head_RSDV), d_x

    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (x_NBPCD, per_chunk))
    shapes = jax.eval_shape(lambda x, rest: chunk(at_use(x), rest)[0], *first)
    zeros = tuple(jnp.zeros(shape.shape, shape.dtype) for shape in shapes)
    start = jnp.zeros((cut.ranks, cut.spans, *head_DV.shape), wide)
    start = constrain(start, "batch", "sequence", None, "vocab")
    (sums, d_head_RSDV), d_x_NBPCD = jax.lax.scan(body, (zeros, start), (x_NBPCD, per_chunk))
    # Empty slices carry the operands' types to the backward pass.
    return sums, (d_x_NBPCD, d_head_RSDV, x_NBPCD[:0], head_DV[:0])


def gradients_of(cut: Cut, residuals: Residuals, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients [N, B, P, C, D] and [D, V] of the first sum, times its cotangent."""
    d_x_NBPCD, d_head_RSDV, x_like, head_like = residuals
    factor = cotangent / _lift(x_like.dtype)
    d_x = (d_x_NBPCD * factor).astype(x_like.dtype)
    # The sum over the ranks goes straight to where the head is stored: nothing stands between it and that.
    ranks, spans = rank_axes("batch", cut.ranks), rank_axes("sequence", cut.spans)
    parts = (d_head_RSDV * factor).reshape(*ranks[1], *spans[1], *d_head_RSDV.shape[2:])
    return d_x, meet(parts, [*ranks[0], *spans[0]], "embed", "vocab").astype(head_like.dtype)


def _lift(dtype: jnp.dtype) -> float:
    """float16 ends at 6e-8: gradients are lifted before the cast, and their product with the head is not cast."""
    return 1024.0 if dtype == jnp.float16 else 1.0
