"""Log-probability of every target token, without a [tokens, vocabulary] buffer.

What `jtrain.ops.cross_entropy` is for a sum, this is for losses that need each token or each row by itself
(preferences, policies, distances between models). The cotangent of a token is known only in the backward pass, so
its chunks of logits are computed once more there.

Legend: see `jtrain.ops.chunks`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.ops.chunks import IGNORED, Cut, at_use, by_rank, cut, joined
from jtrain.ops.collectives import sum_over
from jtrain.ops.cross_entropy import soft_cap
from jtrain.ops.logical import constrain, manual_axes
from jtrain.ops.token_sums import meet, rank_axes
from jtrain.ops.vocabulary import pad_vocabulary


class TokenScores(NamedTuple):
    """Figures of every token [B, L], float32 at least; 0 where there is no target. Only `logps` has a gradient.

    Attributes:
      logps: log-probability of the target.
      entropy: of the distribution, in nats.
      mean_logits: mean of the logits over the vocabulary.
      correct: 1 where the target is the likeliest token.
      log_sum_sq_probs: log of the sum of the squared probabilities.
    """

    logps: jax.Array
    entropy: jax.Array
    mean_logits: jax.Array
    correct: jax.Array
    log_sum_sq_probs: jax.Array


def token_scores(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    softcap: float | None = None,
    chunk_size: int | None = None,
    figures: bool = True,
) -> TokenScores:
    """Scores of the targets under `softmax(hidden @ head)`.

    Args:
      hidden: [B, L, D]; logits are float32 at least, whatever its type.
      head: [D, V].
      targets: [B, L], already shifted: what hidden[t] must predict. -100 is left out.
      softcap: logits z become softcap * tanh(z / softcap) first.
      chunk_size: tokens of a row whose logits exist at a time.
      figures: False: `logps` alone, the others are 0.

    Raises:
      ValueError: a soft cap that is not positive.
    """
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap is {softcap}; write a positive number, or None")
    x_NBPCD, t_NBPC, chunks = cut(hidden, targets, head.shape[1], chunk_size)
    scores = _chunked(_Options(softcap, chunks, figures), x_NBPCD, pad_vocabulary(head, 1), t_NBPC)
    return TokenScores(*(joined(x, targets.shape[1]) for x in scores))


class _Options(NamedTuple):
    softcap: float | None
    cut: Cut
    figures: bool


class _Chunk(NamedTuple):
    logits_BPCV: jax.Array
    """After the soft cap; 0 in the padding."""
    probs_BPCV: jax.Array
    target_BPCV: jax.Array
    """One-hot targets, as booleans (fused, never stored)."""
    real_V: jax.Array
    """Which columns are tokens, and not padding."""
    live_BPC: jax.Array
    target_z: jax.Array
    top_z: jax.Array
    log_z: jax.Array


def _chunk(options: _Options, x_BPCD: jax.Array, head_DV: jax.Array, t_BPC: jax.Array) -> _Chunk:
    wide = jnp.promote_types(x_BPCD.dtype, jnp.float32)
    z = jnp.einsum("bpcd,dv->bpcv", x_BPCD, head_DV, preferred_element_type=wide)
    z = soft_cap(constrain(z, "batch", "sequence", None, "vocab"), options.softcap)
    # Where manual axes cut the vocabulary, a device has its own tokens only: what runs over all is summed over them.
    parts = manual_axes("vocab")
    token = jnp.arange(z.shape[-1]) + (jax.lax.axis_index(parts) * z.shape[-1] if parts else 0)
    real = token < options.cut.vocab
    target = token == t_BPC[..., None]
    top_z = jnp.max(jnp.where(real, z, -jnp.inf), axis=-1)
    top_z = jax.lax.pmax(top_z, parts) if parts else top_z
    sum_z = jnp.sum(jnp.where(real, jnp.exp(z - top_z[..., None]), 0.0), axis=-1)
    target_z = jnp.sum(jnp.where(target, z, 0.0), axis=-1)
    sum_z, target_z = sum_over((sum_z, target_z), parts)
    log_z = jnp.log(sum_z) + top_z
    probs = jnp.where(real, jnp.exp(z - log_z[..., None]), 0.0)
    return _Chunk(z, probs, target, real, t_BPC != IGNORED, target_z, top_z, log_z)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(options: _Options, x_NBPCD: jax.Array, head_DV: jax.Array, t_NBPC: jax.Array) -> TokenScores:
    def body(carry: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, TokenScores]:
        c = _chunk(options, at_use(xs[0]), head_DV, xs[1])
        logps = jnp.where(c.live_BPC, c.target_z - c.log_z, 0.0)
        if not options.figures:
            return carry, TokenScores(logps, *[jnp.zeros_like(logps)] * 4)
        z = jnp.where(c.real_V, c.logits_BPCV, 0.0)
        sums = (jnp.sum(c.probs_BPCV * z, axis=-1), jnp.sum(z, axis=-1), jnp.sum(jnp.square(c.probs_BPCV), axis=-1))
        expected_z, sum_of_z, squares = sum_over(sums, manual_axes("vocab"))
        figures = TokenScores(
            logps=logps,
            entropy=c.log_z - expected_z,
            mean_logits=sum_of_z / options.cut.vocab,
            correct=(c.target_z >= c.top_z).astype(z.dtype),
            log_sum_sq_probs=jnp.log(squares),
        )
        return carry, TokenScores(*(jnp.where(c.live_BPC, x, 0.0) for x in figures))

    return jax.lax.scan(body, None, (x_NBPCD, t_NBPC))[1]


def _chunked_forward(
    options: _Options, x_NBPCD: jax.Array, head_DV: jax.Array, t_NBPC: jax.Array
) -> tuple[TokenScores, tuple[jax.Array, jax.Array, jax.Array]]:
    return _chunked(options, x_NBPCD, head_DV, t_NBPC), (x_NBPCD, head_DV, t_NBPC)


def _chunked_backward(options: _Options, residuals: tuple[jax.Array, ...], cotangents: TokenScores):
    x_NBPCD, head_DV, t_NBPC = residuals
    half = x_NBPCD.dtype
    wide = jnp.promote_types(half, jnp.float32)
    vocabulary = manual_axes("vocab")

    def body(d_head_RSDV: jax.Array, xs: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, t, d_logps = at_use(xs[0]), xs[1], xs[2]
        c = _chunk(options, x, head_DV, t)
        d_z = (c.target_BPCV - c.probs_BPCV) * jnp.where(c.live_BPC, d_logps, 0.0)[..., None]
        if options.softcap is not None:
            d_z = d_z * (1.0 - jnp.square(c.logits_BPCV / options.softcap))
        d_z = constrain(d_z.astype(half), "batch", "sequence", None, "vocab")
        d_x = jnp.einsum("bpcv,dv->bpcd", d_z, head_DV, preferred_element_type=wide if vocabulary else half)
        # A sum over the parts of the vocabulary, of which a device keeps the tokens that it brought.
        d_x = constrain(sum_over(d_x, vocabulary).astype(half), "batch", "residual_sequence", None, None)
        # Every rank sums its own tokens; the ranks meet once, after the loop, instead of once a chunk.
        by_ranks = by_rank(options.cut, x), by_rank(options.cut, d_z)
        d_head = jnp.einsum("rbspcd,rbspcv->rsdv", *by_ranks, preferred_element_type=wide)
        return constrain(d_head_RSDV + d_head, "batch", "sequence", None, "vocab"), d_x

    start = jnp.zeros((options.cut.ranks, options.cut.spans, *head_DV.shape), wide)
    start = constrain(start, "batch", "sequence", None, "vocab")
    d_head_RSDV, d_x_NBPCD = jax.lax.scan(body, start, (x_NBPCD, t_NBPC, cotangents.logps))
    ranks, spans = rank_axes("batch", options.cut.ranks), rank_axes("sequence", options.cut.spans)
    parts = d_head_RSDV.reshape(*ranks[1], *spans[1], *d_head_RSDV.shape[2:])
    d_head = meet(parts, [*ranks[0], *spans[0]], "embed", "vocab")
    return d_x_NBPCD, d_head.astype(head_DV.dtype), np.zeros(t_NBPC.shape, jax.dtypes.float0)


_chunked.defvjp(_chunked_forward, _chunked_backward)
