"""Evaluations of a run that score its model's answers to held-out prompts."""

import json
from pathlib import Path

import numpy as np
import pytest

from jtrain import SFTTrainer, load_config
from jtrain.data.build import build_data
from jtrain.data.questions import read_questions
from jtrain.data.tokenizers import load_tokenizer
from jtrain.errors import ConfigError, DataError
from jtrain.observe.metrics import read_events, read_metrics
from jtrain.tasks.text_scores import score_texts
from tests.parity.grid import FAST_TO_COMPILE
from tests.parity.launch import start_several, wait_all
from tests.parity.runs import Ledger, bits
from tests.peers.make_eval_goldens import write_folder

DATA = json.loads((Path(__file__).parent / "fixtures" / "sft" / "goldens.json").read_text())["data"]
HELD_OUT = DATA["prompt_completion"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_folder(folder)
    return folder


def settings(run_dir, **changes):
    return {
        "run_dir": str(run_dir),
        "max_length": 24,
        "max_steps": 2,
        "global_batch_size": 4,
        "precision": "32-true",
        "compile_cache": "",
        "accelerator": "cpu",
        "devices": 1,
        "xla_options": FAST_TO_COMPILE,
        "learning_rate": 1e-2,
        "data.cache_dir": str(run_dir.parent / "cache"),
        "logging.trackers": [],
        "logging.log_every_n_steps": 1,
        "checkpoint.save_steps": 1,
        "eval.eval_steps": 1,
        "eval.max_new_tokens": 4,
    } | changes


def trainer_of(folder, run_dir, *, held_out=HELD_OUT, callbacks=(), compute=None, **changes):
    return SFTTrainer(
        settings(run_dir, **changes),
        model=str(folder),
        train_dataset=DATA["messages"],
        eval_dataset=held_out,
        callbacks=callbacks,
        compute_text_metrics=compute,
    )


ASKED = {"eval.metrics": ["exact_match", "chrf"], "eval.metric_examples": 3, "eval.num_samples": 2}


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """A run of two steps whose evaluations answer three prompts and show two."""
    trainer = trainer_of(
        folder,
        tmp_path_factory.mktemp("scored") / "run",
        compute=lambda predictions, references, prompt, **_: {"prompts": len(prompt)},
        **ASKED,
    )
    trainer.fit()
    return trainer


def test_metrics_of_answers_stand_beside_the_loss(run):
    lines = read_metrics(run.config.run_dir, "eval")
    assert [line["step"] for line in lines] == [1, 2]
    assert all({"eval_loss", "perplexity", "eval_exact_match", "eval_chrf"} <= set(line) for line in lines)
    assert [line["prompts"] for line in lines] == [3, 3]


def test_they_are_those_of_the_models_own_answers(run):
    answers = run.generate([record["prompt"] for record in HELD_OUT[:3]], max_new_tokens=4)
    expected = score_texts(["chrf"], [row.text for row in answers], [row["completion"] for row in HELD_OUT[:3]])
    assert read_metrics(run.config.run_dir, "eval")[-1]["eval_chrf"] == pytest.approx(expected.values["chrf"])
    samples = [event for event in read_events(run.config.run_dir, "sample") if event["step"] == 2]
    assert [(event["number"], event["prompt"]) for event in samples] == [(n, HELD_OUT[n]["prompt"]) for n in (0, 1)]
    assert [event["completion"] for event in samples] == [row.text for row in answers[:2]]
    assert [event["reference"] for event in samples] == [row["completion"] for row in HELD_OUT[:2]]


@pytest.mark.grid
def test_answers_change_nothing_of_the_training(run, folder, tmp_path):
    plain = trainer_of(folder, tmp_path / "plain", held_out=None)
    plain.fit()
    assert bits(plain.state) == bits(run.state)


@pytest.mark.grid
def test_a_resume_goes_on_bit_by_bit(run, folder, tmp_path):
    trainer_of(folder, tmp_path / "parts", callbacks=[Ledger(1)], **ASKED).fit()
    parts = trainer_of(folder, tmp_path / "parts", **ASKED)
    parts.fit()
    assert bits(parts.state) == bits(run.state)
    assert parts.history.eval[-1]["eval_chrf"] == run.history.eval[-1]["eval_chrf"]


@pytest.mark.grid
@pytest.mark.parametrize("mesh", ("fsdp=2,tensor=2,pipeline=2", "data=2,context=2"))
def test_a_mesh_gives_the_same_answers(mesh, run, folder, tmp_path):
    sizes = [int(part.partition("=")[2]) for part in mesh.split(",")]
    meshed = trainer_of(folder, tmp_path / "run", mesh=mesh, devices=int(np.prod(sizes)), **ASKED)
    meshed.fit()
    for found, expected in zip(meshed.history.eval, run.history.eval, strict=True):
        assert found["eval_chrf"] == pytest.approx(expected["eval_chrf"])
        assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=2e-5)


