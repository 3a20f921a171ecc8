"""A process that ends with an error takes its peers with it: soon, with its reason, and with the right exit codes."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jtrain.errors import DataError, PeerLostError
from jtrain.parallel import lost

ROOT = Path(__file__).parents[2]
GLOO = "UNKNOWN: Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:53458"


def run(*whats):
    """Exit codes and messages of two processes, and how many seconds lay between their ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    worker = Path(__file__).with_name("lost_worker.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    running = [
        subprocess.Popen(
            [sys.executable, str(worker), str(index), address, what],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index, what in enumerate(whats)
    ]
    ends = {}
    deadline = time.monotonic() + 120
    try:
        while len(ends) < 2 and time.monotonic() < deadline:
            for index, process in enumerate(running):
                if process.poll() is not None:
                    ends.setdefault(index, time.monotonic())
            time.sleep(0.05)
        errors = [process.communicate(timeout=1)[1] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [process.returncode for process in running], errors, abs(ends[0] - ends[1])


def test_an_exception_in_process_0_ends_the_one_that_waits():
    codes, errors, seconds = run("raise", "wait")
    assert codes == [1, 12], errors
    assert "KeyError: 'odd thing'" in errors[0]
    assert "error: [process 1] process 0 has ended: KeyError: 'odd thing'" in errors[1]
    assert seconds < 10


def test_the_same_mistake_in_both_keeps_its_exit_code():
    codes, errors, _ = run("refuse", "late")
    assert codes == [65, 65], errors


@pytest.mark.faults
def test_an_exception_in_process_1_ends_the_coordinator_too():
    codes, errors, seconds = run("wait", "raise")
    assert codes == [12, 1], errors
    assert "error: process 1 has ended: KeyError: 'odd thing'" in errors[0]
    assert seconds < 15


@pytest.mark.faults
def test_an_orderly_end_is_silent():
    codes, errors, _ = run("done", "done")
    assert codes == [0, 0] and errors == ["", ""]


@pytest.fixture
def two(monkeypatch):
    """This process as number 1 of two, with nobody to ask."""
    monkeypatch.setattr(lost.distributed.global_state, "num_processes", 2)
    monkeypatch.setattr(lost.distributed.global_state, "process_id", 1)
    monkeypatch.setattr(lost, "several", lambda: True)


def test_jax_errors_of_a_lost_peer_are_peer_lost_errors(two):
    from jax.errors import JaxRuntimeError

    assert isinstance(lost.as_peer_lost(JaxRuntimeError(GLOO)), PeerLostError)
    wrapped = ValueError("reading figures")
    wrapped.__cause__ = JaxRuntimeError("UNAVAILABLE: coordination service is gone")
    assert isinstance(lost.as_peer_lost(wrapped), PeerLostError)
    assert isinstance(lost.as_peer_lost(ValueError(GLOO)), PeerLostError)
    told = PeerLostError("process 3 did not answer")
    assert lost.as_peer_lost(told) is told


def test_who_loses_a_peer_that_hung_hangs_too(two, monkeypatch):
    monkeypatch.setattr(lost, "_word", lambda: {"process": 0, "reason": "hung: no progress", "code": 13})
    error = lost.as_peer_lost(RuntimeError(GLOO))
    assert error.exit_code == 13 and error.message == "process 0 has ended: hung: no progress"


@pytest.mark.parametrize("error", [DataError("gloo.txt is empty"), RuntimeError("RESOURCE_EXHAUSTED")])
def test_other_errors_are_not(error, two):
    assert lost.as_peer_lost(error) is None


def test_a_single_process_has_no_peers_to_lose():
    assert lost.as_peer_lost(RuntimeError(GLOO)) is None
    assert lost.prefix() == "" and not lost.several()


def test_messages_of_other_processes_than_0_carry_their_number(two):
    assert lost.prefix() == "[process 1] "
