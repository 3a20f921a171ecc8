"""The SFT task: TRL's numbers, packing and padding, NEFTune, meshes, resume.

Goldens are made by tests/peers/make_sft_goldens.py (TRL 1.16 on CPU, float32).
"""

import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain import SFTTrainer, load_config
from jtrain.data.build import build_data
from jtrain.data.rows import IGNORE
from jtrain.data.tokenizers import load_tokenizer
from jtrain.models.dropout import embedding_noise
from jtrain.ops.zigzag import to_zigzag, zigzag_order
from jtrain.tasks.language_loss import next_token_loss
from jtrain.tasks.loading import load_model
from tests.parity.grid import FAST_TO_COMPILE

HERE = Path(__file__).parent / "fixtures" / "sft"
MODEL = Path(__file__).parents[1] / "models" / "families" / "fixtures" / "llama"
GOLDENS = json.loads((HERE / "goldens.json").read_text())
CASES, LENGTH = GOLDENS["cases"], GOLDENS["length"]
OURS = {"label_smoothing_factor": "loss.label_smoothing"}
"""Names of TRL's that TRL has from transformers are translated already; those of its options that are not, here."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny Llama with a tokenizer of one word a token and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    for file in (*HERE.glob("*.json"), *HERE.glob("*.jinja"), MODEL / "config.json", MODEL / "model.safetensors"):
        if file.name != "goldens.json":
            shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_model(str(folder), dtype="float32")


def options_of(case):
    """TRL's options as ours: `packing_strategy` is a value of `packing` here."""
    options = dict(CASES[case]["options"])
    if "packing_strategy" in options:
        options["packing"] = options.pop("packing_strategy")
    return options


def settings(tmp_path, **changes):
    return {
        "task": "sft",
        "run_dir": str(tmp_path / "run"),
        "max_length": LENGTH,
        "precision": "32-true",
        "compile_cache": "",
        "accelerator": "cpu",
        "devices": 1,
        "xla_options": FAST_TO_COMPILE,
        "data.cache_dir": str(tmp_path / "cache"),
        "data.shuffle": False,
        "checkpoint.save_steps": 0,
        "checkpoint.best": None,
        "logging.trackers": (),
        "logging.log_every_n_steps": 1,
    } | changes


def rows_of(tmp_path, folder, records, **changes):
    config = load_config(settings(tmp_path, **changes), (), {})
    rows, _ = build_data(config, load_tokenizer(str(folder)), train=records)
    return rows.rows(np.arange(len(rows)))


def figures(model, batch, label_smoothing=0.0):
    """Loss, gradient norm, entropy and accuracy of a batch, padded to the rows that one program has."""
    room = 8 - len(batch["labels"])
    padded = {
        name: np.pad(
            values, ((0, room),) + ((0, 0),) * (values.ndim - 1), constant_values=IGNORE if name == "labels" else 0
        )
        for name, values in batch.items()
        if name != "bytes"
    }
    padded["row"] = np.arange(8)
    return _program(model, label_smoothing)(padded)


@functools.cache
def _program(model, label_smoothing):
    loss_fn = next_token_loss(label_smoothing, entropy=True, packing_efficiency=True)

    def loss(params, batch):
        found = loss_fn(model.model.merge(params, model.variables), batch, jax.random.key(0))
        return found.sum / found.count, {name: a / b for name, (a, b) in found.metrics.items()}

    def program(batch):
        (value, metrics), gradients = jax.value_and_grad(loss, has_aux=True)(model.params, batch)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)))
        return metrics | {"loss": value, "grad_norm": norm, "gradients": gradients}

    return jax.jit(program, compiler_options=FAST_TO_COMPILE)


# -- TRL --------------------------------------------------------------------------------------------------------------


def examples_of(batch):
    """The segments of rows, as (ids, labels), where the first token of a segment is never a label."""
    found = []
    for row in range(len(batch["labels"])):
        segments = batch["segment_ids"][row]
        for number in range(1, segments.max() + 1):
            here = segments == number
            found.append((batch["input_ids"][row][here].tolist(), batch["labels"][row][here].tolist()))
    return sorted(found)


@pytest.mark.parametrize("case", [name for name, golden in CASES.items() if not golden["packed"]])
def test_tokens_and_masks_are_those_of_trl(case, folder, tmp_path):
    batch = rows_of(tmp_path, folder, GOLDENS["data"][CASES[case]["form"]], **options_of(case))
    # The label of a row's first token is never predicted; TRL leaves it there.
    wanted = sorted((row["ids"], [IGNORE, *row["labels"][1:]]) for row in CASES[case]["rows"])
    assert examples_of(batch) == wanted


SMOOTHED = pytest.param("smoothed", marks=pytest.mark.grid)  # one more program


