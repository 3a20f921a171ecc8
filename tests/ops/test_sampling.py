"""Penalties, cut-offs and draws against transformers' processors and against the definitions in float64."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.ops.sampling import Sampling, choose, draw_keys, filtered

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "sampling.json").read_text())
LOGITS = np.random.default_rng(1).normal(size=(4, 700)).astype(np.float32) * 2


def keys(rows, position=0, seed=0):
    return draw_keys(jax.random.key(seed), jnp.arange(rows), jnp.full(rows, position))


@pytest.mark.parametrize("case", GOLDENS["cases"], ids=lambda case: "-".join(case["options"]))
def test_scores_are_those_of_transformers(case):
    logits = jnp.asarray(GOLDENS["logits"], jnp.float32)
    seen = np.zeros(logits.shape, bool)
    np.put_along_axis(seen, np.asarray(GOLDENS["seen"]), True, axis=1)
    expected = np.asarray([[-np.inf if score is None else score for score in row] for row in case["scores"]])
    found = np.asarray(filtered(logits, Sampling(**case["options"]), jnp.asarray(seen)))
    assert (np.isinf(found) == np.isinf(expected)).all()
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("top_p", (0.05, 0.5, 0.9, 0.9999))
def test_top_p_keeps_the_smallest_set_of_likeliest_tokens_with_that_mass(top_p):
    found = np.isfinite(np.asarray(filtered(jnp.asarray(LOGITS), Sampling(temperature=1.0, top_p=top_p))))
    for logits, kept in zip(LOGITS.astype(np.float64), found, strict=True):
        p = np.exp(logits - logits.max())
        p /= p.sum()
        order = np.argsort(-p)
        size = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
        assert set(np.flatnonzero(kept)) == set(order[:size])


def test_equal_probabilities_stay_together():
    logits = jnp.zeros((1, 8)).at[0, 3].set(1.0)
    assert np.isfinite(np.asarray(filtered(logits, Sampling(temperature=1.0, top_p=0.5)))).sum() == 8
    assert np.isfinite(np.asarray(filtered(logits, Sampling(temperature=1.0, top_p=0.2)))).sum() == 1
    assert np.isfinite(np.asarray(filtered(logits, Sampling(temperature=1.0, top_k=2)))).sum() == 8


def test_without_a_temperature_the_likeliest_token_is_taken_after_the_penalty():
    logits = jnp.asarray([[2.0, 3.0, -1.0]])
    assert choose(logits, Sampling(), keys(1))[0] == 1
    seen = jnp.asarray([[False, True, False]])
    token, logprob = choose(logits, Sampling(repetition_penalty=2.0), keys(1), seen)
    assert token == 0
    # of the model itself, before the penalty
    np.testing.assert_allclose(logprob[0], 2.0 - np.log(np.exp(2.0) + np.exp(3.0) + np.exp(-1.0)), rtol=1e-6)
    with pytest.raises(ValueError, match="seen_BV"):
        choose(logits, Sampling(repetition_penalty=2.0), keys(1))


def test_draws_have_the_probabilities_of_the_scores():
    logits = jnp.tile(jnp.asarray(LOGITS[:1]), (4096, 1))
    how = Sampling(temperature=0.7, top_k=6)
    tokens = np.concatenate([np.asarray(choose(logits, how, keys(4096, position))[0]) for position in range(8)])
    scores = np.asarray(filtered(logits[:1], how))[0].astype(np.float64)
    p = np.exp(scores - scores.max())
    p /= p.sum()
    counts = np.bincount(tokens, minlength=len(p))
    assert (counts[p == 0] == 0).all()
    live = p > 0
    chi_square = ((counts[live] - p[live] * tokens.size) ** 2 / (p[live] * tokens.size)).sum()
    assert chi_square < 20.5  # 5 degrees of freedom: one in a thousand


def test_a_draw_is_inverted_at_its_place_in_the_running_sum():
    from jtrain.ops.sampling import _draw

    scores = jnp.asarray(LOGITS)
    for uniform in (0.0, 0.1, 0.5, 0.99, 1 - 2**-24):
        found = np.asarray(_draw(scores, jnp.full(4, uniform, jnp.float32)))
        for row, token in zip(LOGITS.astype(np.float64), found, strict=True):
            ends = np.cumsum(np.exp(row - row.max()))
            ends /= ends[-1]
            assert token == min(int(np.searchsorted(ends, uniform, side="right")), 699) or (
                abs(ends[token] - uniform) < 1e-6
            )


def test_what_is_cut_off_is_never_drawn_whatever_the_rounding():
    from jtrain.ops.sampling import _draw

    scores = jnp.full((3, 600), -jnp.inf).at[0, 0].set(0.0).at[1, 599].set(0.0).at[2, jnp.asarray([5, 300])].set(0.0)
    for uniform in (0.0, 0.5, 1 - 2**-24):
        first, last, one = np.asarray(_draw(scores, jnp.full(3, uniform, jnp.float32)))
        assert (first, last) == (0, 599) and one in (5, 300)


def test_a_draw_depends_on_seed_row_and_position_and_on_nothing_else():
    logits, how = jnp.asarray(LOGITS), Sampling(temperature=1.0)
    whole = np.asarray(choose(logits, how, keys(4, 3))[0])
    alone = choose(logits[2:3], how, draw_keys(jax.random.key(0), jnp.asarray([2]), jnp.asarray([3])))[0]
    assert alone == whole[2]
    assert (np.asarray(choose(logits, how, keys(4, 4))[0]) != whole).any()
    assert (np.asarray(choose(logits, how, keys(4, 3, seed=1))[0]) != whole).any()
