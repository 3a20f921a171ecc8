import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jtrain import PretrainTrainer
from jtrain.errors import ConfigError, DataError, Exit
from jtrain.models.config import DecoderConfig
from jtrain.models.decoder import Decoder
from jtrain.tasks.language_loss import next_token, token_logprobs
from jtrain.tasks.pretrain import pretrain_loss

BPE = Path(__file__).parents[2] / "configs" / "assets" / "jargon-bpe-1024.json"
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "seven", "wizards", "brew", "potions")


def texts(count, seed):
    """At most four words of at most seven letters: with its end, a text has at most 32 bytes."""
    generator = np.random.default_rng(seed)
    return [{"text": " ".join(generator.choice(WORDS, size=int(generator.integers(1, 5))))} for _ in range(count)]


class Dataset:
    """As a `datasets.Dataset`: no list, but a length and records by number."""

    def __init__(self, records):
        self._records = records

    def __len__(self):
        return len(self._records)

    def __getitem__(self, index):
        return dict(self._records[index], id=index)


def make(run_dir, **changes):
    config = {
        "run_dir": str(run_dir),
        "max_steps": 3,
        "max_length": 32,
        "global_batch_size": 4,
        "precision": "32-true",
        "compile_cache": "",
        "accelerator": "cpu",
        "devices": 1,
        "data": {"cache_dir": str(run_dir / "cache")},
        "model": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "remat": "none"},
        "checkpoint": {"save_steps": 0},
        "logging": {"trackers": []},
    }  # fmt: skip
    arguments = {n: changes.pop(n) for n in ("train_dataset", "eval_dataset", "optimizer", "model") if n in changes}
    for name, value in changes.items():
        config[name] = config[name] | value if isinstance(value, dict) and isinstance(config.get(name), dict) else value
    return PretrainTrainer(config, **arguments)


