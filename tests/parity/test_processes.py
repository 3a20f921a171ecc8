"""Several processes are one run: same parameters, losses, rows and checkpoints as one process with all the devices."""

import json
import shutil

import jax
import numpy as np
import pytest

from jtrain import PretrainTrainer
from jtrain.observe.metrics import read_metrics
from tests.parity.launch import start_several, wait_all
from tests.parity.runs import settings, train, write_corpus

STEPS = 20
FILES = {".lease", ".run.json", "checkpoints", "config.yaml", "events.jsonl", "metrics.jsonl", "model"}


def config_of(folder, corpus):
    return settings(
        corpus,
        folder / "run",
        max_steps=STEPS,
        devices=8,
        mesh={"data": 1, "fsdp": 8},  # every layer's parameters are gathered across the processes
        gradient_accumulation_steps=1,
        checkpoint={"save_steps": 10},
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """One process: the initial parameters, the lines of 20 steps, the final parameters."""
    config = config_of(tmp_path_factory.mktemp("whole"), corpus) | {"checkpoint": {"save_steps": 0, "best": None}}
    trainer = PretrainTrainer(config)
    initial = arrays(trainer.state.params)
    trainer.fit()
    return initial, trainer.history.train, arrays(trainer.state.params)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.grid)], ids=["2x4", "4x2"])
def parts(request, corpus, tmp_path_factory):
    """The same run by several processes: its config, its folder, and what they printed."""
    folder = tmp_path_factory.mktemp("parts")
    config = config_of(folder, corpus)
    running = start_several(config, "process", [("dump", 0)] * request.param)
    codes = wait_all(running)
    assert codes == [0] * request.param, "".join(one.err for one in running)
    return config, folder, running


def arrays(tree):
    """Path -> values."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.device_get(tree))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def test_initial_parameters_are_equal_in_every_bit(parts, whole):
    _, folder, running = parts
    seen = {name: np.zeros(array.shape, bool) for name, array in whole[0].items()}
    for index in range(len(running)):
        for key, shard in np.load(folder / f"initial-{index}.npz").items():
            name, _, corner = key.partition("|")
            place = tuple(
                slice(begin, begin + size)
                for begin, size in zip(map(int, filter(None, corner.split(","))), shard.shape, strict=True)
            )
            np.testing.assert_array_equal(shard, whole[0][name][place])
            seen[name][place] = True
    assert all(places.all() for places in seen.values())


def test_losses_and_rows_are_equal(parts, whole):
    config, _, _ = parts
    lines, expected = read_metrics(config["run_dir"], "train"), whole[1]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for name in ("tokens", "examples", "epoch"):  # tokens of every batch: another row would change them
        assert [line[name] for line in lines] == [line[name] for line in expected]
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(lines[0][name], expected[0][name], rtol=1e-6)
    np.testing.assert_allclose(lines[-1]["loss"], expected[-1]["loss"], rtol=1e-5)


def test_process_0_alone_prints_and_writes_the_files(parts):
    _, folder, running = parts
    assert running[0].steps == list(range(1, STEPS + 1))
    assert all(other.out == "" and other.err == "" for other in running[1:])
    assert {path.name for path in (folder / "run").iterdir()} == FILES
    metrics = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == STEPS
    events = [json.loads(line)["event"] for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    assert (events.count("start"), events.count("durable"), events.count("end")) == (1, 2, 1)


def test_one_process_restores_what_they_saved_and_goes_on(parts, whole, tmp_path):
    config, folder, _ = parts
    shutil.copytree(folder / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / str(STEPS))
    config = config | {"run_dir": str(tmp_path / "run")}
    middle, _ = train(config)
    assert [line["step"] for line in middle.history.train] == list(range(11, STEPS + 1))
    final, _ = train(config | {"run_dir": str(folder / "run")})
    assert final.history.train == [] and final.counters == middle.counters
    for trainer in (middle, final):
        for name, array in arrays(trainer.state.params).items():
            np.testing.assert_allclose(array, whole[2][name], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(middle.history.train[-1]["loss"], whole[1][-1]["loss"], rtol=1e-5)


@pytest.mark.grid
def test_stages_over_two_processes_give_the_same_losses(corpus, whole, tmp_path):
    mesh = {"data": 1, "pipeline": 2, "fsdp": 2, "tensor": 2}
    config = config_of(tmp_path, corpus) | {"mesh": mesh, "pipeline": {"microbatches": 4}}
    running = start_several(config, "process", [("dump", 0)] * 2)
    assert wait_all(running) == [0, 0], "".join(one.err for one in running)
    losses = [line["loss"] for line in read_metrics(config["run_dir"], "train")]
    np.testing.assert_allclose(losses, [line["loss"] for line in whole[1]], rtol=1e-5)
