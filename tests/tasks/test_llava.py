"""Models that see: transformers' numbers, what is trained, folders, generation, meshes, resume.

Goldens are made by tests/peers/make_llava_goldens.py (transformers 5.24 on CPU, float32).
"""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jtrain import SFTTrainer, load_config
from jtrain.checkpoint import arrays
from jtrain.data.build import build_data
from jtrain.data.tokenizers import load_tokenizer
from jtrain.errors import CheckpointError, ConfigError, DataError
from jtrain.models.lora import ADAPTER, Lora
from jtrain.tasks.adapter_export import export_adapter
from jtrain.tasks.adapters import decoder_factory
from jtrain.tasks.distill import DistillTrainer
from jtrain.tasks.exporting import export
from jtrain.tasks.generate import generate
from jtrain.tasks.image_import import import_with_vision
from jtrain.tasks.image_models import settle_images
from jtrain.tasks.language_loss import next_token_loss
from jtrain.tasks.loading import load_model
from jtrain.tasks.model_folder import ModelFolder, read_model_folder, write_model_folder
from jtrain.tasks.opened import open_model
from jtrain.train.model import functional_model
from jtrain.train.optimizers import trainable_mask
from tests.parity.grid import FAST_TO_COMPILE
from tests.parity.runs import Ledger, bits
from tests.tasks.test_sft import settings

HERE = Path(__file__).parent / "fixtures" / "llava"
CLIP = Path(__file__).parents[1] / "models" / "fixtures" / "clip"
TEXT = Path(__file__).parents[1] / "models" / "families" / "fixtures" / "llama"
ROWS = json.loads((HERE / "rows.json").read_text())
KINDS = ("clip-llama", "siglip-qwen2")
IMAGE = 6


def golden_of(kind):
    return json.loads((HERE / kind / "goldens.json").read_text())


@pytest.fixture(scope="module", params=[KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.grid)])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind):
    return load_model(str(HERE / kind))


def batch_of(tmp_path, kind, records=ROWS, **changes):
    config = load_config(settings(tmp_path, max_length=32, assistant_only_loss=True, **changes), (), {})
    rows, _ = build_data(config, load_tokenizer(str(HERE / kind)), train=records)
    batch = rows.rows(np.arange(len(rows)))
    return batch | {"row": np.arange(len(rows))}


# -- transformers ------------------------------------------------------------------------------------------------------


@pytest.mark.grid
def test_loss_and_gradients_of_every_part_are_those_of_transformers(kind, model, tmp_path):
    golden = golden_of(kind)
    batch = {name: jnp.asarray(values) for name, values in batch_of(tmp_path, kind).items() if name != "bytes"}
    loss_fn = next_token_loss()

    def loss(params):
        module = model.model.merge(params, model.variables)
        found = loss_fn(module, batch, jax.random.key(0))
        return found.sum / found.count, found.count

    def program(params):
        (value, count), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return value, count, gradients

    value, count, gradients = jax.jit(program, compiler_options=FAST_TO_COMPILE)(model.params)
    assert int(count) == golden["count"]
    assert float(value) == pytest.approx(golden["loss"], abs=1e-5)
    flat = arrays.flatten(gradients)

    def norm(begin=("",)):
        return float(np.sqrt(sum(np.square(g).sum() for path, g in flat.items() if path.startswith(begin))))

    others = tuple({path.partition("/")[0] for path in flat} - {"vision_tower"})
    assert norm() == pytest.approx(golden["grad_norm"], rel=1e-4)
    assert norm(others) == pytest.approx(golden["grad_norm_tower_frozen"], rel=1e-4)
    assert norm(("multi_modal_projector",)) == pytest.approx(golden["grad_norm_projector"], rel=1e-4)


@pytest.mark.parametrize("number", [2, 3])  # with two images, and with none
@pytest.mark.grid
def test_logits_are_those_of_transformers(kind, model, number):
    goldens = np.load(HERE / kind / "goldens.npz")
    pixels = goldens["pixels"].transpose(0, 2, 3, 1)[None] if number == 2 else None
    found = model(np.asarray([golden_of(kind)["rows"][number]["ids"]]), pixel_values=pixels)
    np.testing.assert_allclose(found[0], goldens[f"logits{number}"], atol=1e-4)


@pytest.mark.grid
def test_generation_goes_on_as_transformers_does(kind, model):
    prompt = ROWS[2]["messages"][:1]
    other = [{"role": "user", "content": "w5"}]
    first, second = generate(model, [prompt, other], max_new_tokens=8, stop_token_ids=[79])
    assert first.ids == golden_of(kind)["greedy"]
    assert second.ids == generate(model, [other], max_new_tokens=8, stop_token_ids=[79])[0].ids


