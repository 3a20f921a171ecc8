"""`jtrain launch local` with real runs: killed and stopped processes change no bit, and nothing is left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.parity.launch import FLAGS, ROOT
from tests.parity.runs import write_corpus
from tests.parity.test_kill import config_of, result

pytestmark = pytest.mark.faults
STEPS = 30


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def launch(corpus, folder, *options):
    """Starts two processes of a run; its config, the supervisor, and the file of what all of them say."""
    config = config_of(corpus, folder, devices=2)
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "jtrain", "launch", "local", str(folder / "run.yaml"), "--hosts", "2", *options]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS, "PYTHONPATH": str(ROOT)}
    with (folder / "said").open("wb") as said:
        supervisor = subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said)
    return config, supervisor, folder / "said"


def workers(supervisor):
    """The processes that train, by rank."""
    found = {}
    for child in psutil.Process(supervisor.pid).children(recursive=True):
        try:
            if "train" in child.cmdline() and "jtrain.launch.leash" not in child.cmdline():
                found[int(child.environ()["JTRAIN_DISTRIBUTED__PROCESS_ID"])] = child
        except psutil.Error:
            continue
    return found


def wait_for_step(supervisor, said, step, attempt=1):
    """Waits until that attempt has printed the line of a step."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and supervisor.poll() is None:
        text = said.read_text().rpartition(f"attempt {attempt}:")[2]
        if re.search(rf"step {step}/", text):
            return
        time.sleep(0.02)
    raise AssertionError(said.read_text()[-3000:])


def finish(supervisor, said, seconds=240):
    try:
        return supervisor.wait(seconds)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        raise AssertionError(said.read_text()[-3000:]) from None


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    config, supervisor, said = launch(corpus, tmp_path_factory.mktemp("whole"))
    assert finish(supervisor, said) == 0, said.read_text()
    assert "done: exit 0 after 1 attempt" in said.read_text()
    return result(config)


def check(config, uninterrupted):
    found = result(config)
    assert found["bits"] == uninterrupted["bits"] and found["counters"] == uninterrupted["counters"]
    assert found["lines"] == uninterrupted["lines"]


@pytest.mark.parametrize("rank", [0, 1])
def test_k3_a_killed_process_is_started_again_with_the_gang_and_changes_no_bit(rank, corpus, uninterrupted, tmp_path):
    config, supervisor, said = launch(corpus, tmp_path)
    wait_for_step(supervisor, said, 7)
    killed = workers(supervisor)
    killed[rank].kill()
    assert finish(supervisor, said) == 0, said.read_text()
    text = said.read_text()
    assert f"rank {rank} (local{rank}): killed by SIGKILL" in text and "done: exit 0 after 2 attempts" in text
    durable = int(re.search(r"again in .* s from step (\d+)", text)[1])
    assert durable >= 4  # a save every two steps, at most one under way
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "resume"] == [durable]
    (restart,) = (event for event in events if event["event"] == "restart")
    assert restart["attempt"] == 2 and "killed by SIGKILL" in restart["last"]["reason"]
    assert not any(process.is_running() for process in killed.values())
    check(config, uninterrupted)


def test_t1_sigterm_to_the_supervisor_saves_and_the_next_launch_goes_on(corpus, uninterrupted, tmp_path):
    config, supervisor, said = launch(corpus, tmp_path)
    wait_for_step(supervisor, said, 5)
    supervisor.terminate()
    assert finish(supervisor, said) == 10, said.read_text()
    assert "preempted at step" in said.read_text()
    _, again, said = launch(corpus, tmp_path)
    assert finish(again, said) == 0, said.read_text()
    check(config, uninterrupted)


def test_k8_nothing_is_left_of_a_run_whose_supervisor_is_killed(corpus, uninterrupted, tmp_path):
    config, supervisor, said = launch(corpus, tmp_path)
    wait_for_step(supervisor, said, 5)
    left = psutil.Process(supervisor.pid).children(recursive=True)
    assert len(left) >= 4
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    psutil.wait_procs(left, timeout=10)
    assert not [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    _, again, said = launch(corpus, tmp_path)
    assert finish(again, said) == 0, said.read_text()
    check(config, uninterrupted)


def test_k1_a_process_that_is_killed_while_they_meet_is_no_end(corpus, uninterrupted, tmp_path):
    config, supervisor, said = launch(corpus, tmp_path)
    while not (found := workers(supervisor)) and supervisor.poll() is None:
        time.sleep(0.02)
    next(iter(found.values())).kill()
    assert finish(supervisor, said) == 0, said.read_text()
    assert "done: exit 0 after 2 attempts" in said.read_text()
    check(config, uninterrupted)


def test_an_elastic_run_goes_on_with_one_process_and_the_same_rows(corpus, uninterrupted, tmp_path):
    config, supervisor, said = launch(corpus, tmp_path, "--hosts", "1:2")
    wait_for_step(supervisor, said, 7)
    workers(supervisor)[1].kill()
    assert finish(supervisor, said) == 0, said.read_text()
    assert "attempt 2: 1 process on local0" in said.read_text()
    found = result(config)
    assert found["counters"] == uninterrupted["counters"]
    for line, other in zip(found["lines"], uninterrupted["lines"], strict=True):
        name = "loss" if "loss" in line else "eval_loss"
        assert line["step"] == other["step"] and line[name] == pytest.approx(other[name], rel=1e-5)


def test_c66_an_error_of_the_config_ends_at_once(corpus, tmp_path):
    _, supervisor, said = launch(corpus, tmp_path, "--data.train", str(Path(tmp_path) / "nothing.jsonl"))
    assert finish(supervisor, said) == 65, said.read_text()
    assert "it would end the same way again: exit 65 after 1 attempt" in said.read_text()
