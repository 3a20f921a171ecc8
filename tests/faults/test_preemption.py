"""T1 to T3: one of two processes is asked to leave; both save the same step, and the next start goes on."""

import re
import time
from pathlib import Path

import pytest

from tests.faults.runs import codes, config_of, durable, events, goes_on, said, start, wait_for

pytestmark = pytest.mark.faults


def saves(config, running):
    """Both have left with 10 after the same step, which is durable."""
    assert codes(running) == [10, 10], said(running)
    (step,) = re.findall(r"^preempted at step (\d+), saved", running[0].err, re.MULTILINE)
    (event,) = events(config, "preempted")[-1:]
    assert event["saved"] and event["step"] == int(step) == durable(config)[-1]
    assert "error" not in running[0].err and "error" not in running[1].err
    return int(step), event


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("where", "least", "most"),
    [("step:6", 6, 7), ("eval", 4, 4), ("compile", 1, 2), ("save", 4, 5), ("data:6", 4, 7)],
    ids=["step", "eval", "compile", "save", "data"],
)
def test_t1_wherever_one_is_asked_both_save_the_same_step(where, least, most, rank, reference, tmp_path):
    config = config_of(tmp_path)
    step, event = saves(config, start(config, "first", fault=f"term@{where}", rank=rank, SLOW="0.2"))
    assert least <= step <= most
    assert event["reason"] == ("SIGTERM" if rank == 0 else "SIGTERM of another process")
    goes_on(config, reference)


def test_t1_in_a_restore_what_was_restored_stays(reference, tmp_path):
    config = config_of(tmp_path)
    step, _ = saves(config, start(config, "first", fault="term@step:6", SLOW="0.2"))
    again, _ = saves(config, start(config, "second", fault="term@restore", rank=1))
    assert again == step
    goes_on(config, reference)


def test_t1_before_the_training_all_leave_with_11(tmp_path):
    config = config_of(tmp_path)
    running = start(config, "first", fault="term@init", rank=1)
    assert codes(running) == [11, 11], said(running)
    assert "preempted before the first step, nothing to save" in running[0].err + running[1].err


def test_t2_a_second_signal_ends_a_save_that_hangs_and_the_newest_durable_step_stays(reference, tmp_path):
    config = config_of(tmp_path, checkpoint={"save_steps": 4, "best": None, "async_save": False})
    running = start(config, "first", fault="term@step:6", SLOW="0.2")
    saves(config, running)
    (before,) = durable(config)[-1:]
    running = start(config, "second", fault="twice@save", rank=1)
    assert codes(running) == [11, 11], said(running)
    assert f"not saved: SIGTERM came again; step {before} is durable" in running[1].err
    assert durable(config)[-1] == before
    goes_on(config, reference)


def test_t2_a_kill_five_seconds_after_the_signal_loses_no_durable_step(reference, tmp_path):
    config = config_of(tmp_path)
    running = start(config, "first", fault="sleep@save", rank=1)
    wait_for(running, lambda: "fault: sleep" in running[1].err)
    for one in running:
        one.process.terminate()
    time.sleep(5)
    for one in running:
        one.process.kill()
    assert codes(running) == [-9, -9] and durable(config) == []
    goes_on(config, reference)


def test_t2_a_save_that_takes_longer_than_the_grace_is_left_behind(reference, tmp_path):
    config = config_of(tmp_path, faults={"preemption_grace_seconds": 3})
    running = start(config, "first", fault="sleep@save", rank=1)
    wait_for(running, lambda: "fault: sleep" in running[1].err)
    began = time.monotonic()
    running[0].process.terminate()
    assert codes(running) == [11, 11], said(running)
    assert time.monotonic() - began < 12 and durable(config) == []
    (event,) = events(config, "preempted")
    assert not event["saved"] and event["durable"] is None
    goes_on(config_of(tmp_path), reference)


def test_t3_a_signal_of_slurm_saves_too(reference, tmp_path):
    config = config_of(tmp_path)
    _, event = saves(config, start(config, "first", fault="usr1@step:6", SLOW="0.2"))
    assert event["reason"] == "SIGUSR1"
    goes_on(config, reference)


def test_a_stop_file_saves_on_both(reference, tmp_path):
    config = config_of(tmp_path)
    running = start(config, "first", SLOW="0.3")
    wait_for(running, lambda: 5 in running[0].steps)
    stop = Path(config["run_dir"]) / "STOP"
    stop.touch()
    saves(config, running)
    running = start(config, "second")
    assert codes(running) == [64, 64] and "STOP is there: the run was asked to stop" in running[0].err
    stop.unlink()
    goes_on(config, reference)