@pytest.mark.parametrize("case", [SMOOTHED if name == "smoothed" else name for name in CASES])
def test_loss_accuracy_entropy_and_gradient_are_those_of_trl(case, folder, model, tmp_path):
    golden = CASES[case]
    batch = rows_of(tmp_path, folder, GOLDENS["data"][golden["form"]], **options_of(case))
    found = figures(model, batch, golden["options"].get("label_smoothing_factor", 0.0))
    for name in ("loss", "mean_token_accuracy", "entropy"):
        assert float(found[name]) == pytest.approx(golden[name], abs=1e-5), name
    assert float(found["grad_norm"]) == pytest.approx(golden["grad_norm"], rel=1e-4)
    if not golden["packed"]:  # TRL packs examples without a label, too
        assert (batch["segment_ids"] > 0).sum() == golden["num_tokens"]


def test_a_run_logs_trls_figures_under_trls_names(folder, tmp_path):
    golden = CASES["assistant_only"]
    records = GOLDENS["data"]["messages"]
    config = settings(tmp_path, max_steps=1, global_batch_size=len(records), assistant_only_loss=True)
    trainer = SFTTrainer(config, model=str(folder), train_dataset=records)
    (line,) = trainer.fit().train
    for name in ("loss", "mean_token_accuracy", "entropy", "num_tokens"):
        assert line[name] == pytest.approx(golden[name], abs=1e-5), name
    assert line["grad_norm"] == pytest.approx(golden["grad_norm"], rel=1e-4)
    assert line["packing_efficiency"] == pytest.approx(golden["num_tokens"] / (len(records) * LENGTH))
    assert any("6 examples (messages; the assistant's turns are learned)" in text for text in trainer.summary())


def test_prompts_are_rendered_by_the_template_that_is_trained(folder, tmp_path):
    from jtrain.tasks.generation_request import prompt_ids

    other = tmp_path / "other.jinja"
    other.write_text("{% for m in messages %}{{ 'w7 ' ~ m.content ~ ' ' }}{% endfor %}")
    config = settings(tmp_path, max_steps=1, **{"data.chat_template": str(other)})
    trainer = SFTTrainer(config, model=str(folder), train_dataset=GOLDENS["data"]["messages"])
    trained = trainer.train_rows[0]["input_ids"][0]
    assert prompt_ids(trainer.tokenizer, [{"role": "user", "content": "w1"}])[0] == trained == 16  # w7


def test_ids_and_masks_of_200_chats_are_those_of_transformers(tmp_path):
    import lzma

    from jtrain.data.chat import load_chat_template
    from tests.peers.make_sft_goldens import CHAT, DATE, conversations, digest

    (tmp_path / "tokenizer.json").write_bytes(lzma.decompress((CHAT / "tokenizer.json.xz").read_bytes()))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "eos_token": "<eos>"}')
    tokenizer = load_tokenizer(str(tmp_path))
    chats = conversations()
    templates = {name: load_chat_template(tokenizer, str(CHAT / f"{name}.jinja")) for name, _ in chats}
    assert (len(chats), len(GOLDENS["chats"]), len(templates)) == (200, 200, 5)
    found = [digest(*templates[name].encode(tokenizer, messages, date_string=DATE)) for name, messages in chats]
    assert found == GOLDENS["chats"]


# -- packing and padding ----------------------------------------------------------------------------------------------


def test_packed_and_padded_rows_and_rows_one_by_one_have_one_loss_and_gradient(folder, model, tmp_path):
    records = GOLDENS["data"]["prompt_completion"]
    padded = rows_of(tmp_path, folder, records, packing=False)
    packed = rows_of(tmp_path, folder, records, packing=True)
    assert len(packed["labels"]) < len(padded["labels"])
    whole, other = figures(model, padded), figures(model, packed)
    counts = (padded["labels"] != IGNORE).sum(1)
    alone = [figures(model, {name: values[n : n + 1] for name, values in padded.items()}) for n in range(len(counts))]
    mean = jax.tree.map(lambda *parts: sum(c * p for c, p in zip(counts, parts, strict=True)) / counts.sum(), *alone)
    for found in (other, mean):
        for name in ("loss", "entropy", "mean_token_accuracy"):
            assert float(found[name]) == pytest.approx(float(whole[name]), abs=2e-6), name
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found["gradients"], whole["gradients"])


def test_labels_are_shifted_once():
    """A model that knows that t is followed by t + 1 has no loss; shifted twice, or not at all, it would have."""

    class Counting:
        def hidden(self, ids, **_):
            return jax.nn.one_hot(ids, 12) * 50.0

        def head(self):
            return jnp.roll(jnp.eye(12), 1, axis=1)

    ids = jnp.arange(10)[None]
    batch = {"input_ids": ids, "labels": ids.at[0, :4].set(IGNORE), "row": jnp.zeros(1, jnp.int32)}
    batch |= {"segment_ids": jnp.ones_like(ids), "position_ids": ids}
    loss = next_token_loss()(Counting(), batch, None)
    assert float(loss.sum) < 1e-6 and float(loss.count) == 6


