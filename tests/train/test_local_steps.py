"""Local steps against float64 arithmetic of algorithm 1; and what slices keep, over saves and resumes."""

import jax
import numpy as np
import pytest

from jtrain import Callback
from jtrain.errors import ConfigError
from tests.parity.runs import bits
from tests.train.fits import Ask, examples, make

SLICES = {"devices": 2, "mesh": {"data": 2, "slices": 2}}
LOCAL = SLICES | {"dcn": {"local_steps": 3, "outer_learning_rate": 0.5, "outer_momentum": 0.6}}
RATE, CLIP = 0.1, 1.0


class Trace(Callback):
    """The outer parameters, and those of every slice, after each step."""

    def __init__(self):
        self.states, self.norms = [], []

    def on_step_end(self, trainer, step, metrics):
        state = jax.device_get(trainer.state)
        own = np.stack([flat(jax.tree.map(lambda x, i=i: x[i], state.across["params"])) for i in range(2)])
        self.states.append((flat(state.params), own))
        self.norms.append(metrics["grad_norm"])


def flat(params):
    return np.concatenate([np.ravel(params["b"]), np.ravel(params["w"])]).astype(np.float64)


def own_update(p, x, y):
    """One step of clipped SGD on the mean squared error of a slice's rows; the norm before clipping."""
    error = x @ p[1:] + p[0] - y
    gradient = 2 * np.concatenate([[error.mean()], (error[:, None] * x).mean(0)])
    norm = np.linalg.norm(gradient)
    return p - RATE * gradient * min(1.0, CLIP / (norm + 1e-6)), norm


def expected(start, steps, nesterov, every=3, rate=0.5, momentum=0.6):
    """DiLoCo's algorithm 1 in float64; `outer` and `own` after each step, and the mean of the norms."""
    rows = {name: np.asarray(values, np.float64) for name, values in examples().items()}
    outer, own, m = start, [start, start], np.zeros_like(start)
    for step in range(1, steps + 1):
        batch = np.arange((step - 1) * 8, step * 8) % 40
        halves = batch[:4], batch[4:]
        pairs = [own_update(p, rows["x"][half], rows["y"][half]) for p, half in zip(own, halves, strict=True)]
        own = [p for p, _ in pairs]
        if step % every == 0:
            change = outer - np.mean(own, axis=0)
            m = momentum * m + change
            outer = outer - rate * (change + momentum * m if nesterov else m)
            own = [outer, outer]
        yield outer, np.stack(own), np.mean([norm for _, norm in pairs])


@pytest.mark.parametrize("nesterov", [True, False])
def test_rounds_are_those_of_algorithm_1(nesterov, tmp_path):
    trace = Trace()
    config = LOCAL | {"dcn": LOCAL["dcn"] | {"outer_nesterov": nesterov}, "optimizer": {"beta1": 0.0}}
    trainer = make(tmp_path, [trace], max_steps=10, logging={"log_every_n_steps": 1}, **config)
    start = flat(jax.device_get(trainer.state.params))
    trainer.fit()
    wanted = list(expected(start, 10, nesterov))
    np.testing.assert_allclose(trace.norms, [norm for _, _, norm in wanted], rtol=1e-4)
    np.testing.assert_allclose(flat(jax.device_get(trainer.state.params)), wanted[-1][0], rtol=1e-5)
    # The loop dispatches a step before it reads the figures of the one before: the last two states are one.
    for seen, (outer, own, _) in zip(trace.states, wanted[1:] + wanted[-1:], strict=True):
        np.testing.assert_allclose(seen[0], outer, rtol=1e-4)
        np.testing.assert_allclose(seen[1], own, rtol=1e-4)
    assert np.abs(wanted[0][1][0] - wanted[0][1][1]).max() > 1e-3  # slices go their own ways


def test_the_outer_parameters_are_what_is_evaluated(tmp_path):
    trainer = make(tmp_path, max_steps=5, held_out=examples(16, seed=3), **LOCAL)
    trainer.fit()
    rows = {name: np.asarray(values, np.float64) for name, values in examples(16, seed=3).items()}
    outer = flat(jax.device_get(trainer.state.params))
    loss = np.mean((rows["x"] @ outer[1:] + outer[0] - rows["y"]) ** 2)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-5)
    own = jax.device_get(trainer.state.across["params"])
    assert np.abs(own["w"] - outer[1:]).max() > 1e-3  # step 5 is in the middle of a round


@pytest.mark.parametrize(
    "dcn",
    [
        {"local_steps": 3},
        {"local_steps": 3, "compression": "int8"},
        {"compression": "int8"},
        {"compression": "powersgd", "rank": 1},
    ],
    ids=["local", "local int8", "int8", "powersgd"],
)
def test_a_run_that_is_stopped_in_a_round_goes_on_exactly(dcn, tmp_path):
    fields = SLICES | {"dcn": dcn, "max_steps": 8, "optimizer": {"name": "adamw", "learning_rate": 0.05}}
    whole = make(tmp_path / "whole", **fields)
    whole.fit()
    make(tmp_path / "halves", [Ask("on_step_end", 4, "stop", "the test says so")], **fields).fit()
    resumed = make(tmp_path / "halves", **fields)
    resumed.fit()
    assert resumed.counters.step == 8
    assert bits(resumed.state) == bits(whole.state)


