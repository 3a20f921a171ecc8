"""The reward trainer: TRL's numbers, meshes, resume, adapters, and a folder that transformers has as a classifier."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jtrain
from jtrain import evaluate, generate, load_model
from jtrain.errors import ConfigError, DataError
from jtrain.tasks import trainer_of
from jtrain.train.optimizers import parameter_paths
from tests.parity.runs import bits

from .preferences import RUNS, first_line, settings, trained, word_model

PAIRS = RUNS["pairs"]
grid = pytest.mark.grid


def classifier(folder):
    """The fixture with the score of make_trl_goldens.py in place of its head."""
    word_model(folder)
    config = json.loads((folder / "config.json").read_text())
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (folder / "config.json").write_text(
        json.dumps(config | labels | {"architectures": ["LlamaForSequenceClassification"]})
    )
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["score.weight"] = (np.sin(np.arange(32, dtype=np.float64))[None].astype(np.float32)) / np.float32(4)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    classifier(folder / "classifier")
    word_model(folder / "language")
    return folder


@pytest.fixture
def place(models, tmp_path):
    (tmp_path / "model").symlink_to(models / "classifier")
    (tmp_path / "language").symlink_to(models / "language")
    return tmp_path


@pytest.mark.parametrize(
    "golden",
    [
        pytest.param(golden, marks=grid if n == 0 else (), id=str(golden["options"]))
        for n, golden in enumerate(RUNS["reward"])
    ],
)
def test_the_first_step_has_trls_loss_metrics_and_norm_of_gradient(place, golden):
    options = dict(golden["options"])
    rows = PAIRS
    if options.pop("margins", False):
        rows = [row | {"margin": margin} for row, margin in zip(PAIRS, RUNS["margins"], strict=True)]
    line = first_line(settings(place, "reward", reward=options), rows)
    assert line["loss"] == pytest.approx(golden["loss"], rel=1e-5)
    assert line["grad_norm"] == pytest.approx(golden["grad_norm"], rel=1e-4)
    for name in ("accuracy", "margin", "mean_reward", "min_reward", "max_reward"):
        assert line[name] == pytest.approx(golden["metrics"][name], rel=1e-5, abs=1e-5), name
    assert line["tokens"] == golden["metrics"]["num_tokens"]


@grid
def test_accumulation_and_meshes_change_nothing(place):
    figures = []
    layouts = ({}, {"gradient_accumulation_steps": 2}, {"devices": 8, "mesh": "fsdp=2,tensor=2,pipeline=2"})
    for layout in layouts:
        shutil.rmtree(place / "run", ignore_errors=True)
        line = first_line(settings(place, "reward", max_steps=2, **layout), PAIRS)
        figures.append([line[name] for name in ("loss", "grad_norm", "accuracy", "margin", "mean_reward")])
    for other in figures[1:]:
        np.testing.assert_allclose(other, figures[0], rtol=2e-5)


@grid
def test_a_language_model_becomes_a_reward_model_whose_export_has_its_rewards(place):
    config = settings(place, "reward", max_steps=2, model={"path": str(place / "language")})
    trainer = trained(config, PAIRS)
    rewards = trainer.predict(PAIRS)
    jtrain.export(jtrain.load_model(place / "run"), place / "out")
    written = json.loads((place / "out/config.json").read_text())
    assert written["architectures"] == ["LlamaForSequenceClassification"] and written["id2label"] == {"0": "LABEL_0"}
    assert written["pad_token_id"] == 0
    tensors = load_file(place / "out/model.safetensors")
    assert tensors["score.weight"].shape == (1, 32) and "lm_head.weight" not in tensors
    again = jtrain.RewardTrainer(
        settings(place, "reward", run_dir=str(place / "b"), model={"path": str(place / "out")}), train_dataset=PAIRS
    )
    np.testing.assert_allclose(again.predict(PAIRS)["chosen_rewards"], rewards["chosen_rewards"], rtol=1e-5)


@grid
def test_the_score_is_trained_beside_adapters_and_a_resumed_run_ends_with_the_same_bits(place):
    config = settings(
        place,
        "reward",
        max_steps=3,
        model={"path": str(place / "language"), "lora": {"rank": 2}},
        checkpoint={"save_steps": 1},
    )
    whole = trained(config, PAIRS)
    assert "score/kernel" in _trained_paths(whole)
    shutil.rmtree(place / "run/checkpoints/3")
    resumed = trained(config, PAIRS)
    assert resumed.history.train[0]["loss"] == whole.history.train[2]["loss"]
    assert bits(resumed.state) == bits(whole.state)


def _trained_paths(trainer):
    kept = jax.tree.leaves(trainer.plan.trainable)
    return [path for path, on in zip(parameter_paths(trainer.plan.abstract.params), kept, strict=True) if on]


def test_pairs_that_are_too_long_are_left_out_and_columns_that_do_not_fit_are_named(place):
    with pytest.raises(DataError, match="every one of the 4 pairs is longer than max_length: 2"):
        first_line(settings(place, "reward", max_length=2, data={"buckets": [2]}), PAIRS)
    with pytest.raises(DataError, match="its records have the fields text"):
        first_line(settings(place, "reward"), [{"text": "a"}])


def test_a_classifier_of_several_labels_is_refused(place):
    classifier(place / "many")
    config = json.loads((place / "many/config.json").read_text())
    config["id2label"] = {"0": "A", "1": "B"}
    (place / "many/config.json").write_text(json.dumps(config))
    tensors = load_file(place / "many/model.safetensors")
    tensors["score.weight"] = np.repeat(tensors["score.weight"], 2, 0)
    save_file(tensors, place / "many/model.safetensors")
    with pytest.raises(ConfigError, match="a classifier with 2 labels"):
        first_line(settings(place, "reward", model={"path": str(place / "many")}), PAIRS)


def test_a_reward_model_is_refused_where_a_language_model_is_needed(place):
    language, reward = str(place / "language"), str(place / "model")
    remedy = r"num_labels: 1\)[^\n]*\n *Name a language model"
    for task in ("sft", "dpo"):
        with pytest.raises(ConfigError, match=rf"model\.path: {reward} is a .*{remedy}"):
            trainer_of(task)(settings(place, task), train_dataset=PAIRS)
    config = settings(place, "dpo", model={"path": language}, dpo={"ref_model": reward})
    with pytest.raises(ConfigError, match=rf"dpo\.ref_model: {reward} is a .*{remedy}"):
        trained(config, PAIRS)
    model = load_model(reward)
    for function, *arguments in ((evaluate, [{"text": "a b"}]), (generate, "a b")):
        with pytest.raises(ConfigError, match=rf"MODEL is a .*{remedy}"):
            function(model, *arguments)