TRAIN, HELD_OUT = texts(30, seed=0), texts(9, seed=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three steps on texts in memory."""
    trainer = make(tmp_path_factory.mktemp("trained"), train_dataset=TRAIN, eval_dataset=Dataset(HELD_OUT))
    trainer.fit()
    return trainer


# Texts in memory


def test_texts_in_memory_and_in_a_file_give_the_same_rows(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in TRAIN))
    made = [make(tmp_path, train_dataset=data) for data in (str(file), TRAIN, Dataset(TRAIN))]
    rows = [trainer.train_rows.rows(np.arange(40)) for trainer in made]
    for name, expected in rows[0].items():
        for other in rows[1:]:
            np.testing.assert_array_equal(other[name], expected)
    assert made[0].timetable == made[1].timetable


def test_a_fraction_of_texts_in_memory_is_held_out(tmp_path):
    trainer = make(tmp_path, train_dataset=TRAIN, data={"eval": 0.2})
    found = [rows.rows(np.arange(len(rows)))["segment_ids"] for rows in (trainer.train_rows, trainer.eval_rows)]
    tokens = [(segments > 0).sum() for segments in found]
    whole = sum(len(record["text"].encode()) + 1 for record in TRAIN)
    assert sum(tokens) == whole and tokens[1] / whole == pytest.approx(0.2, abs=0.05)


def test_evaluation_data_may_be_a_file_beside_texts_or_rows_of_tokens(tmp_path):
    file = tmp_path / "held_out.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in HELD_OUT))
    first = make(tmp_path, train_dataset=TRAIN, eval_dataset=str(file))
    tokens = {name: values for name, values in first.train_rows.rows(np.arange(8)).items() if name != "bytes"}
    second = make(tmp_path, train_dataset=tokens, data={"eval": [str(file)]})
    assert first.eval_rows.fingerprint == second.eval_rows.fingerprint == make(
        tmp_path, train_dataset=TRAIN, eval_dataset=HELD_OUT, data={"eval": 0.5}
    ).rows_of(str(file)).fingerprint  # fmt: skip
    with pytest.raises(ConfigError, match="only texts can be divided"):
        make(tmp_path, train_dataset=tokens, data={"eval": 0.5})


def test_an_evaluation_set_in_memory_leaves_the_training_data_whole(tmp_path):
    kept, whole = (
        make(tmp_path, train_dataset=TRAIN, eval_dataset=HELD_OUT, data={"eval": fraction}) for fraction in (0.5, None)
    )
    assert kept.train_rows.fingerprint == whole.train_rows.fingerprint


@pytest.mark.parametrize(
    ("records", "message"),
    (
        ([{"text": "a b c"}, {"content": "d"}], r"train_dataset\[1\] has no field 'text'"),
        ([{"text": 7}], r"train_dataset\[0\] has 7 as 'text'"),
        ([{"text": ""}, {"text": ""}], "train_dataset holds no text"),
        ([], "no examples"),
    ),
)
def test_records_without_text_are_named(records, message, tmp_path):
    with pytest.raises(DataError, match=message) as caught:
        make(tmp_path, train_dataset=records)
    assert caught.value.exit_code == Exit.DATA == 65
    if "field" in message:
        assert "content" in caught.value.remedy


def test_records_without_text_may_be_left_out(tmp_path):
    records = [TRAIN[0], {"text": None}, *TRAIN[1:]]
    data = {"on_bad_record": "skip"}
    assert (
        make(tmp_path, train_dataset=records, data=data).train_rows.fingerprint
        == make(tmp_path, train_dataset=TRAIN, data=data).train_rows.fingerprint
    )
    with pytest.raises(DataError, match=r"train_dataset\[1\]"):
        make(tmp_path, train_dataset=records, data={"on_bad_record": "skip", "max_bad_records": 0})


def test_another_field_may_hold_the_text(tmp_path):
    records = [{"content": record["text"]} for record in TRAIN]
    trainer = make(tmp_path, train_dataset=records, data={"text_field": "content"})
    assert trainer.train_rows.fingerprint == make(tmp_path, train_dataset=TRAIN).train_rows.fingerprint


# What does not fit


@pytest.mark.parametrize(
    ("changes", "error", "message", "remedy"),
    (
        ({"model": {"preset": "lama-tiny"}}, ConfigError, "lama-tiny", "llama-tiny"),
        ({"model": {"max_position_embeddings": 16}}, ConfigError, "max_length=32 is over", "max_length: 16"),
        ({"max_length": 1}, ConfigError, "max_length=1 leaves no token to predict", "max_length: 2"),
        ({"sharding": {"rules": {"head": ()}}}, ConfigError, "rules.head: a decoder has no such", "mean heads"),
        ({"mesh": {"tensor": 8}, "devices": 8}, ConfigError, "num_attention_heads=4.*mesh.tensor=8", "mesh.tensor: 4"),
        (
            {"mesh": {"tensor": 8}, "devices": 8, "model": {"num_attention_heads": 8, "intermediate_size": 36}},
            ConfigError,
            "intermediate_size=36.*mesh.tensor=8",
            "model.intermediate_size: 40",
        ),
        ({"model": {"vocab_size": 100}}, DataError, "has 259 tokens, model.vocab_size is 100", "vocab_size: 259"),
    ),
)
def test_a_shape_that_does_not_fit_is_refused_with_what_to_change(changes, error, message, remedy, tmp_path):
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
             "num_key_value_heads": 2}  # fmt: skip
    model = shape | changes.pop("model", {})
    with pytest.raises(error, match=message) as caught:
        make(tmp_path, train_dataset=TRAIN, model=model, **changes)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"position_ids": None}, "no 'position_ids', only input_ids"),
        ({"labels": np.zeros((8, 16), np.int32)}, r"'labels' of a row has the shape \(16,\), and max_length is 32"),
        ({"input_ids": np.full((8, 32), 259)}, "'input_ids' holds the token 259, and the model has 259"),
    ),
)
def test_rows_of_tokens_that_do_not_fit_are_refused(change, message, tmp_path):
    names = ("input_ids", "labels", "segment_ids", "position_ids")
    rows = dict.fromkeys(names, np.ones((8, 32), np.int32)) | change
    with pytest.raises(DataError, match=message):
        make(tmp_path, train_dataset={name: values for name, values in rows.items() if values is not None})


def test_a_module_of_ones_own_belongs_to_the_other_door(tmp_path):
    with pytest.raises(ConfigError, match="model: a function") as caught:
        make(tmp_path, train_dataset=TRAIN, model=lambda rngs: None)
    assert "Trainer" in caught.value.remedy


def test_no_data_at_all_points_to_the_demo(tmp_path):
    with pytest.raises(ConfigError, match="there is nothing to train on") as caught:
        make(tmp_path)
    assert "jtrain train demo" in caught.value.remedy


def test_a_larger_vocabulary_than_the_tokenizers_is_fine(tmp_path):
    assert make(tmp_path, train_dataset=TRAIN, model={"vocab_size": 300, "hidden_size": 16}).decoder.vocab_size == 300


def test_the_model_may_be_a_presets_name_and_the_optimizer_a_chain(tmp_path):
    trainer = make(tmp_path, train_dataset=TRAIN, model="llama-60m", optimizer=optax.sgd(0.1))
    assert trainer.config.model.preset == "llama-60m" and isinstance(trainer.decoder, DecoderConfig)
    assert trainer.program.schedule is None


# Figures


def test_loss_and_log_probabilities_are_of_logits_with_their_soft_cap():
    shape = DecoderConfig(32, 8, 8, 1, 2, initializer_range=1.0, final_logit_softcapping=0.5, logits_scaling=2.0)
    ids = jnp.arange(12).reshape(1, 12)
    batch = {"input_ids": ids, "labels": ids, "position_ids": ids, "segment_ids": jnp.ones_like(ids), "row": ids[:, 0]}

    def figures():
        with nnx.use_eager_sharding(False):
            model = Decoder(shape, nnx.Rngs(0))
        return model(ids), pretrain_loss()(model, batch, None), token_logprobs(model, batch)["logprobs"]

    logits, loss, logprobs = jax.jit(figures, compiler_options={"xla_backend_optimization_level": 0})()
    logits = np.asarray(logits, np.float64)[0, :-1]
    assert 0.4 < np.abs(logits).max() <= 0.5
    expected = np.log(np.exp(logits).sum(-1)) - logits[np.arange(11), np.arange(1, 12)]
    np.testing.assert_allclose(loss.sum / loss.count, expected.mean(), rtol=1e-5)
    np.testing.assert_allclose(logprobs[0, 1:], -expected, rtol=1e-5)


def test_perplexity_and_bits_per_byte_are_those_of_the_labels_log_probabilities(trained):
    rows = trained.eval_rows.rows(np.arange(len(trained.eval_rows)))
    assert rows["segment_ids"].max() > 1  # several documents share a row
    logprobs = np.float64(trained.predict(HELD_OUT)["logprobs"])
    live = rows["labels"] != -100
    assert not logprobs[~live].any()
    total = -logprobs[live].sum()
    # Every byte of a document but its first is a target, and so is its end.
    sizes = [len(record["text"].encode()) for record in HELD_OUT]
    assert live.sum() == sum(sizes)
    last = trained.history.eval[-1]
    assert last["eval_loss"] == pytest.approx(total / sum(sizes), rel=1e-5)
    assert last["perplexity"] == pytest.approx(math.exp(total / sum(sizes)), rel=1e-4)
    assert last["bits_per_byte"] == pytest.approx(total / math.log(2) / sum(size - 1 for size in sizes), rel=1e-5)
    assert 0 <= last["eval_mean_token_accuracy"] <= 1
    assert trained.evaluate(HELD_OUT) == {name: value for name, value in last.items() if name != "step"}


def test_tokens_are_counted_without_padding(trained):
    rows = trained.train_rows.rows(np.arange(3 * 4))
    assert trained.history.train[-1]["tokens"] == (rows["segment_ids"] > 0).sum()


def test_a_sample_is_text_and_the_same_for_the_same_seed(trained):
    sample = trained.sample("the quick", max_new_tokens=6, seed=1)
    assert isinstance(sample, str) and sample == trained.sample("the quick", max_new_tokens=6, seed=1)
    assert len(trained.sample("the quick", max_new_tokens=40, temperature=0.0)) <= 40
    together = trained.generate(["the quick", "a"], max_new_tokens=6, temperature=0.7, seed=1)
    assert together[0].text == sample and len(together[1].logprobs) == len(together[1].ids)


@pytest.mark.parametrize("use_ema", (True, False))
def test_a_sample_is_drawn_from_the_parameters_that_are_evaluated(use_ema, tmp_path):
    trainer = make(tmp_path, train_dataset=TRAIN, optimizer={"ema_decay": 0.9}, eval={"use_ema": use_ema})
    nothing = jax.tree.map(jnp.zeros_like, trainer.state.ema)  # all logits are 0: the likeliest token is the first
    trainer.state = dataclasses.replace(trainer.state, ema=nothing)
    assert (trainer.sample("the", max_new_tokens=3, temperature=0.0) == "\0\0\0") == use_ema


def test_prompts_are_continued_when_the_run_ends(tmp_path, capsys):
    def samples(**section):
        make(tmp_path / str(section.get("sample_tokens")), train_dataset=TRAIN, max_steps=1, eval=section).fit()
        printed = capsys.readouterr().out
        return re.findall(r"^--- sample\nthe quick((?:.|\n)*?)\n---$", printed, re.MULTILINE)

    prompts = ["the quick"] * 2
    likeliest = samples(sample_prompts=prompts, sample_tokens=4, sample_temperature=0.0)
    drawn = samples(sample_prompts=prompts, sample_tokens=9, sample_temperature=2.0)
    assert likeliest[0] == likeliest[1] and drawn[0] != drawn[1]  # every prompt has a seed of its own
    assert [max(map(len, texts)) <= limit for texts, limit in ((likeliest, 4), (drawn, 9))] == [True, True]
    assert max(map(len, drawn)) > 4 and samples() == []


class Fixed:
    """A model whose activations do not depend on its input."""

    def __init__(self, hidden, head):
        self._hidden, self._head = hidden, head

    def hidden(self, input_ids, **_):
        return self._hidden

    def head(self):
        return self._head


def test_smoothing_and_z_loss_are_of_training_alone():
    # pitfalls.md: eps 0.1, logits [[2,0,0],[0,1,0],[0,0,3]], targets [0,1,ignored]: 0.495495
    logits = jnp.asarray([[[2.0, 0, 0], [0, 1, 0], [0, 0, 3]]])
    labels = jnp.asarray([[-100, 0, 1]])
    batch = {"input_ids": labels, "labels": labels, "position_ids": labels, "segment_ids": labels, "row": jnp.zeros(1)}
    model = Fixed(logits, jnp.eye(3))
    plain = [math.log(math.exp(2) + 2) - 2, math.log(math.e + 2) - 1]
    smooth = pretrain_loss(label_smoothing=0.1)
    training, evaluation = smooth(model, batch, jax.random.key(0)), smooth(model, batch, None)
    assert float(training.sum / training.count) == pytest.approx(0.495495, abs=1e-6)
    assert float(evaluation.sum / evaluation.count) == pytest.approx(sum(plain) / 2, rel=1e-6)
    z = [math.log(math.exp(2) + 2) ** 2, math.log(math.e + 2) ** 2]
    heavy = pretrain_loss(z_loss=0.5)
    assert float(heavy(model, batch, jax.random.key(0)).sum) == pytest.approx(sum(plain) + 0.5 * sum(z), rel=1e-6)
    assert float(heavy(model, batch, None).sum) == pytest.approx(sum(plain), rel=1e-6)
    assert [float(value) for value in training.metrics["mean_token_accuracy"]] == [2.0, 2.0]


def test_labels_are_moved_by_one_place_once():
    labels = jnp.asarray([[-100, 5, 6, -100, 7]])
    assert next_token(labels).tolist() == [[5, 6, -100, 7, -100]]


def test_the_end_of_a_document_is_trained_also_where_it_is_the_padding_token(tmp_path):
    trainer = make(tmp_path, train_dataset=TRAIN, data={"tokenizer": str(BPE), "packing": "none"})
    tokenizer = trainer.tokenizer
    assert tokenizer.pad_id == tokenizer.eos_id
    rows = trainer.train_rows.rows(np.arange(len(trainer.train_rows)))
    sizes = (rows["segment_ids"] > 0).sum(1)
    assert sizes.min() < 31  # there is padding
    for ids, labels, size in zip(rows["input_ids"], rows["labels"], sizes, strict=True):
        assert ids[size - 1] == labels[size - 1] == tokenizer.eos_id
        assert (ids[size:] == tokenizer.eos_id).all() and (labels[size:] == -100).all()
        assert (labels[1:size] == ids[1:size]).all()
