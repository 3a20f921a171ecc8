"""Contrastive training: transformers' numbers, the whole batch in every layout, evaluation, resume, folders."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

import jtrain
from jtrain import ContrastiveTrainer, load_config, load_dual_encoder
from jtrain.cli.main import main
from jtrain.data.captions import text_keys
from jtrain.errors import ConfigError, DataError
from jtrain.models.dual_encoder import DualEncoder
from jtrain.models.dual_presets import dual_preset
from jtrain.tasks.contrastive_loss import contrastive_loss_fn
from jtrain.tasks.dual_encoder import encoder_of
from jtrain.tasks.retrieval import recalls, zero_shot
from tests.parity.runs import bits
from tests.peers.make_vision_goldens import TEXTS, pictures

FIXTURES = Path(__file__).parents[1] / "models" / "fixtures"
FOUR = [{"image": Image.fromarray(i), "text": t} for i, t in zip(pictures(), TEXTS, strict=True)]
DIGITS = Path(__file__).parents[2] / "configs" / "assets" / "digits8x8.npz"
grid = pytest.mark.grid
LAYOUTS = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "fsdp, tensor": {"devices": 4, "mesh": "fsdp=2,tensor=2"},
    "data": {"devices": 4, "mesh": "data=4"},
    "pipeline": {"devices": 8, "mesh": "fsdp=2,tensor=2,pipeline=2"},
    "data, accumulation": {"devices": 2, "mesh": "data=2", "gradient_accumulation_steps": 2},
}


def pairs(count):
    """Noise with texts of which some are equal."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, 12, 12, 3), np.uint8)
    return [{"image": image, "text": TEXTS[n % 3] if n % 5 else f"red {n}"} for n, image in enumerate(images)]


def settings(run_dir, kind="clip", **changes):
    config = {
        "run_dir": str(run_dir / "run"),
        "model": {"path": str(FIXTURES / kind), "remat": "none"},
        "max_steps": 20,
        "global_batch_size": 8,
        "precision": "32-true",
        "accelerator": "cpu",
        "devices": 1,
        "compile_cache": str(run_dir / "xla"),
        "xla_options": {"xla_backend_optimization_level": 0},  # compiles in half the time
        "schedule": {"name": "constant", "warmup_steps": 0},
        "optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.0},
        "logging": {"log_every_n_steps": 1, "trackers": []},
        "checkpoint": {"best": None},
    }
    for name, value in changes.items():
        config[name] = config[name] | value if isinstance(value, dict) and name in config else value
    return config


class Stop(jtrain.Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, step, metrics):
        if step == self.step:
            trainer.request_stop("the test has seen enough")


def lines(config, records, steps=1):
    trainer = ContrastiveTrainer(config, train_dataset=records, callbacks=[Stop(steps)])
    trainer.fit()
    return trainer.history.train


@pytest.mark.parametrize(
    ("kind", "parts"),
    [("clip", 2), *(pytest.param(*case, marks=grid) for case in (("clip", 1), ("siglip", 1), ("siglip", 2)))],
)
def test_the_first_step_has_transformers_loss_and_norm_of_gradient(tmp_path, kind, parts):
    """Also in two micro-batches, of which each image meets the texts of both."""
    options = {"global_batch_size": 4, "gradient_accumulation_steps": parts}
    line = lines(settings(tmp_path, kind, **options), FOUR)[0]
    with np.load(FIXTURES / kind / "goldens.npz") as golden:
        assert line["loss"] == pytest.approx(float(golden["loss"]), rel=1e-5)
        assert line["grad_norm"] == pytest.approx(float(golden["grad_norm"]), rel=1e-4)
        logits, tokens = golden["logits_per_image"], golden["input_ids"]
    assert line["image_to_text_accuracy"] == (logits.argmax(1) == np.arange(4)).mean()
    assert line["text_to_image_accuracy"] == (logits.argmax(0) == np.arange(4)).mean()
    assert line["tokens"] == (tokens != 0).sum()


def figures(tmp_path, records=None, steps=2, **changes):
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    found = lines(settings(tmp_path, **changes), records or pairs(24), steps)
    names = ("loss", "grad_norm", "image_to_text_accuracy", "text_to_image_accuracy", "logit_scale", "tokens")
    return [[line[name] for name in names] for line in found[:steps]]


@grid
def test_accumulation_changes_nothing(tmp_path):
    """Dropout, too, is that of the row: the embeddings that the derivatives are of are those of the step."""
    options = {"kind": "siglip", "model": {"dropout": 0.2}}
    whole, parts = figures(tmp_path, **options), figures(tmp_path, **options, **LAYOUTS["accumulation"])
    np.testing.assert_allclose(parts, whole, rtol=2e-5)


@grid
@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_meshes_and_accumulation_change_nothing(tmp_path, kind, layout):
    options = {"kind": kind, "model": {"dropout": 0.1}, "contrastive": {"equal_texts": "positives"}}
    whole = figures(tmp_path, **options)
    np.testing.assert_allclose(figures(tmp_path, **options, **LAYOUTS[layout]), whole, rtol=5e-5)


