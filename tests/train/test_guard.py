"""Asked to leave: by when, with which exit code, and what stands beside a run."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from jtrain.config import load_config
from jtrain.errors import Exit
from jtrain.parallel.agreement import Agreement
from jtrain.train.preemption import Preemption, Stage


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def asked(clock):
    """A run with a grace of 60 s in its training, and what it left with."""
    left = []
    faults = load_config({"faults": {"preemption_grace_seconds": 60}}, env={}).faults
    preemption = Preemption(faults, leave=lambda code, text: left.append((code, text)), durable=lambda: 40, clock=clock)
    preemption.begin(Agreement())
    preemption.left = left
    return preemption


def test_a_save_that_takes_longer_than_the_grace_is_left_behind(asked, clock):
    asked.signal("SIGTERM")
    clock.now += 59
    asked.tick()
    assert asked.left == [] and asked.agreement.poll()
    clock.now += 2
    asked.tick()
    asked.tick()
    ((code, text),) = asked.left
    assert code == Exit.PREEMPTED_NOT_SAVED
    assert text == "preempted by SIGTERM, not saved: not gone within 61 s; step 40 is durable"


def test_what_is_saved_leaves_with_10_and_what_is_done_with_0(asked, clock):
    asked.signal("SIGTERM")
    clock.now += 61
    for stage, code in ((Stage.SAVED, 10), (Stage.OVER, 0)):
        asked.stage, asked._deadline = stage, clock.now - 1
        asked.tick()
        assert asked.left[-1][0] == code


def test_a_signal_that_comes_again_ends_it_at_once_but_not_an_echo_of_the_first(asked, clock):
    asked.ask("SIGTERM of another process")
    clock.now += 5
    asked.signal("SIGTERM")  # the first of its own
    clock.now += 0.5
    asked.signal("SIGTERM")  # to the process, and to its group
    assert asked.left == []
    clock.now += 1.0
    asked.signal("SIGUSR1")
    ((code, text),) = asked.left
    assert code == Exit.PREEMPTED_NOT_SAVED and "SIGUSR1 came again; step 40 is durable" in text


def test_the_first_reason_stands_and_is_said_once(asked):
    asked.ask("maintenance")
    asked.signal("SIGTERM")
    assert asked.reason == "maintenance"
    assert list(asked.words) == ["preempted by maintenance: the run saves and leaves, within 60 s"]


def test_before_the_training_there_is_nothing_to_wait_for(clock):
    left, unwound = [], []
    preemption = Preemption(
        load_config({}, env={}).faults,
        leave=lambda code, text: left.append(code),
        unwind=lambda: unwound.append(1),
        clock=clock,
    )
    preemption.ask("maintenance")
    assert unwound == [1]
    clock.now += 6
    preemption.tick()  # stuck in a call that no exception reaches
    assert left == [Exit.PREEMPTED_NOT_SAVED]


# A program that is no training: what the guard's threads do while the main thread is where no handler runs.
PROGRAM = """
import ctypes, sys, threading, time
from jtrain import progress
from jtrain.config import load_config, ladder
from jtrain.train import watchdog
from jtrain.train.guard import guarded
watchdog.BACKSTOP_SECONDS = 0.5
config = load_config({{"run_dir": sys.argv[1]}}, env={{}})
ladder.PHASES = tuple(p._replace(seconds={limit}) for p in ladder.PHASES)
ladder._BY_WATCHDOG = ()
with guarded(config) as guard:
    guard.begin()
    guard.open(lambda event, fields: print(event, fields, flush=True), 100)
    progress.report("step", step=7, durable=5)
    print("up", flush=True)
    {stuck}
"""
# A lock that is taken twice: neither a signal nor an exception ends the wait for it.
WITHOUT_THE_LOCK = (
    "lock = ctypes.CDLL(None).pthread_mutex_lock; twice = ctypes.create_string_buffer(64); lock(twice); lock(twice)"
)
WITH_THE_LOCK = WITHOUT_THE_LOCK.replace("CDLL", "PyDLL")


def program(folder, stuck, limit):
    script = PROGRAM.format(stuck=stuck, limit=limit)
    environment = {k: v for k, v in os.environ.items() if k != "JTRAIN_SUPERVISED"}
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def end(process):
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err


def test_a_second_signal_ends_a_program_whose_main_thread_never_returns(tmp_path):
    process = program(tmp_path, WITHOUT_THE_LOCK, 60)
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    time.sleep(1.3)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    code, out, err = end(process)
    assert code == 11 and time.monotonic() - began < 5
    assert "preempted by SIGTERM, not saved: SIGTERM came again; step 5 is durable" in err
    assert "'saved': False, 'reason': 'SIGTERM', 'durable': 5" in out


def test_a_hang_ends_it_with_13_and_the_stacks_of_all_threads(tmp_path):
    code, out, err = end(program(tmp_path, WITHOUT_THE_LOCK, 1))
    assert code == 13, err
    assert err.startswith("error: hung: no progress for 1 s in phase step, after step 7")
    stacks = (tmp_path / "stacks" / "process-0.txt").read_text()
    for text in (err, stacks):
        assert re.search(r'File "<string>", line \d+ in <module>', text) and "guard.py" in text
    assert "hang {'phase': 'step', 'step': 7" in out


@pytest.mark.faults
def test_stacks_are_written_even_when_nothing_of_ours_can_run(tmp_path):
    code, _, err = end(program(tmp_path, WITH_THE_LOCK, 1))
    assert code == 1 and re.search(r'File "<string>", line \d+ in <module>', err) and "Timeout" in err
