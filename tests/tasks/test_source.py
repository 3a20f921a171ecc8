"""A run that begins with a model on disk: its weights, shape and tokenizer, what contradicts it, and what is kept."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest

from jtrain import Callback, PretrainTrainer, load_config, load_model
from jtrain.checkpoint import arrays
from jtrain.checkpoint.parameters import load_parameters
from jtrain.errors import CheckpointError, ConfigError, DataError
from jtrain.tasks.exporting import export
from jtrain.tasks.source import ModelSource, tokenizer_of
from tests.checkpoint.hf.folders import TEMPLATE, write_folder

TEXTS = [{"text": f"in the beginning was word number {n} " * 2} for n in range(24)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    return path, write_folder(path, template=True)


def settings(path, run_dir, **changes):
    fields = {
        "run_dir": str(run_dir),
        "max_steps": 2,
        "global_batch_size": 8,
        "precision": "32-true",
        "compile_cache": "",
        "accelerator": "cpu",
        "devices": 1,
        "model.path": str(path),
        "data.cache_dir": str(run_dir.parent / "cache"),
        "checkpoint.save_steps": 1,
        "checkpoint.best": None,
        "logging.trackers": (),
        "xla_options": {"xla_backend_optimization_level": 0},
    }
    return fields | changes


def trainer(path, run_dir, **changes):
    callbacks = changes.pop("callbacks", ())
    return PretrainTrainer(settings(path, run_dir, **changes), train_dataset=TEXTS, callbacks=callbacks)


def source(path, run_dir, **changes):
    return ModelSource(load_config(settings(path, run_dir, **changes)))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


@pytest.mark.parametrize("mesh", [{"devices": 4, "mesh": "pipeline=2,fsdp=2"}, {"devices": 2, "strategy": "zero1"}])
def test_a_run_begins_with_the_weights_of_the_folder(folder, mesh, tmp_path):
    path, tensors = folder
    made = trainer(path, tmp_path / "run", **mesh)
    planned = made.plan.abstract.params
    loaded = arrays.unflatten(planned, made._source.load(arrays.flatten(planned), {})[0])
    params = jax.device_get(loaded)
    np.testing.assert_array_equal(params["embed_tokens"]["embedding"], tensors["model.embed_tokens.weight"])
    for n in range(2):
        theirs = tensors[f"model.layers.{n}.self_attn.q_proj.weight"]
        np.testing.assert_array_equal(params["layers"]["attention"]["q_proj"]["kernel"][n].reshape(16, 16), theirs.T)
    assert jax.tree.map(lambda leaf: leaf.sharding, loaded) == jax.tree.map(lambda leaf: leaf.sharding, planned)


def test_shape_tokenizer_and_length_come_from_the_folder(folder, tmp_path):
    path, _ = folder
    made = source(path, tmp_path / "run")
    assert made.decoder.vocab_size == 264 and made.tokenizer.vocab_size == 259
    assert made.config.max_length == 64  # max_position_embeddings, below the default of 1024
    assert made.tokenizer.encode_batch(["ab"]) == [[97, 98]]
    assert made.tokenizer.eos_id == 256
    assert source(path, tmp_path / "run", max_length=32).config.max_length == 32
    with pytest.raises(ConfigError, match="max_length=65 is over"):
        source(path, tmp_path / "run", max_length=65)


def test_what_says_how_to_train_may_stand_beside_the_path(folder, tmp_path):
    path, _ = folder
    changes = {"model.remat": "none", "model.dropout": 0.1, "model.attention": "xla", "model.hidden_size": 16}
    made = source(path, tmp_path / "run", **changes, **{"model.max_position_embeddings": 128})
    assert (made.decoder.remat, made.decoder.dropout, made.decoder.attention) == ("none", 0.1, "xla")
    assert made.decoder.max_position_embeddings == made.config.max_length == 128


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("model.hidden_size", 32, "hidden_size is 16"),
        ("model.num_key_value_heads", 4, "num_key_value_heads is 2"),
        ("model.vocab_size", 300, "vocab_size is 264"),
        ("model.rope_theta", 5e5, "rope_theta is 10000.0"),
        ("model.tie_word_embeddings", True, "tie_word_embeddings is False"),
        ("model.preset", "llama-60m", "model.preset: llama-60m"),
    ],
)
def test_a_field_that_contradicts_the_folder_is_refused_with_both(folder, tmp_path, field, value, word):
    path, _ = folder
    with pytest.raises(ConfigError) as caught:
        source(path, tmp_path / "run", **{field: value})
    assert field in str(caught.value) and word in str(caught.value) and str(path) in str(caught.value)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(folder, tmp_path):
    small = tmp_path / "small"
    write_folder(small, vocab_size=200)
    with pytest.raises(DataError) as caught:
        source(small, tmp_path / "run")
    assert "259 tokens" in str(caught.value) and "vocabulary of 200" in str(caught.value)
    with pytest.raises(DataError, match="bytes has 259 tokens"):
        source(small, tmp_path / "run", **{"data.tokenizer": "bytes"})


def test_a_folder_without_tokenizer_wants_one(tmp_path):
    write_folder(tmp_path / "bare", tokenizer=False)
    with pytest.raises(DataError, match="holds no tokenizer"):
        source(tmp_path / "bare", tmp_path / "run")
    assert source(tmp_path / "bare", tmp_path / "run", **{"data.tokenizer": "bytes"}).tokenizer.spec == "bytes"


def test_the_argument_of_a_trainer_is_a_preset_or_a_path(folder, tmp_path):
    path, _ = folder
    config = settings(path, tmp_path / "run") | {"model.path": None, "model.preset": "llama-60m"}
    made = PretrainTrainer(config, model=path, train_dataset=TEXTS)
    assert made.decoder.vocab_size == 264 and made.config.model.path == str(path)
    with pytest.raises(ConfigError, match="no preset"):
        PretrainTrainer(config, model="lama-tiny", train_dataset=TEXTS)
    with pytest.raises(ConfigError, match="does not exist"):
        PretrainTrainer(config, model="./nowhere", train_dataset=TEXTS)


def test_paths_of_models_are_relative_to_the_file_and_names_of_the_hub_are_kept(folder, tmp_path):
    path, _ = folder
    file = path.parent / "run.yaml"
    for written, read in (("tiny", str(path)), ("./tiny", str(path)), ("org/name@main", "org/name@main")):
        file.write_text(f"model: {{path: {written}}}\n")
        assert load_config(str(file)).model.path == read
    (path.parent / "org" / "name").mkdir(parents=True)
    file.write_text("model: {path: org/name}\n")
    assert load_config(str(file)).model.path == str(path.parent / "org" / "name")  # a folder of that name comes first
    assert tokenizer_of(load_config({"model": {"path": str(path)}})).vocab_size == 259


def test_the_template_that_a_run_was_trained_with_is_kept(folder, tmp_path):
    path, _ = folder
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!")
    made = source(path, tmp_path / "run", task="sft", **{"data.chat_template": str(tmp_path / "mine.jinja")})
    made.keep(str(tmp_path / "run"))
    assert (tmp_path / "run" / "model" / "chat_template.jinja").read_text() == "{{ messages[0].content }}!"
    assert (tmp_path / "run" / "model" / "tokenizer.json").read_bytes() == (path / "tokenizer.json").read_bytes()


def test_a_folder_is_no_run_to_take_weights_from(folder, tmp_path):
    path, _ = folder
    with pytest.raises(CheckpointError, match=r"write model\.path"):
        load_parameters(path, {})


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, step, metrics):
        if step == self.step:
            trainer.request_stop("the test says so")


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """Two updates of three, from a copy of the folder that is gone."""
    base = tmp_path_factory.mktemp("finished")
    shutil.copytree(folder[0], base / "tiny")
    made = trainer(base / "tiny", base / "run", max_steps=3, devices=2, strategy="fsdp", callbacks=[StopAt(2)])
    made.fit()
    shutil.rmtree(base / "tiny")
    return base, made


def test_a_run_goes_on_when_the_folder_is_gone(finished):
    base, made = finished
    shutil.copytree(base / "run", base / "again")
    again = trainer(base / "tiny", base / "again", max_steps=3, devices=2, strategy="fsdp")
    assert again.tokenizer.fingerprint == made.tokenizer.fingerprint and again.decoder == made.decoder
    again.fit()
    assert again.counters.step == 3
    with pytest.raises(ConfigError, match="does not exist"):  # a new run needs it
        trainer(base / "tiny", base / "new")


def test_a_run_is_loaded_exported_and_begun_with_when_the_folder_is_gone(finished, tmp_path):
    base, made = finished
    loaded = load_model(base / "run")
    equal(loaded.params, made.state.params)
    assert loaded.tokenizer.fingerprint == made.tokenizer.fingerprint
    done = export(loaded, tmp_path / "out")
    assert done.difference == 0.0
    out = tmp_path / "out"
    config = json.loads((out / "config.json").read_text())
    assert config["custom_key_of_somebody"] == 7 and config["rope_parameters"]["rope_theta"] == config["rope_theta"]
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.6
    again = load_model(out, mesh="fsdp=2,tensor=2")
    equal(again.params, made.state.params)

    begun = trainer(base / "run", tmp_path / "next")
    equal(begun.state.params, made.state.params)
    earlier = load_model(base / "run", step=1)
    assert not np.array_equal(earlier.params["final_norm"]["scale"], loaded.params["final_norm"]["scale"])
    with pytest.raises(CheckpointError, match=r"step 7\n  there are: 1, 2"):
        load_model(base / "run", step=7)
