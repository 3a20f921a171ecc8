"""kill -9 while steps are saved: what is there afterwards is whole, and the next start goes on from it."""

import os
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from kill_worker import state_of

from jtrain.checkpoint import Checkpoints

POINTS = (
    "before_sync",
    "before_manifest",
    "before_the_manifest_is_renamed",
    "before_the_step_is_renamed",
    "after_manifest",
    "in_the_deletion",
)


def start(run, point=""):
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    environment = os.environ | {"PYTHONPATH": root, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    worker = os.path.join(os.path.dirname(__file__), "kill_worker.py")
    command = [sys.executable, worker, str(run), *([point] if point else [])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def newest_after_start(process):
    line = process.stdout.readline()
    assert line.startswith("START"), process.stderr.read()
    return int(line.split()[1])


def check(run, durable_before):
    """Every step that is listed restores to what was saved; nothing durable was lost. Returns the newest."""
    reader = Checkpoints(run, read_only=True)
    assert reader.steps()
    for step in reader.steps():
        state, meta, _ = reader.restore(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state_of(0)), step
        )
        assert meta == {"step": step}
        for name, wanted in state_of(step).items():
            np.testing.assert_array_equal(state[name], wanted)
    assert reader.steps()[-1] >= durable_before
    return reader.steps()[-1]


def kill_at_random(run, rng, durable):
    process = start(run)
    assert newest_after_start(process) == durable
    saves = rng.randint(2, 4)
    for _ in range(saves):
        assert process.stdout.readline().startswith("SAVED")
    time.sleep(rng.random() * 0.15)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close(), process.stderr.close()
    # a save waits for the one before it, so that one was durable
    return check(run, durable + saves - 1)


def kill_at_point(run, point, durable):
    process = start(run, point)
    assert newest_after_start(process) == durable
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, errors
    newest = check(run, durable + 3)
    finished = point in ("after_manifest", "in_the_deletion")
    assert newest == durable + 3 + finished
    return newest


def test_k4_k5_three_kills_lose_nothing_that_was_durable(tmp_path):
    durable = kill_at_point(tmp_path, "before_manifest", 0)
    durable = kill_at_point(tmp_path, "in_the_deletion", durable)
    durable = kill_at_random(tmp_path, random.Random(0), durable)
    Checkpoints(tmp_path)  # sweeps
    assert all(name.isdigit() for name in os.listdir(tmp_path / "checkpoints"))


@pytest.mark.faults
def test_k4_k5_every_point_and_twenty_random_kills_lose_nothing_that_was_durable(tmp_path):
    durable, rng = 0, random.Random(1)
    for point in POINTS:
        durable = kill_at_point(tmp_path, point, durable)
    for _ in range(20):
        durable = kill_at_random(tmp_path, rng, durable)
