"""K4 to K6: two processes, of which one is killed at every place of a save, in the deletion, in a restore, at random.

What is there afterwards is the step before or the new one, never half of one; every step that is listed restores; and
the next start ends with the bits and the lines of an undisturbed run.
"""

import hashlib
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from jtrain.checkpoint import Checkpoints
from jtrain.checkpoint.arrays import read_arrays
from jtrain.checkpoint.manifest import read_manifest
from tests.faults import save_points
from tests.faults.runs import codes, config_of, durable, goes_on, said, start
from tests.parity.test_kill import as_struct, result

pytestmark = pytest.mark.faults
LOST = (12, -signal.SIGABRT)
"""What the other process ends with: it heard of it, or the coordinator was gone and jax ended it."""


def whole_steps(config):
    """Steps that are listed, each of them verified and read; and no folder is half a step."""
    reader = Checkpoints(config["run_dir"], read_only=True)
    steps = reader.steps()
    for step in steps:
        reader.verify(step)
        assert reader.read_meta(step)["counters"]["step"] == step
        folder = reader.root / str(step)
        arrays = read_arrays(
            folder / "state", {path: as_struct(*record) for path, record in read_manifest(folder).arrays.items()}
        )
        assert arrays and all(np.isfinite(np.asarray(array, float)).all() for array in arrays.values())
    if reader.root.exists():
        assert sorted(int(name) for name in os.listdir(reader.root) if name.isdigit()) == steps
    return steps


def hashes(folder):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def killed(running, rank):
    found = codes(running, 300)
    assert found[rank] == -signal.SIGKILL and found[1 - rank] in LOST, said(running)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", [*save_points.BY_ALL[:2], *save_points.BY_ONE])
def test_k4_a_kill_in_a_save_leaves_the_step_before_or_the_new_one(point, rank, reference, tmp_path):
    config = config_of(tmp_path)
    killed(start(config, "first", POINT=point, POINT_RANK=str(rank), SLOW="0.05", BEAT="10"), rank)
    steps = whole_steps(config)
    if rank == 0:
        assert steps == ([4, 8] if point in save_points.AFTER else [4])
    else:  # process 0 may come to its end first
        assert steps in ([4], [4, 8])
    goes_on(config, reference)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", save_points.IN_GC)
def test_k5_a_kill_in_the_deletion_leaves_no_half_step(point, rank, reference, tmp_path):
    config = config_of(tmp_path, checkpoint={"save_steps": 4, "best": None, "save_total_limit": 1})
    killed(start(config, "first", POINT=point, POINT_RANK=str(rank), SLOW="0.05", BEAT="10"), rank)
    steps = whole_steps(config)
    assert steps == ([4, 8] if point == "gc_rename" and rank == 0 else [8]) or (rank and steps == [4, 8])
    goes_on(config, reference)
    assert durable(config) == [20]
    files = [path for path in (Path(config["run_dir"]) / "checkpoints").rglob("*") if path.is_file()]
    assert all("checkpoints/20/" in str(path) for path in files), files


@pytest.mark.parametrize("rank", [0, 1])
def test_k6_a_kill_in_a_restore_changes_nothing(rank, reference, tmp_path):
    config = config_of(tmp_path)
    running = start(config, "first", fault="term@step:6", SLOW="0.2")
    assert codes(running) == [10, 10], said(running)
    folder = Path(config["run_dir"]) / "checkpoints"
    before = hashes(folder)
    running = start(config, "second", POINT="restore", POINT_RANK=str(rank), LIMITS="restore=20", BEAT="10")
    found = codes(running)
    assert found[rank] == -signal.SIGKILL and found[1 - rank] in (13, *LOST), said(running)
    assert hashes(folder) == before
    goes_on(config, reference)


@pytest.mark.timeout(1800)
def test_k4_twenty_kills_at_random_times_lose_no_durable_step(reference, tmp_path):
    rng, kills, run = random.Random(0), 0, 0
    while kills < 20:
        (tmp_path / str(run)).mkdir(exist_ok=True)
        config = config_of(tmp_path / str(run))
        before = durable(config)
        rank, name = rng.randrange(2), f"kill-{kills}"
        running = start(config, name, SLOW="0.02", BEAT="10")
        first, deadline = rng.uniform(0.0, 0.5), time.monotonic() + 120
        while not running[0].steps and all(one.process.poll() is None for one in running):
            assert time.monotonic() < deadline, said(running)
            time.sleep(0.01)
        time.sleep(first)
        running[rank].process.kill()
        found = codes(running)
        if found == [0, 0]:
            assert all(result(config)[part] == reference[part] for part in ("step", "counters", "lines", "bits"))
            run += 1
            continue
        assert found[rank] == -signal.SIGKILL or 20 in durable(config), said(running)
        kills += 1
        steps = whole_steps(config)
        assert not before or steps[-1] >= before[-1]  # O7
        if steps and steps[-1] == 20:
            goes_on(config, reference, f"end-{run}")
            run += 1
    goes_on(config, reference, "last")
