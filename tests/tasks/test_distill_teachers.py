"""Teachers: tables padded beyond the tokenizer, what is none, tables of numbers that are damaged."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jtrain import DistillTrainer, load_config
from jtrain.errors import ConfigError, DataError
from jtrain.tasks.teacher_table import open_table

from .preferences import settings, word_model

ROWS = [{"prompt": "w3 w4", "completion": "w5 w6"}] * 4
CLIP = Path(__file__).parents[1] / "models" / "fixtures" / "clip"
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2, "path": None}


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """A teacher with 96 tokens and a table of 104."""
    folder = tmp_path_factory.mktemp("models") / "padded"
    word_model(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.concatenate([tensors[name], tensors[name][:8]])
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 104}))
    return folder


def config_of(tmp_path, teacher, **changes):
    quick = {"xla_options": {"xla_backend_optimization_level": 0}, "distill": {"teacher": teacher}}
    return settings(tmp_path, "distill", **(quick | changes))


def test_a_new_student_of_a_padded_teacher_has_a_table_of_its_size(tmp_path, padded):
    trainer = DistillTrainer(config_of(tmp_path, str(padded), model=SMALL), train_dataset=ROWS)
    assert trainer.tokenizer.vocab_size == 96
    assert trainer.decoder.vocab_size == trainer.config.model.vocab_size == 104
    trainer.fit()
    assert np.isfinite(trainer.history.train[0]["kl"])


def test_where_the_tables_alone_differ_the_remedy_is_their_size(tmp_path, padded):
    named = SMALL | {"vocab_size": 97}
    with pytest.raises(DataError, match=r"vocabulary of 104, the policy one of 97\n.*Write model\.vocab_size: 104"):
        DistillTrainer(config_of(tmp_path, str(padded), model=named), train_dataset=ROWS).fit()
    word_model(tmp_path / "model")
    with pytest.raises(DataError, match=r"vocabulary of 104, the policy one of 96\n.*resize_token_embeddings\(104\)"):
        DistillTrainer(config_of(tmp_path, str(padded)), train_dataset=ROWS).fit()


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ("nix", r"distill\.teacher: nix does not exist"),
        (3, r"distill\.teacher: 3 does not exist"),
        ("EMPTY", r"distill\.teacher: .* holds no config\.json"),
        (str(CLIP), r"distill\.teacher: .*a model of images and texts.*\n.*name a language model"),
        (object(), r"distill\.teacher: <object .* is not allowed"),
    ],
)
def test_what_is_no_teacher_is_refused_with_the_fields_name(tmp_path, teacher, message):
    if teacher == "EMPTY":
        teacher = str(tmp_path)
    with pytest.raises(ConfigError, match=message):
        DistillTrainer(config_of(tmp_path, teacher), train_dataset=ROWS)


def test_a_temperature_that_float32_can_not_divide_by_is_refused():
    for value, good in ((0.01, True), (0.0099, False), (1e-30, False)):
        given = {"task": "distill", "distill": {"temperature": value}}
        if good:
            assert load_config(given, env={}).distill.temperature == value
            continue
        with pytest.raises(ConfigError, match=r"distill\.temperature: .* float32"):
            load_config(given, env={})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("first", np.zeros(0, np.int64)),
        ("first", np.int64(3)),
        ("first", np.array([0.0, 2.0, 3.0])),
        ("first", np.array([[0, 2, 3]])),
        ("teacher_logps", np.float32(1)),
        ("teacher_logps", np.zeros((2, 5), np.float32)),
        ("teacher_ids", np.int32(1)),
    ],
    ids=lambda x: x if isinstance(x, str) else f"{x.dtype}{x.shape}",
)
def test_a_damaged_table_is_none(tmp_path, name, value):
    np.save(tmp_path / "first.npy", np.array([0, 2, 3]))
    np.save(tmp_path / "teacher_logps.npy", np.zeros((3, 5), np.float32))
    assert open_table(tmp_path, 2) is not None
    np.save(tmp_path / f"{name}.npy", value)
    assert open_table(tmp_path, 2) is None


@pytest.mark.grid
def test_a_damaged_table_in_the_cache_is_made_again(tmp_path, padded):
    config = config_of(tmp_path, str(padded), model=SMALL)
    config["distill"] |= {"precompute_teacher": True, "top_k": 4}
    losses = []
    for run in ("first", "again"):
        trainer = DistillTrainer(config | {"run_dir": str(tmp_path / run)}, train_dataset=ROWS)
        trainer.fit()
        losses.append(trainer.history.train[0]["loss"])
        (folder,) = (path for path in (tmp_path / "cache/teacher").iterdir() if path.is_dir())
        whole = np.load(folder / "first.npy")
        np.save(folder / "first.npy", np.int64(3))
    assert losses[0] == losses[1] and whole.tolist() == [0, 3, 6, 9, 12]
