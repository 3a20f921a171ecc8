"""Losses of preferences against TRL's own code (goldens by tests/peers/make_trl_goldens.py)."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.tasks.preference_losses import (
    KINDS,
    LossOptions,
    PairLogps,
    bradley_terry,
    find_partners,
    kto,
    kto_kl,
    log_odds_ratio,
)

GOLDENS = json.loads((Path(__file__).parent / "goldens/preference_losses.json").read_text())
OPTIONS = {field: field for field in LossOptions.__dataclass_fields__}


def name(case):
    options = case["options"]
    rest = [f"{key} {value}" for key, value in options.items() if key not in ("loss_type", "loss_weights")]
    kinds = options.get("loss_type", "")
    return " ".join([kinds if isinstance(kinds, str) else "+".join(kinds), *rest])


def options_of(case):
    return LossOptions(**{key: value for key, value in case["options"].items() if key in OPTIONS})


def halves(logps, weight):
    sums = (logps * weight).sum(-1)
    return sums[: len(sums) // 2], sums[len(sums) // 2 :]


def dpo_loss(logps, case):
    """The loss of a golden's batch, as a function of its log-probabilities a token [2 B, L]."""
    mask = jnp.asarray(case["completion_mask"])[:, 1:]
    lengths = mask.sum(-1)
    weight = mask.astype(logps.dtype)
    if (alpha := case["options"].get("ld_alpha")) is not None:
        shared = jnp.tile(jnp.minimum(*jnp.split(lengths, 2)), 2)
        weight = jnp.where(mask.cumsum(1) <= shared[:, None], 1.0, alpha) * mask
    ref = jnp.asarray(case["ref_logps"], logps.dtype)
    pairs = PairLogps(*halves(logps, weight), *halves(ref, weight), *jnp.split(lengths, 2))
    options, chosen = options_of(case), mask[: len(mask) // 2]
    nll = -(logps[: len(mask) // 2] * chosen).sum() / chosen.sum()
    factor = 1.0
    if case["options"].get("use_weighting"):
        means = ((logps - jnp.asarray(case["log_sum_sq_probs"])) * mask).sum(-1) / lengths
        factor = jnp.exp(jax.lax.stop_gradient(means)).reshape(2, -1).prod(0)
    kinds = case["options"]["loss_type"]
    weights = case["options"].get("loss_weights", [1.0] * len(kinds))
    total = 0.0
    for kind, loss_weight in zip(kinds, weights, strict=True):
        loss = KINDS[kind].loss(pairs, options, find_partners(pairs))
        total += loss_weight * ((loss * factor).mean() + (nll if KINDS[kind].nll else 0.0))
    return total


@pytest.mark.parametrize("case", GOLDENS["dpo"], ids=name)
def test_losses_of_pairs_and_their_gradients_are_those_of_trl(case):
    mask = np.asarray(case["completion_mask"])[:, 1:]
    loss, gradient = jax.value_and_grad(dpo_loss)(jnp.asarray(case["logps"]), case)
    assert float(loss) == pytest.approx(case["loss"], rel=1e-5, abs=1e-5)
    np.testing.assert_allclose(gradient, case["gradient"] * mask, rtol=1e-4, atol=1e-6)


def test_every_loss_of_trl_is_there_and_each_gives_another_number():
    kinds = {case["options"]["loss_type"][0] for case in GOLDENS["dpo"]}
    assert kinds | {"orpo", "simpo", "cpo"} == set(KINDS)
    options = LossOptions(label_smoothing=0.1)
    values = [round(float(KINDS[kind].loss(pairs_of(5), options, None).sum()), 6) for kind in KINDS]
    assert len(set(values)) == len(KINDS), values


@pytest.mark.parametrize("case", GOLDENS["kto"], ids=name)
def test_kto_and_its_estimate_are_those_of_trl(case):
    of = {key: jnp.asarray(case[key]) for key in ("logps", "ref_logps", "kl_logps", "ref_kl_logps")}
    label, kind = jnp.asarray(case["label"]), case["options"].get("loss_type", "kto")
    kl = kto_kl(of["kl_logps"] - of["ref_kl_logps"], jnp.ones(12, bool))

    def loss_of(logps):
        return kto(logps - of["ref_logps"], label, kl, options_of(case), kind=kind).mean()

    loss, gradient = jax.value_and_grad(loss_of)(of["logps"])
    assert float(loss) == pytest.approx(case["loss"], rel=1e-5)
    np.testing.assert_allclose(gradient, case["gradient"], rtol=1e-4, atol=1e-7)
    if kind == "kto":
        assert float(kl) == pytest.approx(case["metrics"]["kl"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("case", GOLDENS["plain"], ids=lambda case: f"{case['kind']} {name(case)}")
def test_losses_without_a_reference_are_those_of_trl(case):
    kind = "simpo" if case["options"].get("loss_type") == "simpo" else case["kind"]
    chosen, rejected = (jnp.asarray(case[key]) for key in ("chosen", "rejected"))
    tokens = jnp.full(8, 4.0)  # TRL's functions take means a token here; ours take sums
    scale = 4.0 if kind in ("orpo", "simpo") else 1.0

    def loss_of(chosen, rejected):
        zero = jnp.zeros(8)
        pairs = PairLogps(chosen * scale, rejected * scale, zero, zero, tokens, tokens)
        return KINDS[kind].loss(pairs, options_of(case), None).mean()

    loss, gradient = jax.value_and_grad(loss_of, argnums=(0, 1))(chosen, rejected)
    assert float(loss) == pytest.approx(case["loss"], rel=1e-5)
    np.testing.assert_allclose(gradient, case["gradient"], rtol=1e-4, atol=1e-7)


def pairs_of(count, seed=0):
    values = -np.random.default_rng(seed).uniform(0.1, 9, (4, count))
    tokens = np.random.default_rng(1).integers(1, 9, (2, count))
    return PairLogps(*(jnp.asarray(x, jnp.float32) for x in (*values, *tokens)))


def test_a_policy_that_is_its_reference_costs_ln_2_and_ipo_its_target_squared():
    pairs = pairs_of(5)
    same = pairs._replace(ref_chosen=pairs.chosen, ref_rejected=pairs.rejected)
    np.testing.assert_allclose(KINDS["sigmoid"].loss(same, LossOptions(), None), math.log(2), rtol=1e-6)
    np.testing.assert_allclose(KINDS["ipo"].loss(same, LossOptions(beta=0.5), None), 1.0, rtol=1e-6)


def test_ipo_is_a_function_of_log_ratios_a_token_and_sigmoid_of_sums():
    pairs = pairs_of(5)
    longer = PairLogps(*(2 * x for x in pairs))  # twice the tokens with the same log-probability each
    np.testing.assert_allclose(*(KINDS["ipo"].loss(x, LossOptions(), None) for x in (pairs, longer)), rtol=1e-5)
    assert not np.allclose(*(KINDS["sigmoid"].loss(x, LossOptions(), None) for x in (pairs, longer)))


@pytest.mark.parametrize("kind", ["aot", "aot_unpaired"])
def test_aot_of_a_cut_batch_is_that_of_the_whole_one_given_the_partners_of_the_whole_one(kind):
    pairs, options, loss = pairs_of(6), LossOptions(), KINDS[kind].loss
    partners = find_partners(pairs)

    def whole(pairs):
        return loss(pairs, options, find_partners(pairs)).sum()

    def in_parts(pairs):
        cut = [jax.tree.map(lambda x, i=i: x[i : i + 2], (pairs, partners)) for i in (0, 2, 4)]
        return sum(loss(part, options, mates).sum() for part, mates in cut)

    for got, want in zip(*(jax.tree.leaves(jax.value_and_grad(f)(pairs)) for f in (in_parts, whole)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def test_rows_that_fill_up_a_batch_are_no_partners():
    pairs = pairs_of(6)
    filled = jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros(2)]), pairs)
    got, want = find_partners(filled, jnp.arange(8) < 6), find_partners(pairs)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours[:6], theirs)
    assert float(kto_kl(jnp.asarray([1.0, 3.0, 9.0]), jnp.asarray([True, True, False]))) == 2.0


def test_the_log_of_the_odds_has_finite_gradients_at_both_ends():
    def odds(chosen):
        ones = jnp.ones(3)
        return log_odds_ratio(PairLogps(chosen, -ones, ones, ones, ones, ones)).sum()

    value, gradient = jax.value_and_grad(odds)(jnp.asarray([-1e-6, -40.0, -0.7]))
    assert np.isfinite(value) and np.isfinite(gradient).all()


def test_bradley_terry_with_margin_and_centring_is_its_formula():
    chosen, rejected, margin = jnp.asarray([1.0, -2.0]), jnp.asarray([0.5, 1.0]), jnp.asarray([0.25, 1.0])
    want = [math.log(1 + math.exp(-x)) for x in (0.25, -4.0)]
    np.testing.assert_allclose(bradley_terry(chosen, rejected, margin), want, rtol=1e-6)
    want = [x + 0.1 * y for x, y in zip([math.log(1 + math.exp(-x)) for x in (0.5, -3.0)], [2.25, 1.0], strict=True)]
    np.testing.assert_allclose(bradley_terry(chosen, rejected, None, 0.1), want, rtol=1e-6)
