"""What a spike is, and that the step decides so alike everywhere. The oracle of the median is numpy's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jtrain.config.schema import FaultsConfig
from jtrain.train.spikes import Numbers, NumbersRule, limit
from tests.train.linear import linear_batch, linear_program
from tests.train.tiny import put, tiny_program, tiny_rows

RULE = {"spike": "skip", "spike_window": 8, "spike_threshold": 6.0}


def filled(values, window=8):
    numbers = Numbers.begin(window)
    for value in values:
        numbers = numbers.after(jnp.float32(value), jnp.float32(value), jnp.bool_(True), jnp.bool_(False))
    return numbers


@pytest.mark.parametrize("count", (1, 3, 4, 7, 8, 9, 13, 30))
def test_the_limit_is_that_of_the_last_values(count):
    values = np.random.default_rng(count).lognormal(size=count).astype(np.float32)
    last = values[-8:]
    median = np.median(last)
    width = max(1.4826 * np.median(np.abs(last - median)), 0.01 * abs(median))
    numbers = filled(values)
    np.testing.assert_allclose(limit(numbers.losses, numbers.count, 6.0), median + 6.0 * width, rtol=1e-6)


def test_nothing_is_a_spike_before_half_of_the_window_is_full():
    far = jnp.float32(1e9)
    found = [bool(filled([1.0] * n).is_spike(far, far, 6.0)) for n in range(9)]
    assert found == [False] * 4 + [True] * 5


def test_a_loss_or_a_norm_that_is_far_above_is_a_spike_and_one_that_is_far_below_is_none():
    numbers = filled([1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0, 1.0])
    near, far, below = jnp.float32(1.2), jnp.float32(3.0), jnp.float32(-50.0)
    assert not numbers.is_spike(near, near, 6.0)
    assert numbers.is_spike(far, near, 6.0) and numbers.is_spike(near, far, 6.0)
    assert not numbers.is_spike(below, below, 6.0)


def test_a_loss_that_hardly_moves_may_move_by_a_few_percent():
    numbers = filled([2.0] * 8)
    assert not numbers.is_spike(jnp.float32(2.1), jnp.float32(2.0), 6.0)
    assert numbers.is_spike(jnp.float32(2.13), jnp.float32(2.0), 6.0)  # 6 times 1 %


def test_what_is_not_taken_into_account_leaves_the_window_alone():
    numbers = filled([1.0, 2.0, 3.0])
    after = numbers.after(jnp.float32(9.0), jnp.float32(9.0), jnp.bool_(False), jnp.bool_(True))
    np.testing.assert_array_equal(after.losses, numbers.losses)
    assert int(after.count) == 3 and bool(after.halted)


@pytest.mark.parametrize(
    ("faults", "rule"),
    [
        ({}, NumbersRule()),
        ({"spike": "skip", "spike_window": 8}, NumbersRule(8)),
        ({"spike": "rollback", "spike_window": 8, "spike_threshold": 5.0}, NumbersRule(8, 5.0, halts_on_spike=True)),
        ({"nonfinite": "stop"}, NumbersRule(halts_on_nonfinite=True)),
        ({"max_consecutive_skips": 1}, NumbersRule(halts_on_nonfinite=True)),
    ],
)
def test_the_rule_of_a_config(faults, rule):
    found = NumbersRule.of(FaultsConfig(**faults))
    assert found == rule and found.remembers == (rule != NumbersRule())


def run(program, batches):
    """The state after the batches, and which of them were spikes."""
    state, spikes = program.init(), []
    for batch in batches:
        state, metrics = program.train_step(state, batch)
        spikes.append(bool(metrics["spike"]))
    return state, spikes


def spiked(count=12, at=(9,), factor=100.0):
    """Batches of the linear model; those `at` have targets that are far too large."""
    batches = [linear_batch(seed=number) for number in range(count)]
    for number in at:
        batches[number]["y"] = batches[number]["y"] * factor
    return batches


def slow(**faults):
    return linear_program(tx=optax.sgd(0.1), faults=RULE | faults)


def test_b2_a_spike_changes_nothing_but_the_count_of_skipped_batches():
    batches = spiked()
    state, spikes = run(slow(), batches)
    assert [i for i, spike in enumerate(spikes) if spike] == [9]
    without, none = run(slow(), batches[:9] + batches[10:])
    assert not any(none) and int(state.skipped) == 1 and int(without.skipped) == 0
    for part in ("step", "params", "opt_state", "numbers"):
        for a, b in zip(*(jax.tree.leaves(getattr(s, part)) for s in (state, without)), strict=True):
            np.testing.assert_array_equal(a, b)


def test_b1_the_window_never_holds_what_is_not_finite_also_where_it_is_applied():
    batches = spiked(6, at=(4,), factor=np.nan)
    program = linear_program(tx=optax.sgd(0.1), faults=RULE | {"nonfinite": "warn"})
    state, _ = run(program, batches)
    assert np.isfinite(state.numbers.losses).all() and int(state.numbers.count) == 4


@pytest.mark.parametrize(("faults", "bad"), [({"spike": "rollback"}, 100.0), ({"nonfinite": "stop"}, np.nan)])
def test_after_a_batch_that_halts_the_state_is_that_before_it(faults, bad):
    batches = spiked(12, at=(9,), factor=bad)
    before, _ = run(slow(**faults), batches[:9])
    after, _ = run(slow(**faults), batches)
    assert bool(after.numbers.halted) and not bool(before.numbers.halted)
    assert int(after.step) == 9
    for part in ("params", "opt_state"):
        for a, b in zip(*(jax.tree.leaves(getattr(s, part)) for s in (before, after)), strict=True):
            np.testing.assert_array_equal(a, b)


def test_an_overflow_of_fp16_neither_halts_nor_is_a_spike():
    faults = RULE | {"nonfinite": "stop"}
    program = linear_program(tx=optax.sgd(0.01), precision="16-mixed", faults=faults)
    state, verdicts = program.init(), []
    large = linear_batch(seed=0)
    large["y"] = large["y"] + 3000.0  # gradients that overflow at the first scales
    for _ in range(6):
        state, metrics = program.train_step(state, large)
        verdicts.append(bool(metrics["finite"]))
    assert not verdicts[0], verdicts
    assert not bool(state.numbers.halted)


@pytest.mark.parametrize("mesh", ("data=1", pytest.param("data=4", marks=pytest.mark.faults), "fsdp=2,tensor=2"))
def test_b2_every_mesh_decides_alike(mesh):
    """A decoder that learns one batch by heart; batch 14 is another one."""
    program = tiny_program(mesh, devices=1 if mesh == "data=1" else 4, optimizer=optax.adamw(1e-3), faults=RULE)
    same = tiny_rows(1, program.batch.total)
    other = tiny_rows(2, program.batch.total)
    batches = [put(program, other if number == 14 else same) for number in range(17)]
    _, spikes = run(program, batches)
    assert [i for i, spike in enumerate(spikes) if spike] == [14]
