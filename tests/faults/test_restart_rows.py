"""R1 to R6: what may change between two starts of a run, what may not, and what a finished run does.

Runs of a line by the program itself (`jtrain train`), in this process: exit codes are its own.
"""

import numpy as np
import pytest
import yaml

from jtrain import tasks
from jtrain.cli.main import main
from jtrain.data.cache import CacheOptions, open_store
from jtrain.data.tokenizers import load_tokenizer
from jtrain.errors import Exit
from jtrain.observe.metrics import read_events, read_metrics
from jtrain.train.trainer import Trainer
from tests.train.fits import examples, settings, squared_error
from tests.train.linear import Linear
from tests.train.test_session import Wide

slow = pytest.mark.faults


@pytest.fixture
def train(tmp_path, monkeypatch, capsys):
    """Starts the run again with changes: (exit code, what it said)."""

    def call(*, seed_of_data=0, model_class=Linear, folder="run", **changes):
        rows = examples(seed=seed_of_data)
        monkeypatch.setattr(
            tasks, "trainer_of", lambda task: lambda config: Trainer(config, model=model_class, loss_fn=squared_error,
                                                                      train_data=rows)
        )  # fmt: skip
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(settings(tmp_path / folder, task="pretrain", **{"max_steps": 6} | changes)))
        code = main(["train", str(path)])
        out, err = capsys.readouterr()
        return code, out + err

    return call


def losses(run_dir):
    return {line["step"]: line["loss"] for line in read_metrics(run_dir, "train")}


EVERY = {"logging": {"log_every_n_steps": 1, "trackers": []}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"optimizer": {"learning_rate": 0.05}}, "optimizer.learning_rate: 0.1 -> 0.05", id="R1-lr"),
        pytest.param(
            {"logging": {"log_every_n_steps": 2}}, "logging.log_every_n_steps: 4 -> 2", id="R1-log", marks=slow
        ),
    ],
)
def test_r1_rates_and_logging_may_change_and_the_difference_is_said(changes, said, train, tmp_path):
    assert train(max_steps=2)[0] == 0
    code, text = train(max_steps=4, **changes)
    assert code == 0 and f"changed on resume: {said}" in text
    assert [event["step"] for event in read_events(tmp_path / "run", "resume")] == [2]


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        pytest.param({"model": {"hidden_size": 64}}, 64, "model.hidden_size: None -> 64", id="R2-model"),
        pytest.param({"model_class": Wide}, 66, "params/w", id="R2-shape"),
        pytest.param({"optimizer": {"name": "lion"}}, 64, "optimizer.name: 'sgd' -> 'lion'", id="R2-optimizer"),
        pytest.param({"precision": "bf16-true"}, 64, "precision: '32-true' -> 'bf16-true'", id="R2-dtype"),
        pytest.param({"data": {"tokenizer": "gpt2"}}, 64, "data.tokenizer: 'bytes' -> ", id="R2-tokenizer"),
        pytest.param({"seed_of_data": 1}, 64, "fingerprint of the training data: ", id="R2-A2-dataset"),
        pytest.param({"seed": 7}, 64, "seed: 42 -> 7", id="R2-seed"),
        pytest.param({"global_batch_size": 4}, 64, "global_batch_size: 8 -> 4", id="R3-batch"),
        pytest.param({"max_length": 512}, 64, "max_length: 1024 -> 512", id="R3-length"),
    ],
)
def test_r2_r3_what_makes_another_run_is_refused_with_the_difference_and_the_way_out(
    changes, code, said, train, tmp_path
):
    assert train(max_steps=2)[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()}
    found, text = train(max_steps=4, **changes)
    assert found == code and said in text
    if code == Exit.CONFIG:
        assert "init_from" in text
    assert before == {p: p.read_bytes() for p in (tmp_path / "run" / "checkpoints").rglob("*") if p.is_file()}


def test_r2_the_way_out_is_a_new_run_from_the_parameters_of_the_old(train, tmp_path):
    assert train(max_steps=2)[0] == 0
    old = losses(tmp_path / "run")
    code, _ = train(folder="new", seed=7, max_steps=2, checkpoint={"init_from": str(tmp_path / "run")})
    assert code == 0 and losses(tmp_path / "new")[1] < old[1]


def test_r4_four_two_and_four_devices_give_the_same_losses(train, tmp_path):
    assert train(folder="whole", devices=4, **EVERY)[0] == 0
    for devices, steps in ((4, 2), (2, 4), (4, 6)):
        code, text = train(devices=devices, max_steps=steps, **EVERY)
        assert code == 0 and (steps == 2 or "changed on resume: devices:" in text)
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "run")
    assert list(parts) == list(whole) == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(list(parts.values()), list(whole.values()), rtol=1e-5)


@slow
def test_r5_more_or_fewer_data_processes_change_no_loss(train, tmp_path):
    assert train(folder="whole", **EVERY)[0] == 0
    assert train(max_steps=3, data={"num_workers": 1, "prefetch": 0}, **EVERY)[0] == 0
    code, text = train(data={"num_workers": 4, "prefetch": 3}, **EVERY)
    assert code == 0 and "changed on resume: data.num_workers: 1 -> 4" in text
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@slow
def test_r5_one_two_and_four_tokenising_processes_give_the_same_documents(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "record {number} of some words"}}\n' for number in range(200)))
    found = []
    for workers in (1, 2, 4):
        monkeypatch.setenv("JTRAIN_CACHE_DIR", str(tmp_path / f"cache{workers}"))
        options = CacheOptions(num_workers=workers, chunk_bytes=1000, parallel_bytes=0)
        found.append(open_store(str(path), load_tokenizer("bytes"), options))
    for store in found[1:]:
        np.testing.assert_array_equal(store.tokens, found[0].tokens)
        np.testing.assert_array_equal(store.edges, found[0].edges)


def test_r6_a_finished_run_exits_0_at_once_and_changes_nothing(train, tmp_path):
    assert train()[0] == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    code, text = train()
    assert code == 0 and "the run is complete: max_steps=6" in text
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
