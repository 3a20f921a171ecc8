"""B4 and B5: a device whose copy is not that of the others, and a step that does not come to the same twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain import Loss
from jtrain.errors import ConfigError, NumbersError
from jtrain.observe.metrics import read_events
from jtrain.train.callbacks import Callback
from jtrain.train.device_checks import DeviceChecks
from tests.train.fits import BATCH, checkpoints, examples, make, squared_error

FIELDS = {"max_steps": 16, "devices": 4, "mesh": "data=4", "checkpoint": {"save_steps": 4, "save_total_limit": None}}


def flip(state, name, place, bit=20):
    """The state with one bit of a parameter flipped on one device."""
    array = state.params[name]
    parts = [np.array(shard.data) for shard in array.addressable_shards]
    parts[place].reshape(-1).view(np.uint32)[0] ^= np.uint32(1 << bit)
    shards = [jax.device_put(part, shard.device) for part, shard in zip(parts, array.addressable_shards, strict=True)]
    state.params[name] = jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
    return state


class Flip(Callback):
    """Flips a bit after update `step`, once."""

    def __init__(self, step, place=2, name="w", bit=20):
        self.step, self.place, self.name, self.bit = step, place, name, bit

    def on_step_end(self, trainer, step, metrics):
        if step == self.step:
            trainer.state = flip(trainer.state, self.name, self.place, self.bit)
            self.step = None


@pytest.mark.parametrize(
    "bit", (pytest.param(0, marks=pytest.mark.faults), 20, pytest.param(30, marks=pytest.mark.faults))
)
def test_b4_a_bit_that_flips_on_one_replica_is_found_and_named(bit, tmp_path):
    faults = {"check_replicas_every_n_steps": 3, "nonfinite": "warn"}
    trainer = make(tmp_path, [Flip(5, bit=bit)], rows=examples(160), faults=faults, **FIELDS)
    with pytest.raises(
        NumbersError, match=r"after update 6 copies differ: params/w on device 2 of process 0"
    ) as caught:
        trainer.fit()
    assert caught.value.exit_code == 15
    (event,) = read_events(tmp_path, "replicas_differ")
    assert event["arrays"] == ["params/w"] and event["step"] == 6
    assert event["devices"] == [{"device": 2, "process": 0, "kind": "cpu"}]
    assert checkpoints(tmp_path) == [4]
    whole = make(tmp_path / "whole", rows=examples(160), **FIELDS)
    whole.fit()
    again = make(tmp_path, rows=examples(160), **FIELDS)
    again.fit()  # goes on from step 4, to the same bits
    np.testing.assert_array_equal(np.asarray(again.state.params["w"]), np.asarray(whole.state.params["w"]))


def test_b4_of_two_that_differ_both_are_named(tmp_path):
    fields = FIELDS | {"devices": 2, "mesh": "data=2"}
    fields |= {"faults": {"check_replicas_every_n_steps": 1}}
    trainer = make(tmp_path, [Flip(6, place=1)], rows=examples(160), **fields)
    with pytest.raises(NumbersError, match=r"device 0 of .*, device 1 of process 0 \(cpu\); one of them is wrong"):
        trainer.fit()


def test_b4_nothing_is_found_where_nothing_is_wrong_and_what_is_divided_has_no_replica(tmp_path):
    trainer = make(tmp_path, rows=examples(160), faults={"check_replicas_every_n_steps": 1}, **FIELDS)
    trainer.fit()
    assert trainer.counters.step == 16 and not read_events(tmp_path, "replicas_differ")


def test_b4_replicas_are_compared_every_n_steps_and_before_a_save_and_never_by_default(tmp_path):
    class Table:
        paths = ()
        taken = 0

        def __call__(self, state):
            self.taken += 1
            return np.zeros((0, 4), np.uint32)

    for faults, wanted in (({"check_replicas_every_n_steps": 3}, [3, 4, 6, 8]), ({}, [])):
        trainer = make(tmp_path, rows=examples(160), faults=faults, **FIELDS)
        checks, compared = DeviceChecks(trainer, None), []
        table = checks._checksums = Table()
        for step in range(1, 9):
            before = table.taken
            checks.compare_replicas(step, saves=step % 4 == 0)
            compared += [step] * (table.taken - before)
        assert compared == wanted


def shaky(calls, wrong):
    """A loss that is off by a hair in the `wrong`th run of the step."""

    def noise(x):
        calls.append(1)
        return np.float32(1e-3 if len(calls) == wrong else 0.0)

    def loss(model, batch, rng):
        good = squared_error(model, batch, rng)
        off = jax.pure_callback(noise, jax.ShapeDtypeStruct((), jnp.float32), batch["x"].sum())
        return Loss(good.sum * (1 + off), good.count, good.metrics)

    return loss


@pytest.mark.parametrize(("wrong", "found"), [(9, 6), pytest.param(10, 8, marks=pytest.mark.faults), (8, None)])
def test_b5_an_update_that_comes_to_something_else_the_second_time_ends_the_run(wrong, found, tmp_path):
    """Updates 2, 4, 6, ... are made twice: runs 2 and 3, 5 and 6, 8 and 9, 11 and 12 of the step."""
    calls = []
    fields = FIELDS | {"devices": 1, "mesh": "data=1", "faults": {"replay_every_n_steps": 2}}
    trainer = make(tmp_path, rows=examples(160), loss_fn=shaky(calls, {9: 9, 10: 11, 8: 7}[wrong]), **fields)
    if found is None:  # an update that is made once: nobody sees it
        trainer.fit()
        assert not read_events(tmp_path, "step_differs")
        return
    with pytest.raises(
        NumbersError, match=rf"update {found} made twice gave two results: .* device 0 .* \(cpu\)"
    ) as caught:
        trainer.fit()
    assert caught.value.exit_code == 15
    (event,) = read_events(tmp_path, "step_differs")
    assert event["devices"][0]["kind"] == "cpu"
    assert all(path.startswith(("params/", "opt_state/")) for path in event["arrays"]) and event["arrays"]


def test_b5_a_run_whose_updates_are_made_twice_has_the_same_bits(tmp_path):
    twice = make(tmp_path / "twice", rows=examples(160), faults={"replay_every_n_steps": 3}, **FIELDS)
    once = make(tmp_path / "once", rows=examples(160), **FIELDS)
    for trainer in (twice, once):
        trainer.fit()
    np.testing.assert_array_equal(np.asarray(twice.state.params["w"]), np.asarray(once.state.params["w"]))
    assert [line["loss"] for line in twice.history.train] == [line["loss"] for line in once.history.train]


def test_on_hardware_whose_steps_may_differ_the_comparison_asks_for_deterministic(tmp_path):
    class Gpu:
        platform, device_kind, id, process_index = "gpu", "H200", 0, 0

    trainer = make(tmp_path, rows=examples(2 * BATCH), faults={"replay_every_n_steps": 2})
    trainer.mesh = type("Mesh", (), {"devices": np.asarray([Gpu()], object)})()
    with pytest.raises(ConfigError, match=r"replay_every_n_steps: 2 on gpu"):
        DeviceChecks(trainer, None)
    trainer.config = trainer.config.model_copy(update={"deterministic": True})
    DeviceChecks(trainer, None)