# -- folders -----------------------------------------------------------------------------------------------------------


def tensors(kind):
    """The tensors of a fixture by the names of the published folders."""
    family = open_model(HERE / kind).family
    return {family.rename(name): value for name, value in load_file(HERE / kind / "model.safetensors").items()}


def test_a_folder_goes_back_with_the_same_tensors(kind, model, tmp_path):
    export(model, tmp_path / "out")
    again, first = load_file(tmp_path / "out" / "model.safetensors"), tensors(kind)
    assert again.keys() == first.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(again[name], value, err_msg=name)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    before = json.loads((HERE / kind / "config.json").read_text())
    for section in ("vision_config", "text_config"):
        differing = {k for k, v in before.pop(section).items() if config[section].get(k) != v}
        assert differing <= {"max_window_layers"}  # from where layers slide, and none does
    assert {k: config.get(k) for k in before} == before | {"transformers_version": None}
    for name in ("processor_config.json", "chat_template.jinja", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (HERE / kind / name).read_bytes()
    assert open_model(tmp_path / "out").decoder == model.decoder


def test_a_runs_own_folder_keeps_how_the_model_sees(tmp_path):
    from etils import epath

    opened = open_model(HERE / KINDS[1])
    write_model_folder(epath.Path(tmp_path), ModelFolder(opened.decoder, opened.companions))
    found = read_model_folder(epath.Path(tmp_path))
    assert found.decoder == opened.decoder and found.decoder.images.tokens == 4
    assert found.tokenizer().images == load_tokenizer(str(HERE / KINDS[1])).images


def changed(tmp_path, **changes):
    """The first model with other values in its config.json."""
    folder = tmp_path / "model"
    shutil.copytree(HERE / KINDS[0], folder)
    config = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        section, _, key = name.rpartition("__")
        (config[section] if section else config)[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_feature_layer": [-2, -1]}, "lists of layers"),
        ({"vision_feature_layer": -9}, "3 layers"),
        ({"vision_feature_select_strategy": "cls"}, "'cls'"),
        ({"projector_hidden_act": "tanh"}, "'tanh'"),
        ({"image_token_index": 80}, "80 tokens"),
        ({"image_token_index": "x"}, "image_token_index is 'x'"),
        ({"vision_config__model_type": "vit"}, "model_type of vision_config is 'vit'"),
        ({"vision_config__hidden_act": "tanh"}, "hidden_act of vision_config"),
        ({"vision_config": 7}, "vision_config is 7"),
        ({"text_config__model_type": "llava"}, "llava itself"),
        ({"text_config__model_type": "bert"}, "'bert'"),
    ],
)
def test_what_a_config_may_not_say_is_named(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        open_model(changed(tmp_path, **changes))


def test_a_missing_tensor_is_named(tmp_path):
    folder = changed(tmp_path, vision_config__num_hidden_layers=4)
    with pytest.raises(CheckpointError, match=r"vision_tower\.vision_model\.encoder\.layers\.3"):
        open_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_token": "w3"}, "the image token"),
        ({"patch_size": 4}, "tokens of an image"),
        ({"image_token": "no such token"}, "no image token"),
    ],
)
def test_a_processor_that_says_something_else_than_the_model_is_refused(changes, message, tmp_path):
    folder = changed(tmp_path)
    path = folder / "processor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    config = load_config(settings(tmp_path), (), {})
    with pytest.raises(DataError, match=message):
        tokenizer = load_tokenizer(str(folder))
        settle_images(config, open_model(folder).decoder, tokenizer, task="sft", reads=True)


# -- what is trained ---------------------------------------------------------------------------------------------------


def masks(decoder, freeze, lora=None):
    split = functional_model(decoder_factory(decoder, lora))
    mask = trainable_mask(split.params, freeze, split.has("frozen"))
    return {path: bool(on) for path, on in arrays.flatten(jax.tree.map(np.asarray, mask)).items()}


def test_the_encoder_is_frozen_unless_the_config_says_otherwise(tmp_path):
    opened = open_model(HERE / KINDS[0])
    tokenizer = opened.tokenizer()

    def frozen(**changes):
        config = load_config(settings(tmp_path, **changes), (), {})
        config = settle_images(config, opened.decoder, tokenizer, task="sft", reads=True)
        return masks(opened.decoder, config.optimizer.freeze)

    trained = frozen()
    assert {path for path, on in trained.items() if not on} == {p for p in trained if p.startswith("vision_tower/")}
    assert all(frozen(**{"optimizer.freeze": ()}).values())
    projector = frozen(**{"optimizer.freeze": ["(?!multi_modal_projector/).*"]})  # LLaVA's first stage
    assert {path for path, on in projector.items() if on} == {
        f"multi_modal_projector/{name}/{part}" for name in ("linear_1", "linear_2") for part in ("kernel", "bias")
    }


