"""H1 to H4, A3, W3: what stands still is ended and named, what is slow is named, and what grows is told of.

The limits of the watchdog are seconds here (LIMITS); in a run they are minutes.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import yaml

from jtrain.checkpoint import Checkpoints
from jtrain.observe.host_memory import host_memory
from tests.faults.runs import ROOT, codes, config_of, durable, events, goes_on, said, start, wait_for

pytestmark = pytest.mark.faults
LIMITS = "step=12,data_wait=12,eval=12,restore=40,compile=40"


def stacks(config, process):
    return (Path(config["run_dir"]) / "stacks" / f"process-{process}.txt").read_text()


def end_of_gang(running):
    """What a supervisor does once one has left: SIGKILL to the others."""
    wait_for_one(running)
    time.sleep(3)
    for one in running:
        if one.process.poll() is None:
            one.process.kill()
    return codes(running)


def wait_for_one(running, seconds=150):
    deadline = time.monotonic() + seconds
    while all(one.process.poll() is None for one in running):
        assert time.monotonic() < deadline, said(running)
        time.sleep(0.05)


@pytest.mark.parametrize("rank", [0, 1])
def test_h1_a_stopped_process_is_named_and_the_run_ends_with_13(rank, reference, tmp_path):
    config = config_of(tmp_path)
    running = start(config, "first", fault="stop@step:10", rank=rank, LIMITS=LIMITS, SLOW="0.1")
    found = end_of_gang(running)
    assert found[1 - rank] == 13 and found[rank] == -signal.SIGKILL, said(running)
    error = running[1 - rank].err
    assert "hung: no progress for 1" in error and "in phase step" in error
    # Process 0 keeps the store: when it is the one that stopped, nobody answers.
    named = "silent (stopped, or gone): process 1" if rank else "the coordinator (process 0) does not answer"
    assert named in error, error
    assert "most recent call first" in stacks(config, 1 - rank) and "loop.py" in stacks(config, 1 - rank)
    if rank == 1:
        (event,) = events(config, "hang")
        assert event["phase"] == "step" and "process 1" in event["waits_for"]
    before = durable(config)
    assert 4 in before  # the save of 8 has waited for it
    goes_on(config, reference)


def test_h3_a_process_that_skips_a_collective_is_named_and_all_leave_with_13(reference, tmp_path):
    config = config_of(tmp_path)
    running = start(config, "first", fault="sleep@step:6", rank=1, LIMITS=LIMITS)
    assert codes(running) == [13, 13], said(running)
    texts = "".join(one.err for one in running)
    assert "behind the others: process 1" in texts and "strike" in stacks(config, 1)
    goes_on(config, reference)


def test_h4_a_restore_that_is_slow_on_one_process_is_bounded_and_names_it(reference, tmp_path):
    config = config_of(tmp_path)
    running = start(config, "first", fault="term@step:6", SLOW="0.2")
    assert codes(running) == [10, 10], said(running)
    running = start(config, "second", fault="sleep@restore", rank=1, LIMITS="restore=12,compile=12,step=12")
    assert codes(running) == [13, 13], said(running)
    assert "in phase restore" in running[0].err + running[1].err
    assert "strike" in stacks(config, 1)
    goes_on(config, reference)


def test_h1_the_supervisor_ends_the_stopped_process_and_starts_the_gang_again(reference, tmp_path):
    from tests.parity.test_kill import result

    config = config_of(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "words = sys.orig_argv\n"
        "if words[1:4] == ['-m', 'jtrain', 'train']:\n"
        "    from tests.faults.linear_run import install\n"
        "    install()\n"
    )
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    environment |= {"LIMITS": LIMITS, "SLOW": "0.1", "FAULT": "stop@step:6", "FAULT_RANK": "1"}
    command = [sys.executable, "-m", "jtrain", "launch", "local", str(tmp_path / "run.yaml"), "--hosts", "2"]
    with (tmp_path / "said").open("wb") as out:
        supervisor = subprocess.Popen(command, cwd=tmp_path, env=os.environ | environment, stdout=out, stderr=out)
    children = []
    deadline = time.monotonic() + 240
    try:
        while supervisor.poll() is None and time.monotonic() < deadline:
            with_children = psutil.Process(supervisor.pid).children(recursive=True)
            children += [child for child in with_children if child not in children]
            time.sleep(0.2)
        text = (tmp_path / "said").read_text()
        assert supervisor.poll() == 0, text[-4000:]
    finally:
        supervisor.kill()
        supervisor.wait()
    assert "exit 13" in text and "process 1" in text and "done: exit 0 after 2 attempts" in text
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    lines = [json.loads(line) for line in (Path(config["run_dir"]) / "events.jsonl").read_text().splitlines()]
    (restart,) = (line for line in lines if line["event"] == "restart")
    assert restart["last"]["code"] == 13
    found = result(config)
    assert all(found[part] == reference[part] for part in ("step", "counters", "lines", "bits"))


def test_h2_a_process_that_can_run_half_of_the_time_is_named_and_nothing_is_restarted(reference, tmp_path):
    from tests.parity.test_kill import result

    config = config_of(tmp_path, max_steps=120, checkpoint={"save_steps": 0}, eval={"eval_steps": 0})
    running = start(config, "first", SLOW="0.1", LIMITS="queue=10,step=200,eval=200,data_wait=200")
    wait_for(running, lambda: 3 in running[0].steps)
    over = threading.Event()

    def hold() -> None:
        while not over.is_set() and running[1].process.poll() is None:
            running[1].process.send_signal(signal.SIGSTOP)
            time.sleep(0.25)
            running[1].process.send_signal(signal.SIGCONT)
            time.sleep(0.1)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert codes(running, 200) == [0, 0], said(running)
    finally:
        over.set()
        holder.join()
    found = events(config, "straggler")
    assert {event["process"] for event in found} == {1}, said(running)
    assert "process 1 is slow" in running[0].out and "it can't run" in running[0].out
    assert result(config)["step"] == 120 and not events(config, "hang")


def test_a3_a_source_that_stalls_is_warned_of_and_the_run_goes_on(reference, tmp_path):
    from tests.parity.test_kill import result

    config = config_of(tmp_path)
    running = start(config, "first", fault="pause@data:9", rank=1, LIMITS=LIMITS)
    assert codes(running) == [0, 0], said(running)
    assert "has waited 1 s for its batch; the limit is 12 s" in running[1].out
    assert "the data is there again, after" in running[1].out
    found = result(config)
    assert all(found[part] == reference[part] for part in ("step", "counters", "lines", "bits"))


def test_memory_that_grows_is_told_of_before_the_run_ends(tmp_path):
    config = config_of(tmp_path, max_steps=80, checkpoint={"save_steps": 0}, eval={"eval_steps": 0})
    running = start(config, "first", fault="leak@step:1", rank=1, SLOW="0.6", ROOM="250", LIMITS="queue=10")
    assert codes(running) == [0, 0], said(running)
    assert "host memory grows by" in running[1].out and "MiB a step" in running[1].out
    found = events(config, "memory_growth")
    assert {event["process"] for event in found} == {1}
    assert found[0]["kind"] == "host" and 3 * 2**20 < found[0]["bytes_per_step"] < 6 * 2**20


def test_w3_two_hundred_saves_leave_no_memory_and_no_more_than_what_is_kept_on_the_disk(tmp_path):
    state = {"w": jnp.arange(1 << 18, dtype=jnp.float32)}  # 1 MiB
    used, disk = [], []
    with Checkpoints(tmp_path / "run", save_total_limit=2) as checkpoints:
        for step in range(1, 201):
            checkpoints.save(step, state, {"step": step})
            checkpoints.wait()
            used.append(host_memory()[0])
            disk.append(sum(path.stat().st_size for path in (tmp_path / "run").rglob("*") if path.is_file()))
    assert checkpoints.durable_step == 200
    assert sorted(path.parent.name for path in (tmp_path / "run").rglob("manifest.json")) == ["199", "200"]
    assert max(disk) < 2.1 * 2**20 and max(disk[50:]) - min(disk[50:]) < 1024  # times of day differ in length
    slope = np.polyfit(np.arange(100), np.asarray(used[100:], float), 1)[0]
    assert abs(slope) < 2**20 / 4, f"{slope / 2**20:.3f} MiB a save"