# -- NEFTune ----------------------------------------------------------------------------------------------------------


def noise_of(segments, row=(0, 1), alpha=5.0, rng=0, width=4):
    segments = jnp.asarray(segments)
    zeros = jnp.zeros((*segments.shape, width))
    return np.asarray(embedding_noise(zeros, alpha, jax.random.key(rng), jnp.asarray(row), segments))


def test_noise_is_uniform_and_its_size_follows_the_length_of_the_document():
    segments = np.asarray([[1] * 100 + [2] * 25 + [0] * 3])
    noise = noise_of(segments, row=[7], width=64)
    for part, length in ((noise[0, :100], 100), (noise[0, 100:125], 25)):
        most = 5.0 / np.sqrt(length * 64)  # eq. 1 of the paper
        assert 0.99 * most < np.abs(part).max() <= most
        assert np.std(part) == pytest.approx(most / np.sqrt(3), rel=0.05)
    assert not noise[0, 125:].any()


def test_noise_is_a_function_of_the_key_the_global_row_and_the_position():
    row = [1] * 6 + [0, 0]
    both = noise_of([row, row])
    assert (noise_of([row], row=[1]) == both[1:]).all()  # the micro-batch of the second row alone
    assert not np.allclose(both[0], both[1])
    assert (noise_of([row + [0] * 8], row=[0])[0, :8] == both[0]).all()  # another bucket
    assert not np.allclose(noise_of([row], rng=1, row=[0]), both[:1])
    ways = 2
    with zigzag_order(ways):
        zigzag = noise_of(to_zigzag(jnp.asarray([row]), ways), row=[0])
    assert (zigzag == np.asarray(to_zigzag(jnp.asarray(both[:1]), ways))).all()


def test_an_evaluation_has_no_noise(model):
    """That training has it, is seen by tests/tasks/test_every_field.py."""
    batch = {name: jnp.ones((2, 8), jnp.int32) for name in ("input_ids", "labels", "segment_ids", "position_ids")}
    batch["row"] = jnp.arange(2)

    def program(alpha):
        loss = next_token_loss(noise_alpha=alpha)
        module = model.model.merge(model.params, model.variables)
        return str(jax.make_jaxpr(lambda batch: loss(module, batch, None).sum)(batch))

    assert program(0.0) == program(5.0)


# -- meshes and resume ------------------------------------------------------------------------------------------------


def losses(folder, run_dir, records, **changes):
    config = settings(run_dir, max_steps=2, global_batch_size=8, learning_rate=1e-2, **changes)
    trainer = SFTTrainer(config, model=str(folder), train_dataset=records)
    return [(line["loss"], line["grad_norm"], line["entropy"]) for line in trainer.fit().train]


MESHES = ["fsdp=2,tensor=2,pipeline=2", "data=2,context=2", "tensor=2,context=2,fsdp=2", "pipeline=2"]
"""With noise; every task on a mesh is tests/parity/test_tasks.py."""
TRAINED = {"neftune_noise_alpha": 5.0, "assistant_only_loss": True}


@pytest.fixture(scope="module")
def on_one_device(folder, tmp_path_factory):
    return losses(folder, tmp_path_factory.mktemp("one"), chats(), **TRAINED)


def chats():
    """Conversations of many lengths."""
    return sorted(GOLDENS["data"]["messages"] * 4, key=lambda record: len(str(record)))


@pytest.mark.grid
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_gives_the_losses_of_one_device(mesh, folder, on_one_device, tmp_path):
    sizes = [int(part.partition("=")[2]) for part in mesh.split(",")]
    found = losses(folder, tmp_path, chats(), **TRAINED | {"mesh": mesh, "devices": int(np.prod(sizes))})
    np.testing.assert_allclose(found, on_one_device, rtol=2e-5)


def test_a_run_that_was_stopped_goes_on_bit_by_bit(folder, tmp_path):
    from tests.parity.runs import Ledger, bits

    def run(name, stop_at=None):
        config = settings(tmp_path / name, max_steps=4, per_device_batch_size=4, gradient_accumulation_steps=2)
        config |= TRAINED | {
            "data.shuffle": True,
            "data.buckets": [16],
            "compile_cache": str(tmp_path / "xla"),
            "model.dropout": 0.1,
        }
        trainer = SFTTrainer(config, model=str(folder), train_dataset=chats(), callbacks=[Ledger(stop_at)])
        trainer.fit()
        return trainer

    whole = run("whole")
    run("parts", stop_at=2)
    parts = run("parts")
    assert bits(parts.state) == bits(whole.state)
    assert parts.counters == whole.counters
    assert [line["loss"] for line in parts.history.train] == [line["loss"] for line in whole.history.train][-2:]