@grid
def test_a_resumed_run_is_the_same_run(tmp_path):
    options = {"max_steps": 6, "model": {"dropout": 0.1}, "checkpoint": {"save_steps": 3}}
    options["gradient_accumulation_steps"] = 2

    def run(name, stop):
        config = settings(tmp_path, **options) | {"run_dir": str(tmp_path / name)}
        trainer = ContrastiveTrainer(config, train_dataset=pairs(24), callbacks=[Stop(stop)])
        trainer.fit()
        return trainer

    whole = run("whole", 6)
    run("parts", 3)
    parts = run("parts", 6)
    assert [line["step"] for line in parts.history.train] == [4, 5, 6]
    assert bits(parts.state) == bits(whole.state)
    assert parts.counters == whole.counters
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in parts.history.train] == [line[name] for line in whole.history.train[3:]]


@grid
def test_a_run_is_evaluated_and_exported_and_read_again(tmp_path):
    """One run through everything: zero-shot figures, another batch size, RUN, import and export alike."""
    with np.load(DIGITS) as file:
        records = {"images": file["images"][:20], "labels": file["labels"][:20]}
    section = {"classes": [str(n) for n in range(10)], "templates": ["the digit {}", "{}"]}
    config = settings(tmp_path, model={"path": None, "preset": "clip-tiny"}, contrastive=section, data={"eval": 0.4})
    trainer = ContrastiveTrainer(config, train_dataset=records, callbacks=[Stop(1)])
    metrics = trainer.fit().eval[-1]
    run = load_dual_encoder(tmp_path / "run")
    # A row's text is that of the next template; then the prompts, class by class.
    captions = [section["templates"][n % 2].format(label) for n, label in enumerate(records["labels"][12:])]
    texts = [*captions, *(template.format(c) for c in range(10) for template in section["templates"])]
    image, embedded = run.embed_images(list(file_images(12, 20))), run.embed_texts(texts)
    scores = np.exp(image @ embedded[:8].T * np.exp(run.params["logit_scale"][0]))
    loss = -0.5 * np.log(np.diag(scores) ** 2 / (scores.sum(0) * scores.sum(1))).mean()
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-4)
    wanted = recalls(image, embedded[:8], np.unique(captions, return_inverse=True)[1])
    assert metrics["eval_image_to_text_recall_1"] == wanted[1][0] / 8
    hits, count = zero_shot(image, embedded[8:].reshape(10, 2, -1), records["labels"][12:])
    assert metrics["eval_zero_shot_accuracy"] == hits / count and count == 8

    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert main(["import", str(tmp_path / "out"), str(tmp_path / "again")]) == 0
    out, again = load_dual_encoder(tmp_path / "out"), load_dual_encoder(tmp_path / "again")
    assert out.config == again.config == run.config and out.files.transform == run.files.transform
    for other in (out, again):
        jax.tree.map(np.testing.assert_array_equal, other.params, run.params)
        np.testing.assert_array_equal(encoder_of(other.config, other.tokenizer)(texts), trainer.encode(texts))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["CLIPModel"]


def file_images(begin, end):
    with np.load(DIGITS) as file:
        return file["images"][begin:end]


@grid
def test_evaluation_hangs_on_no_batch_size_mesh_or_accumulation(tmp_path):
    found = []
    for changes in ({}, {"eval": {"batch_size": 3}}, {"devices": 4, "mesh": "data=4"}, LAYOUTS["pipeline"]):
        config = settings(tmp_path, **changes)
        found.append(ContrastiveTrainer(config, train_dataset=pairs(8), eval_dataset=pairs(23)).evaluate())
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"contrastive.loss": "clip"}, "loss_kind"),
        ({"contrastive.equal_texts": "positives"}, "loss"),
        ({"contrastive.image_field": "picture"}, "pixels"),
        ({"contrastive.label_field": "kind"}, "label"),
        ({"contrastive.classes": ["one", "blue"]}, "input_ids"),
        ({"contrastive.templates": ["the digit {}"]}, "input_ids"),
        ({"data.text_field": "other"}, "input_ids"),
        ({"max_length": 5}, "input_ids"),
        ({"model.dropout": 0.3}, "loss"),
    ],
)
def test_what_the_section_says_reaches_the_run(tmp_path, changes, differs):
    rng = np.random.default_rng(0)
    records = [
        {name: rng.integers(0, 256, (12, 12, 3), np.uint8) for name in ("image", "picture")}
        | {"other": f"two {n}", "label": n % 2, "kind": 1 - n % 2}
        for n in range(4)
    ]
    base = settings(tmp_path, "siglip", global_batch_size=4, contrastive={"classes": ["two", "red"]})

    def seen(given):
        trainer = ContrastiveTrainer(load_config(base | {"task": "contrastive"}, given), train_dataset=records)
        if differs == "loss_kind":
            return trainer.loss_kind
        batch = trainer.train_rows.rows(np.arange(4))
        if differs != "loss":
            return batch[differs].tobytes()

        def loss(params, batch, rng):
            return trainer.train_step and trainer_loss(trainer, params, batch, rng)

        batch["row"] = np.arange(4, dtype=np.int32)
        return str(jax.make_jaxpr(loss)(trainer.program.plan.abstract.params, batch, jax.random.key(0)))

    assert seen(changes) != seen({})