@pytest.mark.grid
def test_two_processes_give_the_same_answers(run, folder, tmp_path):
    files = {"train": DATA["messages"], "eval": HELD_OUT}
    for name, records in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = settings(tmp_path / "run", task="sft", devices=2, **ASKED) | {"model.path": str(folder)}
    config |= {f"data.{name}": [str(tmp_path / f"{name}.jsonl")] for name in files}
    running = start_several(config, "process", [("none", 0)] * 2)
    assert wait_all(running) == [0, 0], "".join(one.err for one in running)
    for found, expected in zip(read_metrics(config["run_dir"], "eval"), run.history.eval, strict=True):
        assert found["eval_chrf"] == pytest.approx(expected["eval_chrf"])


def test_other_data_is_answered_as_well(run):
    found = run.evaluate([{"prompt": "w1", "completion": " w2"}] * 3)
    assert found["prompts"] == 3 and 0 <= found["eval_chrf"] <= 100


def test_a_part_that_is_held_out_has_its_own_prompts(folder, tmp_path):
    """Records that are empty make no document: the part is found by counting what the others make."""
    tokenizer = load_tokenizer(str(folder))
    for records in (HELD_OUT, [{"prompt": "", "completion": ""}, *HELD_OUT]):
        settings = {"task": "sft", "data.eval": 0.4, "max_length": 24, "data.on_bad_record": "skip"}
        config = load_config(settings, (), {})
        _, rows = build_data(config, tokenizer, train=records)
        options = {"field": "data.eval", "name": "train", "rows": rows.sources[0]}
        found = [question.record for question in read_questions(config, tokenizer, records, **options)]
        assert 0 < len(found) < len(HELD_OUT) and found == records[-len(found) :]
        assert len(found) == len(rows.sources[0].edges) - 1


@pytest.mark.parametrize(
    ("held_out", "changes", "error", "message"),
    (
        (None, {"eval.metrics": "bleu"}, ConfigError, "eval.metrics: bleu without evaluation data"),
        (None, {"eval.num_samples": 1}, ConfigError, "eval.num_samples: 1 without evaluation data"),
        ([{"text": "w1 w2"}], {"eval.metrics": "rouge"}, DataError, "its records hold texts"),
        (HELD_OUT, {"eval.metrics": "bleu", "eval.max_new_tokens": 127}, ConfigError, "write max_new_tokens: "),
        (HELD_OUT, {"eval.metrics": "blue"}, ConfigError, "eval.metrics"),
        (HELD_OUT, {"eval.metrics": "bleu", "task": "pretrain"}, ConfigError, "this is the trainer of sft"),
    ),
)
def test_answers_that_can_not_be_scored_are_refused_before_the_run(held_out, changes, error, message, folder, tmp_path):
    with pytest.raises(error) as caught:
        trainer_of(folder, tmp_path / "run", held_out=held_out, **changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("task", "field"), [("pretrain", "eval.metrics"), ("reward", "eval.metrics"), ("reward", "eval.sample_prompts")]
)
def test_a_task_that_answers_no_prompts_refuses_their_fields(task, field):
    with pytest.raises(ConfigError, match=rf"{field}: .* with task: {task}, which does not read it"):
        load_config({"task": task, field: ["bleu"]}, (), {})