def test_adapters_belong_to_the_language_part_and_the_projector_is_trained_beside_them():
    decoder = open_model(HERE / KINDS[0]).decoder
    trained = masks(decoder, (), Lora(rank=2))
    adapters = {path for path in trained if path.rpartition("/")[2] in ADAPTER}
    assert adapters and all(path.startswith("layers/") for path in adapters)
    others = {path for path, on in trained.items() if on} - adapters
    assert {path.partition("/")[0] for path in others} == {"multi_modal_projector"}


def test_the_tokenizer_of_a_model_that_sees_gives_another_none_of_its_images(tmp_path):
    tokenizer = load_tokenizer(str(HERE / KINDS[0]))
    config = load_config(settings(tmp_path), (), {})
    text = open_model(HERE / KINDS[0]).decoder.replace(images=None)
    assert settle_images(config, text, tokenizer, task="sft", reads=True) == config
    with pytest.raises(DataError, match="reads text alone"):
        build_data(config, tokenizer, train=ROWS)


def test_other_tasks_refuse_a_model_that_sees(tmp_path):
    config = load_config(settings(tmp_path), (), {})
    opened = open_model(HERE / KINDS[0])
    with pytest.raises(ConfigError, match="task: dpo with a model that sees"):
        settle_images(config, opened.decoder, opened.tokenizer(), task="dpo", reads=False)
    distill = {"task": "distill", "run_dir": str(tmp_path / "run"), "distill": {"teacher": str(TEXT)}}
    with pytest.raises(ConfigError, match="task: distill with a model that sees"):
        DistillTrainer(distill, model=str(HERE / KINDS[0]), train_dataset=ROWS)
    distill["distill"] = {"teacher": str(HERE / KINDS[0])}
    with pytest.raises(ConfigError, match=r"distill\.teacher: .* is a model that sees"):
        DistillTrainer(distill, model=str(TEXT), train_dataset=ROWS)


def test_images_that_do_not_fit_the_tokens_are_refused(model, kind):
    ids = np.asarray([[1, IMAGE, IMAGE, IMAGE, IMAGE, 9]])
    for pixels, message in (
        (np.zeros((1, 1, 8, 8, 3)), "shape"),
        (np.zeros((1, 0, 16, 16, 3)), "4 image tokens, and 0 images"),
    ):
        with pytest.raises(DataError, match=message):
            model(ids, pixel_values=pixels)
    with pytest.raises(DataError, match="4 image tokens, and 0 images"):
        generate(model, [ids[0].tolist()], max_new_tokens=1)


# -- a new model -------------------------------------------------------------------------------------------------------