class Sharp(DualEncoder):
    """Embeddings that are given, and a scale over CLIP's cap."""

    def __init__(self):
        self.config = dual_preset("clip-tiny")

    def embed(self, *arguments, **options):
        return np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32)

    def scale_and_bias(self):
        return np.float32(5), np.float32(0)


@pytest.mark.parametrize(("kind", "used"), [("clip", 100.0), ("siglip", np.exp(5.0))])
def test_the_scale_that_is_logged_is_the_one_that_is_used(kind, used):
    batch = {"pixels": None, "input_ids": None, "row": np.arange(4), "text_key": text_keys(TEXTS)}
    total, count = contrastive_loss_fn(kind, equal_texts=False)(Sharp(), batch, None).metrics["logit_scale"]
    assert count == 4 and total / count == pytest.approx(used, rel=1e-6)


def trainer_loss(trainer, params, batch, rng):
    equal = trainer.config.contrastive.equal_texts == "positives"
    module = trainer.program.model.merge(params, {})
    return contrastive_loss_fn(trainer.loss_kind, equal_texts=equal)(module, batch, rng).sum


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contrastive": {"loss": "siglip"}}, "siglip with a CLIP model"),
        ({"contrastive": {"classes": ["a"]}}, "Name two classes or more"),
        ({"contrastive": {"templates": ["a photo"]}}, "no place for the name"),
        ({"model": {"hidden_size": 8}}, r"model\.hidden_size: 8 with task: contrastive"),
        ({"model": {"path": None, "preset": "clip-tny"}}, "did you mean clip-tiny"),
        ({"model": {"lora": {"rank": 4}}}, r"model\.lora"),
        ({"max_length": 9}, "takes 3 to 8 tokens"),
        ({"data": {"packing": "concat"}}, r"data\.packing"),
        ({"mesh": {"context": 2}, "devices": 2}, r"mesh\.context: 2"),
        ({"mesh": {"expert": 2}, "devices": 2}, r"mesh\.expert: 2"),
        ({"mesh": {"tensor": 4}, "devices": 4}, "num_attention_heads=2 is not divisible"),
        ({"mesh": {"pipeline": 4}, "devices": 4}, "layers"),
        ({"data": {"packing": "best_fit"}}, "data.packing: best_fit with task: contrastive"),
        ({"data": {"eval": 0.01}}, "leaves 0"),
    ],
)
def test_what_can_not_be_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        ContrastiveTrainer(settings(tmp_path, **changes), train_dataset=pairs(24))


def test_other_tasks_and_models_say_what_they_are(tmp_path):
    with pytest.raises(ConfigError, match="contrastive"):
        load_config({"contrastive": {"loss": "clip"}})
    with pytest.raises(ConfigError, match=r"data\.train is empty"):
        ContrastiveTrainer(settings(tmp_path))
    for kind in ("clip", "siglip"):
        with pytest.raises(ConfigError, match=rf"model_type is '{kind}': a model of images and texts.*\n.*contrastive"):
            jtrain.load_model(FIXTURES / kind)
    with pytest.raises(DataError, match=r"train_dataset\[1\] has no 'image'"):
        ContrastiveTrainer(settings(tmp_path), train_dataset=[*pairs(1), {"text": "a"}])


@grid
def test_an_image_that_is_damaged_ends_the_verb_with_65_and_its_record(tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(b"no picture")
    (tmp_path / "rows.jsonl").write_text('{"image": "a.png", "text": "a"}\n' * 4)
    args = ["--data.train", str(tmp_path / "rows.jsonl"), "--global_batch_size", "4", "--max_steps", "2"]
    args += ["--run_dir", str(tmp_path / "run"), "--compile_cache", "", "--devices", "1"]
    assert main(["contrastive", "--accelerator", "cpu", *args]) == 65
    assert "rows.jsonl: line 3: " in capsys.readouterr().err


def test_recall_counts_the_nearest_and_ties_against():
    items = np.eye(4)
    queries = np.asarray([[1, 0, 0, 0], [0.9, 0.5, 0.4, 0.3], [0, 0, 1, 0], [0.5, 0.5, 0.5, 0.5]])
    assert recalls(queries, items, np.arange(4), ks=(1, 2, 4)) == {1: (2, 4), 2: (3, 4), 4: (4, 4)}
    assert recalls(queries, items, np.asarray([0, 0, 2, 3]), ks=(1,)) == {1: (3, 4)}  # an equal text is as good


def test_zero_shot_takes_the_mean_of_a_class():
    prompts = np.asarray([[[1.0, 0.0], [0.8, 0.6]], [[0.0, 1.0], [-0.6, 0.8]]])
    images = np.asarray([[1.0, 0.1], [0.0, 1.0], [0.7, 0.8], [1.0, 0.0]])
    assert zero_shot(images, prompts, np.asarray([0, 1, 1, -1])) == (2, 3)
