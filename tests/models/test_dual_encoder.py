"""CLIP and SigLIP against transformers, by the goldens of tests/peers/make_vision_goldens.py."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jtrain.checkpoint import arrays
from jtrain.checkpoint.hf.folder import HfFolder
from jtrain.checkpoint.hf.gather import tensor_of
from jtrain.checkpoint.hf.weights import match
from jtrain.errors import CheckpointError, ConfigError
from jtrain.models.dual_encoder import DualEncoder
from jtrain.models.dual_presets import dual_preset
from jtrain.models.families.dual_encoder import dual_encoder_config, dual_encoder_json, dual_encoder_tensors
from jtrain.models.vision.config import VisionConfig
from jtrain.models.vision.encoder import VisionEncoder
from jtrain.ops.contrastive import contrastive_loss
from jtrain.tasks.dual_encoder import load_dual_encoder

from .build import jit

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module", params=["clip", "siglip"])
def golden(request):
    folder = FIXTURES / request.param
    with np.load(folder / "goldens.npz") as file:
        wanted = dict(file)
    wanted["pixels"] = wanted["pixel_values"].transpose(0, 2, 3, 1)
    return folder, wanted, load_dual_encoder(folder)


def test_embeddings_and_scores_are_those_of_transformers(golden):
    _, wanted, loaded = golden
    image, text, scores, hidden, negative = loaded.jit(everything)(wanted["pixels"], wanted["input_ids"])
    np.testing.assert_allclose(image, wanted["image_embeds"], atol=1e-5)
    np.testing.assert_allclose(text, wanted["text_embeds"], atol=1e-5)
    np.testing.assert_allclose(scores, wanted["logits_per_image"], atol=1e-4)
    for layer in range(3):
        np.testing.assert_allclose(hidden[layer], wanted[f"hidden_states_{layer}"], atol=2e-5)
        np.testing.assert_array_equal(hidden[layer], negative[layer])


def everything(module, pixels, ids):
    hidden = [module.vision.features(pixels, layer=layer) for layer in range(3)]
    negative = [module.vision.features(pixels, layer=layer) for layer in (-3, -2, -1)]
    return *module.embed(pixels, ids), module(pixels, ids), hidden, negative


@pytest.mark.grid  # tests/tasks/test_contrastive.py has CLIP's by default
def test_loss_and_the_norm_of_its_gradient_are_those_of_transformers(golden):
    _, wanted, loaded = golden

    def mean_loss(params):
        module = loaded.model.merge(params, loaded.variables)
        image, text = module.embed(wanted["pixels"], wanted["input_ids"])
        key = jnp.stack([jnp.arange(4)] * 2, axis=1)
        return contrastive_loss(loaded.config.kind, image, text, *module.scale_and_bias(), key)[0] / 4

    loss, grads = jit(jax.value_and_grad(mean_loss))(loaded.params)
    np.testing.assert_allclose(loss, wanted["loss"], rtol=1e-5)
    norm = np.sqrt(sum(np.square(np.asarray(g, np.float64)).sum() for g in jax.tree.leaves(grads)))
    np.testing.assert_allclose(norm, wanted["grad_norm"], rtol=1e-4)


def test_config_and_tensors_go_out_as_they_came_in(golden):
    folder, _, loaded = golden
    hf = json.loads((folder / "config.json").read_text())
    config = dual_encoder_config(hf)
    assert dual_encoder_config(dual_encoder_json(config)) == config
    disk, params = HfFolder(folder), arrays.flatten(loaded.params)
    for name, tensor in match(disk, dual_encoder_tensors(config)):
        written = tensor_of(tensor, params, {}, "float32")
        assert written.shape == disk.entries[name].shape
        np.testing.assert_array_equal(written, disk.read(name))


def test_the_first_clips_take_the_largest_token_for_a_text():
    config = dual_encoder_config(json.loads((FIXTURES / "clip" / "config.json").read_text()))

    def encoded(ids):  # drawn in the program: half the time of drawing leaf by leaf
        with nnx.use_eager_sharding(False):
            return [DualEncoder(config.replace(eos_token_id=end), nnx.Rngs(0)).encode_text(ids) for end in (2, 13)]

    # What comes after it is not seen: the tower is causal.
    largest, by_id = jit(encoded)(jnp.asarray([[1, 5, 13, 4, 3, 0], [1, 5, 13, 7, 7, 7]]))
    np.testing.assert_array_equal(largest, by_id)
    np.testing.assert_allclose(largest[0], largest[1], atol=1e-6)


def test_siglip_sees_what_comes_before_and_after():
    config = dual_encoder_config(json.loads((FIXTURES / "siglip" / "config.json").read_text()))

    def hidden_of(ids):
        with nnx.use_eager_sharding(False):
            return DualEncoder(config, nnx.Rngs(0)).text.hidden(ids)

    hidden = jit(hidden_of)(jnp.asarray([[1, 5, 13, 4, 3, 0], [1, 5, 13, 4, 3, 7]]))
    assert float(jnp.abs(hidden[0, 0] - hidden[1, 0]).max()) > 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "blip"}, "model_type is 'blip'"),
        ({"vision_config": {"patch_size": 13, "image_size": 12}}, "vision.patch_size 13 is over vision.image_size 12"),
        ({"text_config": {"hidden_act": "relu"}}, "hidden_act of text_config is 'relu'"),
        ({"text_config": {"hidden_size": "16"}}, "hidden_size of text_config is '16'"),
        ({"text_config": [1]}, "text_config is [1]"),
    ],
)
def test_what_is_not_done_is_refused_by_name(change, message):
    hf = json.loads((FIXTURES / "clip" / "config.json").read_text())
    with pytest.raises(ConfigError, match=message.replace("[", r"\[").replace("]", r"\]")):
        dual_encoder_config(hf | change)


def test_a_missing_tensor_is_named(tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((FIXTURES / "clip" / name).read_bytes())
    hf = json.loads((tmp_path / "config.json").read_text())
    hf["vision_config"]["num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(hf))
    (tmp_path / "model.safetensors").write_bytes((FIXTURES / "clip" / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"vision_model\.encoder\.layers\.2\.layer_norm1\.weight"):
        load_dual_encoder(tmp_path)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("clip-vit-base-patch16", 149_620_737),
        ("siglip-base-patch16-224", 203_155_970),
        ("clip-vit-base-patch32", 151_277_313),
        ("clip-vit-large-patch14", 427_616_513),
    ],
)
def test_a_preset_has_as_many_parameters_as_the_published_folder(name, size):
    def drawn():
        with nnx.use_eager_sharding(False):
            return nnx.state(DualEncoder(dual_preset(name), nnx.Rngs(0)), nnx.Param)

    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.eval_shape(drawn))) == size


def test_pooling_is_the_mean_of_the_normalised_patches_without_the_class_token():
    shape = VisionConfig(16, 32, 1, 2, 8, 4, class_token=True, pooling="mean")
    with nnx.use_eager_sharding(False):
        model = VisionEncoder(shape, nnx.Rngs(0))
    pixels = jax.random.normal(jax.random.key(1), (2, 8, 8, 3))
    features, pooled = jit(lambda pixels: (model.features(pixels), model.pooled(pixels)))(pixels)
    x = np.asarray(features, np.float64)[:, 1:]
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + shape.layer_norm_eps)
    np.testing.assert_allclose(pooled, x.mean(1), atol=1e-5)


def test_what_no_patch_covers_is_not_seen():
    with nnx.use_eager_sharding(False):
        model = VisionEncoder(VisionConfig(16, 32, 1, 2, 9, 4), nnx.Rngs(0))  # SigLIP so400m: 384 pixels, patches of 14
    pixels = jax.random.normal(jax.random.key(1), (1, 9, 9, 3))
    first, other = jit(lambda *images: [model.features(one) for one in images])(pixels, pixels.at[:, 8, 8].set(7.0))
    assert first.shape == (1, 4, 16)
    np.testing.assert_array_equal(first, other)


def test_dropout_of_an_image_hangs_on_its_row_alone():
    shape = VisionConfig(16, 32, 2, 2, 8, 4, dropout=0.5)
    with nnx.use_eager_sharding(False):
        model = VisionEncoder(shape, nnx.Rngs(0))
    pixels, rng = jax.random.normal(jax.random.key(1), (3, 8, 8, 3)), jax.random.key(2)
    dropped = jit(lambda pixels, row: model.features(pixels, rng=rng, row=row))
    first, other = dropped(pixels, jnp.arange(3)), dropped(pixels[::-1], jnp.arange(3)[::-1])
    np.testing.assert_allclose(first, other[::-1], atol=1e-6)
    assert float(jnp.abs(first - dropped(pixels, jnp.arange(3) + 1)).max()) > 0.1


@pytest.mark.parametrize(
    ("shape", "layer"), [((2, 8, 4, 3), -1), ((2, 8, 8, 1), -1), ((8, 8, 3), -1), ((2, 8, 8, 3), 4)]
)
def test_images_of_another_shape_and_layers_that_are_not_there_are_refused(shape, layer):
    with nnx.use_eager_sharding(False):
        model = VisionEncoder(VisionConfig(16, 32, 2, 2, 8, 4), nnx.Rngs(0))
    with pytest.raises(ConfigError, match=r"images of shape|layer 4 of a vision encoder with 2 layers"):
        model.features(jnp.zeros(shape), layer=layer)
