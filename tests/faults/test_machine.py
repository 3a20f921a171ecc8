"""W1, W2, W4, M1, X1: a clock that jumps, memory that ends, few open files, trackers that hang, a crash loop."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from jtrain.observe.metrics import read_events
from jtrain.train.callbacks import Callback
from tests.faults.runs import ROOT, config_of
from tests.launch.test_supervisor import supervise
from tests.train.fits import make


class Jump(Callback):
    """Sets the wall clock to another time after the second update."""

    def __init__(self, monkeypatch, seconds):
        self.monkeypatch, self.seconds = monkeypatch, seconds

    def on_step_end(self, trainer, step, metrics):
        if step == 2:
            real = time.time
            self.monkeypatch.setattr(time, "time", lambda: real() + self.seconds)


@pytest.mark.parametrize(
    "seconds", [pytest.param(3600.0, id="W1-forward", marks=pytest.mark.faults), pytest.param(-3600.0, id="W1-back")]
)
def test_w1_a_clock_that_jumps_an_hour_changes_no_bit_no_name_and_no_interval(seconds, tmp_path, monkeypatch):
    fields = {"max_steps": 6, "checkpoint": {"save_steps": 2, "save_minutes": 30.0, "save_total_limit": 9}}
    whole = make(tmp_path / "whole", **fields)
    whole.fit()
    trainer = make(tmp_path / "run", [Jump(monkeypatch, seconds)], **fields)
    trainer.fit()
    np.testing.assert_array_equal(trainer.state.params["w"], whole.state.params["w"])
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdigit())
    assert names == ["2", "4", "6"]  # a step is named by its number, and the jump is no half an hour
    assert not read_events(tmp_path / "run", "hang")
    again = make(tmp_path / "run", **fields | {"max_steps": 8})  # started by the other clock
    again.fit()
    assert again.counters.step == 8


@pytest.mark.faults
def test_w2_a_process_whose_memory_ends_is_told_of_and_its_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("MEET", str(tmp_path))
    group = own_group()
    try:
        (group / "memory.limit_in_bytes").write_text(str(256 << 20))
        enter = f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
        script = (
            f"at(7, durable=6)\nif attempt == 1:\n    {enter}\n    held = [bytearray(1 << 20) for _ in range(4096)]"
        )
        code, outcomes, said = supervise(script)
    finally:
        os.rmdir(group)
    assert code == 0 and [outcome.code for outcome in outcomes] == [-9, 0]
    assert "killed by SIGKILL (likely out of memory: the kernel has ended a process for it)" in said
    assert "from step 6" in said


def own_group():
    """A memory group of our own; a skip where none can be made."""
    line = next((x for x in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in x), None)
    base = Path(f"/sys/fs/cgroup/memory{line.rpartition(':')[2]}") if line else None
    if base is None or not os.access(base, os.W_OK):
        pytest.skip("no memory group of version 1 that this user may write")
    group = base / f"jtrain-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory group can be made: {error}")
    return group


@pytest.mark.faults
def test_w4_256_open_files_are_enough(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config_of(tmp_path, devices=1)))
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("linear_run.py")), "train", str(path)],
        cwd=tmp_path, env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
