"""Drawing the next token: penalties and cut-offs by Hugging Face's definitions and in its order, and the draw itself.

repetition_penalty, then (where a token is drawn, and not the likeliest taken) temperature, top_k, top_p, min_p.

Legend: B rows, V vocabulary. Nothing here sorts the vocabulary: cut-offs are thresholds, which work as well where
`tensor` cuts it, and a sort of 50,000 numbers takes a CPU as long as a third of a small model's step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sampling(NamedTuple):
    """How a token is chosen. Numbers may be traced, so that another value needs no other program.

    Attributes:
      temperature: scores are divided by it; None takes the likeliest token.
      top_k: tokens that stay (a Python integer: it is a shape); None: all.
      top_p: the likeliest tokens stay whose probabilities add up to it; None: all.
      min_p: tokens stay that have this share of the likeliest one's probability; None: all.
      repetition_penalty: what positive scores of tokens that stand in the row are divided by, and negative ones
        multiplied (CTRL, Keskar et al. 2019, section 4.1); None: no penalty.
    """

    temperature: jax.Array | float | None = None
    top_k: int | None = None
    top_p: jax.Array | float | None = None
    min_p: jax.Array | float | None = None
    repetition_penalty: jax.Array | float | None = None


def filtered(logits_BV: jax.Array, how: Sampling, seen_BV: jax.Array | None = None) -> jax.Array:
    """Scores after penalty, temperature and cut-offs; what is cut off is -inf.

    Args:
      logits_BV: of the model, float32 or wider.
      how: the options.
      seen_BV: which tokens stand in each row already, prompt included; for the penalty.

    Raises:
      ValueError: a penalty without `seen_BV`.
    """
    scores = logits_BV
    if how.repetition_penalty is not None:
        if seen_BV is None:
            raise ValueError("a repetition penalty needs seen_BV")
        punished = jnp.where(scores < 0, scores * how.repetition_penalty, scores / how.repetition_penalty)
        scores = jnp.where(seen_BV, punished, scores)
    if how.temperature is None:
        return scores
    scores = scores / how.temperature
    if how.top_k is not None:
        least = jax.lax.top_k(scores, min(how.top_k, scores.shape[-1]))[0][:, -1:]
        scores = jnp.where(scores < least, -jnp.inf, scores)
    if how.top_p is not None:
        scores = _top_p(scores, how.top_p)
    if how.min_p is not None:
        probability = jax.nn.softmax(scores)
        best = probability.max(-1, keepdims=True)
        scores = jnp.where(probability < how.min_p * best, -jnp.inf, scores)
    return scores


def choose(
    logits_BV: jax.Array, how: Sampling, keys_B: jax.Array, seen_BV: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The next token of every row.

    Args:
      logits_BV: of the model, float32 or wider.
      how: the options.
      keys_B: key of every row's draw.
      seen_BV: which tokens stand in each row already; for the penalty.

    Returns:
      Tokens int32 [B], and their log-probabilities under the model itself [B]: log-softmax of `logits_BV`, whatever
      penalty, temperature and cut-offs did to the choice.
    """
    scores = filtered(logits_BV, how, seen_BV)
    if how.temperature is None:
        token_B = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    else:
        token_B = _draw(scores, jax.vmap(lambda key: jax.random.uniform(key, (), scores.dtype))(keys_B))
    chosen = jnp.take_along_axis(logits_BV, token_B[:, None], axis=-1)[:, 0]
    return token_B, chosen - jax.nn.logsumexp(logits_BV, axis=-1)


def draw_keys(key: jax.Array, row_B: jax.Array, position_B: jax.Array) -> jax.Array:
    """Key of every row's draw: a function of (key, global row, position in the row) and of nothing else."""
    return jax.vmap(lambda row, position: jax.random.fold_in(jax.random.fold_in(key, row), position))(row_B, position_B)


def _top_p(scores_BV: jax.Array, top_p: jax.Array | float) -> jax.Array:
    """The smallest set of likeliest tokens whose probabilities add up to `top_p` at least; the likeliest always stays.

    Holtzman et al. 2020, section 3.1. Found by bisection on the bits of the threshold, which for numbers that are not
    negative have the order of the numbers. Equal probabilities stay or go together.
    """
    probability = jax.nn.softmax(scores_BV)
    word = jnp.int64 if probability.dtype == jnp.float64 else jnp.int32
    bits = jax.lax.bitcast_convert_type(probability, word)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # the mass at `low` is enough, that above `high` is not
        middle = low + (high - low + 1) // 2
        enough = jnp.where(bits >= middle, probability, 0).sum(-1, keepdims=True) >= top_p
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    best = bits.max(-1, keepdims=True)
    low, _ = jax.lax.fori_loop(0, jnp.iinfo(word).bits - 1, halve, (jnp.zeros_like(best), best))
    return jnp.where(bits < low, -jnp.inf, scores_BV)


_BLOCK = 256


def _draw(scores_BV: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """Token of every row by inversion: the first at which the running sum of probabilities passes `uniform` in [0, 1).

    One number a row, where Gumbel's trick hashes one a token. The sum runs over blocks of tokens, then inside of the
    block that is met.
    """
    rows, size = scores_BV.shape
    weight = jnp.exp(scores_BV - scores_BV.max(-1, keepdims=True))
    weight = jnp.pad(weight, ((0, 0), (0, -size % _BLOCK))).reshape(rows, -1, _BLOCK)
    ends = jnp.cumsum(weight.sum(-1), axis=-1)
    goal = uniform_B * ends[:, -1]
    block = jnp.sum(ends <= goal[:, None], axis=-1)
    block = jnp.minimum(block, jnp.sum(ends < ends[:, -1:], axis=-1))  # the last that holds anything
    before = jnp.where(block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0)[:, None], axis=-1)[:, 0], 0)
    inside = jnp.take_along_axis(weight, block[:, None, None], axis=1)[:, 0]
    place = jnp.sum(jnp.cumsum(inside, axis=-1) <= (goal - before)[:, None], axis=-1)
    # Rounding may lead past the end of the block: its last token that has a probability.
    last = _BLOCK - 1 - jnp.argmax(inside[:, ::-1] > 0, axis=-1)
    return (block * _BLOCK + jnp.minimum(place, last)).astype(jnp.int32)
