"""B1 to B5 with two processes: bad numbers that one of them sees are answered by both alike.

The oracle of bits is a run of two processes whose data never held the batches that are left out.
"""

import signal
from pathlib import Path

import pytest

from jtrain.train.replay import replay
from tests.faults.runs import codes, config_of, durable, events, said, start
from tests.parity.test_kill import result
from tests.train.fits import make

pytestmark = pytest.mark.faults
SPIKE = {"spike": "rollback", "spike_window": 8, "spike_threshold": 30.0}
FIELDS = {"eval": {"eval_steps": 0}, "checkpoint": {"save_steps": 4, "best": None, "save_total_limit": None}}


def run(config, name="first", **environment):
    return start(config, name, program="numbers_run.py", **environment)


def done(config, name="first", **environment):
    running = run(config, name, **environment)
    assert codes(running) == [0, 0], said(running)
    return result(config)


def without(folder, window, **changes):
    """What a run ends with whose data never held these batches."""
    folder.mkdir()
    return done(config_of(folder, **FIELDS | changes), DROP=window)


def same(found, reference):
    """Bits and figures; counts of what was left out are another matter."""
    bits = [{path: b for path, b in one["bits"].items() if path != "skipped"} for one in (found, reference)]
    assert bits[0] == bits[1]
    names = ("step", "loss", "grad_norm", "learning_rate")
    figures = [[[line[name] for name in names] for line in one["lines"]] for one in (found, reference)]
    assert figures[0] == figures[1]


def test_b1_a_batch_that_is_not_finite_for_one_process_is_skipped_by_both(tmp_path):
    config = config_of(tmp_path, **FIELDS)
    found = done(config, BAD="nan@6")
    (event,) = events(config, "skipped_step")
    assert (event["step"], event["batch"], event["reason"]) == (6, 6, "not finite")
    assert found["counters"]["skipped"] == 1
    same(found, without(tmp_path / "reference", "6:7"))


@pytest.mark.parametrize("kill", ("", "9:2", "12:1"))
def test_b2_a_spike_that_one_process_sees_takes_both_back_also_when_one_is_killed_behind_it(kill, tmp_path):
    config = config_of(tmp_path, faults=SPIKE, **FIELDS)
    if kill:  # where update 9 begins again, behind the rollback; and where nothing was saved since
        running = run(config, BAD="spike@10", KILL=kill)
        assert -signal.SIGKILL in codes(running), said(running)
    found = done(config, "again", BAD="spike@10")
    windows = {(e["step"], e["first"], e["end"]) for e in events(config, "rollback")}
    assert windows == {(8, 8, 11)}
    assert found["counters"]["skipped"] == 3
    same(found, without(tmp_path / "reference", "8:11", faults=SPIKE))


def test_b3_numbers_that_stay_bad_end_both_with_15_and_a_bundle(tmp_path):
    faults = {"max_consecutive_skips": 2, "max_rollbacks": 2}
    config = config_of(tmp_path, faults=faults, **FIELDS)
    running = run(config, BAD="nan@" + ",".join(map(str, range(10, 40))))
    assert codes(running) == [15, 15], said(running)
    assert len(events(config, "rollback")) == 2 and durable(config) == [4, 8]
    assert "gone back to step 8 2 times" in running[0].err and "jtrain replay" in running[0].err
    (bundle,) = (Path(config["run_dir"]) / "bundles").iterdir()
    program = make(tmp_path / "one", **FIELDS, max_steps=20, devices=2, faults=faults, task="pretrain").program
    found = replay(program, bundle)
    assert found["state"]["equal"] and found["steps"][0]["equal"] and not found["steps"][0]["finite"]
    assert found["nonfinite"] == [{"kind": "batch", "name": "y", "layers": (), "micro_batches": ()}]
    assert found["changed"]["processes"] == [2, 1]
    again = run(config, "again", BAD="nan@" + ",".join(map(str, range(10, 40))))
    assert codes(again) == [15, 15], said(again)
    assert len(events(config, "rollback")) == 2  # it goes back no more
    left = [path.name for path in (Path(config["run_dir"]) / "checkpoints").iterdir()]
    assert all(name.isdigit() or name.startswith("_") for name in left), left


@pytest.mark.parametrize("devices", (2, 4))
def test_b4_a_bit_that_flips_on_one_process_is_found_and_the_next_start_goes_on_from_before(devices, tmp_path):
    faults = {"check_replicas_every_n_steps": 3}
    config = config_of(tmp_path, faults=faults, **FIELDS | {"devices": devices})
    running = run(config, FLIP="5")
    assert codes(running) == [15, 15], said(running)
    (event,) = events(config, "replicas_differ")
    assert event["step"] == 6 and event["arrays"] == ["params/w"]
    # Two copies: nobody knows which is right. Four: the one that stands alone.
    assert {d["process"] for d in event["devices"]} == ({0, 1} if devices == 2 else {1})
    assert len(event["devices"]) == (2 if devices == 2 else 1)
    assert "silent data corruption: after update 6 copies differ: params/w" in running[0].err
    assert durable(config) == [4]
    found = done(config, "again")
    folder = tmp_path / "reference"
    folder.mkdir()
    reference = done(config_of(folder, **FIELDS | {"devices": devices}))
    assert found["bits"] == reference["bits"] and found["counters"] == reference["counters"]


def test_b5_an_update_that_comes_to_something_else_on_one_process_ends_both(tmp_path):
    config = config_of(tmp_path, faults={"replay_every_n_steps": 4}, **FIELDS)
    running = run(config, SHAKY="11")  # the only run of the step for update 9: nobody sees it
    assert codes(running) == [0, 0], said(running)
    assert not events(config, "step_differs")
    (tmp_path / "other").mkdir()
    config = config_of(tmp_path / "other", faults={"replay_every_n_steps": 4}, **FIELDS)
    running = run(config, SHAKY="10")  # the second one for update 8
    assert codes(running) == [15, 15], said(running)
    (event,) = events(config, "step_differs")
    assert event["step"] == 8 and event["arrays"] == ["params/w"]
    assert [(device["process"], device["kind"]) for device in event["devices"]] == [(1, "cpu")]
    assert "update 8 made twice gave two results" in running[1].err