@pytest.mark.parametrize("dcn", [{"compression": "int8"}, {"local_steps": 2}], ids=["int8", "local"])
def test_a_number_that_is_not_finite_on_one_slice_skips_the_step_on_all(dcn, tmp_path):
    program = make(tmp_path, **SLICES, dcn=dcn, optimizer={"name": "adamw"}).program
    rows = {name: values[None, :8] for name, values in examples().items()} | {"row": np.arange(8, dtype=np.int32)[None]}
    rows["row_weight"] = np.ones((1, 8), np.float32)
    state, _ = program.train_step(program.init(), rows)
    before = jax.device_get(state)
    bad = rows | {"y": rows["y"] + np.where(np.arange(8) == 6, np.nan, 0).astype(np.float32)}  # a row of slice 1
    state, metrics = program.train_step(state, bad)
    after = jax.device_get(state)
    assert not metrics["finite"] and (after.step, after.skipped) == (1, 1)
    assert bits((after.params, after.opt_state, after.across)) == bits((before.params, before.opt_state, before.across))
    # With local steps the round goes on where it was: its second update ends it.
    state, metrics = program.train_step(state, rows)
    assert metrics["finite"] and state.step == 2
    assert bits(state.params) != bits(before.params)


# -- other slices, other compression ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"dcn": {}}, {"dcn": {"compression": "int8"}}, "between slices, error begin anew"),
        ({"dcn": {"compression": "int8"}}, {"dcn": {}}, None),
        ({"dcn": {"compression": "int8"}}, {"dcn": {"compression": "bf16"}}, None),
        (
            {"dcn": {"compression": "int8"}},
            {"dcn": {"compression": "int8"}, "devices": 4, "mesh": {"data": 4, "slices": 4}},
            "between slices, error begin anew",
        ),
        ({"dcn": {"local_steps": 2}}, {"dcn": {"local_steps": 2, "compression": "int8"}}, "error begin anew"),
    ],
    ids=["to int8", "to none", "int8 to bf16", "more slices", "local to local int8"],
)
def test_debts_that_a_checkpoint_has_not_begin_at_zero_and_the_run_says_so(before, after, said, tmp_path, capsys):
    make(tmp_path, **SLICES | before, max_steps=3).fit()
    capsys.readouterr()
    trainer = make(tmp_path, **SLICES | after, max_steps=6)
    trainer.fit()
    assert trainer.counters.step == 6
    printed = " ".join(capsys.readouterr().out.split())
    assert said in printed if said else "begin anew" not in printed
    assert np.isfinite(flat(jax.device_get(trainer.state.params))).all()


def test_slices_with_optimizers_of_their_own_can_not_become_others(tmp_path):
    make(tmp_path, **LOCAL, max_steps=3).fit()
    with pytest.raises(ConfigError, match=r"dcn.local_steps: 3 -> 1") as caught:
        make(tmp_path, **SLICES, max_steps=6).fit()
    assert "init_from" in caught.value.remedy
    four = LOCAL | {"devices": 4, "mesh": {"data": 4, "slices": 4}}
    with pytest.raises(ConfigError, match=r"mesh.slices: 2 -> 4"):
        make(tmp_path, **four, max_steps=6).fit()
    other = LOCAL | {"dcn": LOCAL["dcn"] | {"local_steps": 2}}  # a shorter round is no other state
    trainer = make(tmp_path, **other, max_steps=6)
    trainer.fit()
    assert trainer.counters.step == 6


def test_a_new_run_of_slices_begins_with_the_parameters_that_it_is_given(tmp_path):
    first = make(tmp_path / "first", max_steps=3)
    first.fit()
    trainer = make(tmp_path / "second", max_steps=2, checkpoint={"init_from": str(tmp_path / "first")}, **LOCAL)
    state = trainer.program.init_from(str(tmp_path / "first"))
    wanted = jax.device_get(first.state.params)
    for tree in (state.params, *[jax.tree.map(lambda x, i=i: x[i], state.across["params"]) for i in range(2)]):
        np.testing.assert_array_equal(flat(jax.device_get(tree)), flat(wanted))
    trainer.fit()
    # And another run can take the outer parameters of this one.
    third = make(tmp_path / "third", max_steps=1)
    np.testing.assert_array_equal(
        flat(jax.device_get(third.program.init_from(str(tmp_path / "second")).params)),
        flat(jax.device_get(trainer.state.params)),
    )


def test_a_hook_has_no_one_gradient_to_see(tmp_path):
    with pytest.raises(ConfigError, match=r"step_hook with dcn.local_steps: 3"):
        make(tmp_path, step_hook=lambda gradients, state, metrics: (gradients, metrics), **LOCAL)


def test_the_log_says_how_slices_meet(tmp_path, capsys):
    make(tmp_path, max_steps=1, **SLICES, dcn={"compression": "int8", "local_steps": 5}).fit()
    assert "int8 between 2 slices, every 5 steps" in " ".join(capsys.readouterr().out.split())