def text_model(folder, vocabulary=None):
    """A Llama with a tokenizer of words that has no image token."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TEXT / name, folder)
    content = json.loads((HERE.parent / "sft" / "tokenizer.json").read_text())
    while vocabulary and len(content["model"]["vocab"]) < vocabulary:
        content["model"]["vocab"][f"more{len(content['model']['vocab'])}"] = len(content["model"]["vocab"])
    (folder / "tokenizer.json").write_text(json.dumps(content))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(HERE.parent / "sft" / name, folder)
    return folder


@pytest.mark.parametrize("vocabulary", [pytest.param(None, marks=pytest.mark.grid), 96])  # an unused row; a full table
def test_a_new_model_has_the_weights_of_both(vocabulary, tmp_path):
    text = text_model(tmp_path / "text", vocabulary)
    done = import_with_vision(text, CLIP, tmp_path / "out")
    assert done.model_type == "llava"
    made = load_model(str(tmp_path / "out"))
    first = load_model(str(text))
    token = made.decoder.images.image_token_index
    assert token == first.tokenizer.vocab_size == (vocabulary or 89)
    assert made.decoder.vocab_size == max(96, token + 1)
    assert made.tokenizer.images.token_id == token and made.tokenizer.images.tokens == made.decoder.images.tokens == 9
    assert made.tokenizer.token_to_id("<image>") == token
    params, before = arrays.flatten(made.params), arrays.flatten(first.params)
    for path, leaf in before.items():
        np.testing.assert_array_equal(params[path][tuple(map(slice, leaf.shape))], leaf, err_msg=path)
    if vocabulary:
        table = params["embed_tokens/embedding"]
        np.testing.assert_allclose(table[-1], np.asarray(table[:-1]).mean(0), atol=1e-6)
    tower = load_file(CLIP / "model.safetensors")
    np.testing.assert_array_equal(
        params["vision_tower/embed_positions/embedding"], tower["vision_model.embeddings.position_embedding.weight"]
    )
    assert float(np.std(params["multi_modal_projector/linear_1/kernel"])) > 0
    assert made.tokenizer.chat_templates == first.tokenizer.chat_templates
    assert made.decoder.replace(images=None, vocab_size=96) == first.decoder


@pytest.mark.parametrize(
    ("model", "vision", "message"),
    [
        (HERE / KINDS[0], CLIP, "sees already"),
        (TEXT, CLIP, "no tokenizer.json"),
        ("text", TEXT, "model_type is 'llama'"),
    ],
)
def test_what_makes_no_model_that_sees_is_refused(model, vision, message, tmp_path):
    model = text_model(tmp_path / "text") if model == "text" else model
    with pytest.raises((ConfigError, CheckpointError), match=message):
        import_with_vision(model, vision, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- runs --------------------------------------------------------------------------------------------------------------


def trainer_of(tmp_path, name="run", callbacks=(), records=(*ROWS, *ROWS[:3]), **changes):
    changes = {"max_steps": 3, "global_batch_size": 4, "optimizer.learning_rate": 1e-2, "warmup_steps": 0} | changes
    config = settings(tmp_path / name, max_length=32, assistant_only_loss=True, **changes)
    return SFTTrainer(config, model=str(HERE / KINDS[0]), train_dataset=list(records), callbacks=callbacks)


def test_a_run_has_transformers_figures_and_trains_all_but_the_encoder(tmp_path):
    golden = golden_of(KINDS[0])
    trainer = trainer_of(tmp_path, records=ROWS, max_steps=2, global_batch_size=5)
    first = trainer.fit().train[0]
    assert first["loss"] == pytest.approx(golden["loss"], abs=1e-5)
    assert first["grad_norm"] == pytest.approx(golden["grad_norm_tower_frozen"], rel=1e-4)
    line = next(line for line in trainer.summary() if line.startswith("images: "))
    assert line == "images: CLIP encoder (3 layers, 16 pixels), 4 tokens an image; frozen: vision_tower/.*"
    after = arrays.flatten(jax.device_get(trainer.state.params))
    loaded = arrays.flatten(load_model(str(HERE / KINDS[0])).params)
    for path, leaf in loaded.items():
        assert np.array_equal(after[path], leaf) == path.startswith("vision_tower/"), path
    kept = load_model(str(tmp_path / "run" / "run"))
    assert kept.decoder.images == trainer.decoder.images and kept.tokenizer.images == trainer.tokenizer.images


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    trainer = trainer_of(tmp_path_factory.mktemp("one"), **ALL)
    trainer.fit()
    return [(line["loss"], line["grad_norm"]) for line in trainer.history.train]


ALL = {"optimizer.freeze": (), "gradient_accumulation_steps": 1}
"""The encoder is trained as well: its gradient has to find its way."""


@pytest.mark.grid
@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=2", "data=2", "pipeline=2", "context=2", "fsdp=2,tensor=2,pipeline=2"])
def test_a_mesh_gives_the_losses_of_one_device(mesh, on_one_device, tmp_path):
    devices = int(np.prod([int(part.partition("=")[2]) for part in mesh.split(",")]))
    trainer = trainer_of(tmp_path, mesh=mesh, devices=devices, **ALL)
    trainer.fit()
    found = [(line["loss"], line["grad_norm"]) for line in trainer.history.train]
    np.testing.assert_allclose(found, on_one_device, rtol=2e-6)


@pytest.mark.grid
def test_a_run_that_was_stopped_goes_on_bit_by_bit(tmp_path):
    more = {"data.shuffle": True, "model.lora.rank": 2, "max_steps": 4, "model.dropout": 0.1}

    def run(name, stop_at=None):
        trainer = trainer_of(tmp_path, name, callbacks=[Ledger(stop_at)], **more)
        trainer.fit()
        return trainer

    whole = run("whole")
    run("parts", stop_at=2)
    parts = run("parts")
    assert bits(parts.state) == bits(whole.state)
    merged = load_model(str(tmp_path / "whole" / "run"))  # the adapters in the kernels, the projector as it was trained
    kernel = "multi_modal_projector/linear_1/kernel"
    np.testing.assert_array_equal(arrays.flatten(merged.params)[kernel], arrays.flatten(whole.state.params)[kernel])
    with pytest.raises(ConfigError, match="projector"):
        export_adapter(str(tmp_path / "whole" / "run"), tmp_path / "adapter")
    assert [line["loss"] for line in parts.history.train] == [line["loss"] for line in whole.history.train][-2:]
