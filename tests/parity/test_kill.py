"""Killed and started again, a run ends with the same bits; a peer's end ends the run."""

import json
import random
import signal
import time

import numpy as np
import pytest

from jtrain.checkpoint import Checkpoints
from jtrain.checkpoint.arrays import read_arrays
from jtrain.checkpoint.manifest import read_manifest
from jtrain.observe.metrics import read_metrics
from tests.parity.launch import start, start_several, wait_all
from tests.parity.runs import settings, write_corpus

STEPS = 30
CLOCK = {"time", "step_seconds", "tokens_per_second", "tokens_per_second_per_device", "tflops_per_device", "mfu",
         "mfu_legacy", "memory_gib", "data_wait_seconds"}  # fmt: skip


def config_of(corpus, folder, **changes):
    base = settings(
        corpus,
        folder / "run",
        max_steps=STEPS,
        gradient_accumulation_steps=1,
        model={"num_hidden_layers": 1},
        data={"eval": 0.2},
        eval={"eval_steps": 7},
        checkpoint={"save_steps": 2, "best": None},
        compile_cache="auto",
    )
    return base | changes


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    config = config_of(corpus, tmp_path_factory.mktemp("whole"))
    whole = start(config, "whole")
    assert whole.wait() == 0, whole.err
    return result(config)


def result(config):
    """The final arrays, the counters beside them, and every figure that does not depend on the clock."""
    reader = Checkpoints(config["run_dir"], read_only=True)
    step = reader.steps()[-1]
    reader.verify(step)
    folder = reader.root / str(step)
    wanted = {path: as_struct(*record) for path, record in read_manifest(folder).arrays.items()}
    bits = {path: np.asarray(array).tobytes() for path, array in read_arrays(folder / "state", wanted).items()}
    lines = [{name: line[name] for name in line.keys() - CLOCK} for line in read_metrics(config["run_dir"])]
    return {"step": step, "bits": bits, "counters": reader.read_meta(step)["counters"], "lines": lines}


def as_struct(dtype, shape):
    import jax

    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))


def check(config, uninterrupted):
    found = result(config)
    for part in ("step", "counters", "lines"):
        assert found[part] == uninterrupted[part]
    assert found["bits"] == uninterrupted["bits"]


def strike(config, name, number, rng):
    """Starts the run and sends a signal: while it starts, or some steps later. Whether it came before the end."""
    running = start(config, name)
    if number == signal.SIGKILL and rng.random() < 0.25:
        time.sleep(rng.uniform(0.0, 6.0))
    else:
        wanted = rng.randint(1, 5)
        while len(running.steps) < wanted and running.process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.uniform(0.0, 0.1))
    running.process.send_signal(number)
    code = running.wait()
    if code and number == signal.SIGTERM:
        saved = running.steps[-1]
        assert f"preempted at step {saved}, saved" in running.err
        assert Checkpoints(config["run_dir"], read_only=True).steps()[-1] == saved
    assert code in (0, 10 if number == signal.SIGTERM else -number), running.err
    return code != 0


def strike_all(signals, corpus, folder, uninterrupted, seed):
    """Sends every signal to a run that is then started again; a run that ends is compared, and a new one begins."""
    rng, waiting, runs = random.Random(seed), list(signals), 0
    while waiting:
        runs += 1
        base = folder / str(runs)
        base.mkdir()
        config = config_of(corpus, base)
        hit = True
        while waiting and hit:
            hit = strike(config, f"strike{len(waiting)}", waiting[0], rng)
            waiting = waiting[hit:]
        if hit:
            last = start(config, "last")
            assert last.wait() == 0, last.err
        check(config, uninterrupted)


KILL, TERM = signal.SIGKILL, signal.SIGTERM


def test_a_kill_and_a_termination_change_no_bit(corpus, uninterrupted, tmp_path):
    strike_all([KILL, TERM], corpus, tmp_path, uninterrupted, seed=3)


@pytest.mark.faults
def test_twenty_kills_and_five_terminations_change_no_bit(corpus, uninterrupted, tmp_path):
    strike_all([KILL, KILL, TERM, KILL, KILL] * 5, corpus, tmp_path, uninterrupted, seed=20)


def several(corpus, folder, *faults):
    """Two processes with a device each: codes, processes, and seconds from the first end to the last."""
    config = config_of(corpus, folder, devices=2)
    running = start_several(config, "process", [(fault, 6) for fault in faults])
    while all(one.process.poll() is None for one in running):
        time.sleep(0.05)
    first = time.monotonic()
    codes = wait_all(running, seconds=120)
    return config, codes, running, time.monotonic() - first


@pytest.mark.faults
@pytest.mark.parametrize("faults", [("term", "wait"), ("wait", "term")], ids=["process 0", "process 1"])
def test_a_signal_to_one_process_saves_the_same_step_on_both(faults, corpus, tmp_path):
    config, codes, running, _ = several(corpus, tmp_path, *faults)
    assert codes == [10, 10], [one.err for one in running]
    saved = running[0].steps[-1]
    assert f"preempted at step {saved}, saved" in running[0].err and "error" not in running[1].err
    assert Checkpoints(config["run_dir"], read_only=True).steps()[-1] == saved
    again = start_several(config, "again", [("none", 0), ("none", 0)])
    assert wait_all(again) == [0, 0]
    steps = [line["step"] for line in read_metrics(config["run_dir"], "train")]
    assert steps == list(range(1, STEPS + 1))


@pytest.mark.faults
@pytest.mark.parametrize("faults", [("none", "raise"), ("raise", "none")], ids=["process 1", "process 0"])
def test_an_exception_in_one_process_ends_the_other_with_12(faults, corpus, tmp_path):
    _, codes, running, seconds = several(corpus, tmp_path, *faults)
    failed = faults.index("raise")
    assert codes[failed] == 70 and codes[1 - failed] == 12, [one.err for one in running]
    assert f"process {failed} has ended: KeyError" in running[1 - failed].err
    assert seconds < 20
    assert ("[process 1]" in running[1].err) and ("[process" not in running[0].err)


@pytest.mark.faults
def test_a_lost_peer_ends_the_run_with_12_and_the_next_start_goes_on(corpus, tmp_path):
    config, codes, running, seconds = several(corpus, tmp_path, "none", "kill")
    assert codes == [12, -signal.SIGKILL] and "was lost" in running[0].err
    assert seconds < 20
    durable = Checkpoints(config["run_dir"], read_only=True).steps()
    again = start_several(config, "again", [("none", 0), ("none", 0)])
    assert wait_all(again) == [0, 0]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    resumed = [event["step"] for event in events if event["event"] == "resume"]
    assert resumed == durable[-1:]
