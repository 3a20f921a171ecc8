"""PEFT's adapter folders: names, shapes and numbers of every family's projections, both ways, and what is refused.

Logits against PEFT itself: tests/peers/check_lora.py.
"""

import json
import math

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jtrain import PretrainTrainer
from jtrain.checkpoint import arrays
from jtrain.checkpoint.hf import peft
from jtrain.cli.main import main
from jtrain.errors import CheckpointError, ConfigError
from jtrain.models.families import family
from jtrain.models.lora import Lora
from jtrain.tasks.adapter_export import _modules, read_adapter
from tests.checkpoint.hf.folders import write_folder
from tests.models.families.folders import FIXTURES

RANK = 2
A, B, M = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"


def drawn(name, lora, paths=None):
    """Adapters of random numbers for the decoder of a fixture, and the files that PEFT reads."""
    return of_folder(FIXTURES / name, lora, paths)


def of_folder(folder, lora, paths=None):
    hf = json.loads((folder / "config.json").read_text())
    one = family(hf["model_type"])
    decoder = one.decoder_config(hf)
    shapes, layers, modules = _modules(decoder, one)
    rng, adapters = np.random.default_rng(0), {}
    for path, (shape, inputs) in shapes.items():
        if paths is None or path.rpartition("/")[2] in paths:
            for part, size in (("a", (*shape[:inputs], lora.rank)), ("b", (lora.rank, *shape[inputs:]))):
                adapters[f"{path}/lora_{part}"] = rng.normal(0, 1, (layers[path], *size)).astype(np.float32)
            if lora.dora:
                lengths = rng.normal(1, 0.1, (layers[path], *shape[inputs:])).astype(np.float32)
                adapters[f"{path}/lora_magnitude"] = lengths
    return decoder, one, adapters, peft.adapter_files(lora, adapters, modules, "base"), (shapes, layers, modules)


def written(folder, files):
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def delta(tensors, key, scale):
    return scale * tensors[key + B].astype(np.float64) @ tensors[key + A].astype(np.float64)


def test_a_module_has_pefts_names_and_torchs_shapes(tmp_path):
    lora = Lora(rank=RANK, alpha=6.0, dropout=0.1, dora=True)
    decoder, _, adapters, files, _ = drawn("llama", lora, ["q_proj", "o_proj"])
    tensors = load_file(written(tmp_path / "x", files) / peft.WEIGHTS)
    key = "base_model.model.model.layers.1.self_attn."
    d, h, dh = decoder.hidden_size, decoder.num_attention_heads, decoder.head_size
    assert len(tensors) == decoder.num_hidden_layers * 2 * 3
    np.testing.assert_array_equal(tensors[key + "q_proj" + A], adapters["layers/attention/q_proj/lora_a"][1].T)
    np.testing.assert_array_equal(
        tensors[key + "q_proj" + B], adapters["layers/attention/q_proj/lora_b"][1].reshape(RANK, h * dh).T
    )
    np.testing.assert_array_equal(
        tensors[key + "o_proj" + A], adapters["layers/attention/o_proj/lora_a"][1].reshape(h * dh, RANK).T
    )
    assert tensors[key + "o_proj" + B].shape == (d, RANK)
    np.testing.assert_array_equal(
        tensors[key + "q_proj" + M], adapters["layers/attention/q_proj/lora_magnitude"][1].ravel()
    )
    config = json.loads(files[peft.CONFIG])
    wanted = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 6.0,
        "use_dora": True,
        "target_modules": ["o_proj", "q_proj"],
    }
    assert wanted.items() <= config.items()


@pytest.mark.parametrize("name", ["phi3-short", "gpt-neox", "gpt2", "deepseek-v3", "qwen3-moe"])
@pytest.mark.parametrize("rslora", [False, True])
def test_every_familys_change_of_a_weight_is_the_one_that_the_adapter_makes(name, rslora, tmp_path):
    """The key map's own `join` of scale A B is scale' B' A' on disk: also where q, k and v are one tensor."""
    lora = Lora(rank=RANK, alpha=6.0, rslora=rslora)
    decoder, one, adapters, files, (shapes, *_) = drawn(name, lora)
    folder = peft.AdapterFolder(written(tmp_path / "x", files))
    checked = 0
    for tensor in one.tensors(decoder):
        paths = [slot.path.removesuffix("/kernel") for slot in tensor.slots]
        if not all(path in shapes for path in paths):
            continue
        parts = []
        for path, slot in zip(paths, tensor.slots, strict=True):
            shape, inputs = shapes[path]
            a, b = (adapters[f"{path}/lora_{part}"][slot.index].astype(np.float64) for part in "ab")
            parts.append((lora.scale * a.reshape(-1, RANK) @ b.reshape(RANK, -1)).reshape(shape))
            assert math.prod(shape[:inputs]) == a.size // RANK
        want = tensor.join(tuple(parts))
        module = tensor.key.removesuffix(".weight")
        rank = folder.tensors["base_model.model." + module + A].shape[0]
        got = delta(folder.tensors, "base_model.model." + module, folder._scale(module, rank))
        conv1d = name == "gpt2"
        np.testing.assert_allclose(got.T if conv1d else got, want, rtol=1e-6, atol=1e-6)
        checked += 1
    assert checked == len([key for key in folder.tensors if key.endswith(A)])
    assert folder.config["fan_in_fan_out"] == (name == "gpt2")


def test_what_is_read_makes_the_same_change_and_lesser_ranks_are_filled_up(tmp_path):
    """Modules with a rank and alpha of their own, as PEFT writes them with rank_pattern and alpha_pattern."""
    lora = Lora(rank=RANK, alpha=6.0)
    decoder, one, _, files, _ = drawn("llama", lora, ["q_proj", "up_proj"])
    config = json.loads(files[peft.CONFIG]) | {
        "r": 5,
        "lora_alpha": 10,
        "rank_pattern": {"q_proj": RANK},
        "alpha_pattern": {".*q_proj": 6.0, "q_proj": 9.0},  # regular expressions; the first one counts
    }
    tensors = load_file(written(tmp_path / "x", files) / peft.WEIGHTS)
    rng = np.random.default_rng(1)
    for key in [key for key in tensors if "up_proj" in key]:
        tensors[key] = rng.normal(
            0, 1, (5, tensors[key].shape[1]) if key.endswith(A) else (tensors[key].shape[0], 5)
        ).astype(np.float32)
    from safetensors.numpy import save

    written(tmp_path / "x", {peft.CONFIG: json.dumps(config).encode(), peft.WEIGHTS: save(tensors)})
    got, read = read_adapter(str(tmp_path / "x"), decoder, one)
    assert (got.rank, got.alpha, got.targets) == (5, 10.0, ("layers/attention/q_proj", "layers/mlp/up_proj"))
    a, b = (read[f"layers/attention/q_proj/lora_{part}"][1].astype(np.float64) for part in "ab")
    assert not np.any(a[:, RANK:]) and not np.any(b[RANK:])
    key = "base_model.model.model.layers.1."
    want = delta(tensors, key + "self_attn.q_proj", 6.0 / RANK)
    np.testing.assert_allclose(got.scale * (a @ b.reshape(5, -1)).T, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(read["layers/mlp/up_proj/lora_a"][1].T, tensors[key + "mlp.up_proj" + A])


def test_adapters_of_some_projections_of_a_fused_module_can_not_be_dora():
    with pytest.raises(ConfigError, match=r"qkv_proj of this family holds layers/attention/k_proj"):
        drawn("phi3-short", Lora(rank=RANK, dora=True), ["q_proj"])


@pytest.mark.parametrize("change, error, words", [
    ({"bias": "all"}, ConfigError, ["bias: 'all'", "merge_and_unload"]),
    ({"peft_type": "IA3"}, ConfigError, ["peft_type: 'IA3'"]),
    ({"r": 0}, ConfigError, ["r: 0"]),
    ({"lora_alpha": None}, ConfigError, ["lora_alpha: None"]),
    ({"alpha_pattern": {"(": 1}}, ConfigError, ["alpha_pattern"]),
    ({"modules_to_save": ["lm_head"]}, ConfigError, ["modules_to_save"]),
    ("no weights", ConfigError, ["only a pickle", "safe_serialization=True"]),
    ("no config", ConfigError, ["holds no adapter_config.json"]),
    ("torn", CheckpointError, ["adapter_model.safetensors is damaged"]),
    ("other model", CheckpointError, ["are not those of"]),
    ("other modules", CheckpointError, ["of no projection of this model", "lm_head"]),
], ids=str)  # fmt: skip
def test_what_is_no_adapter_of_this_model_is_refused(change, error, words, tmp_path):
    decoder, one, _, files, _ = drawn("llama", Lora(rank=RANK), ["q_proj"])
    folder = written(tmp_path / "x", files)
    if isinstance(change, dict):
        (folder / peft.CONFIG).write_text(json.dumps(json.loads(files[peft.CONFIG]) | change))
    elif change == "no weights":
        (folder / peft.WEIGHTS).rename(folder / "adapter_model.bin")
    elif change == "no config":
        (folder / peft.CONFIG).unlink()
    elif change == "torn":
        (folder / peft.WEIGHTS).write_bytes(files[peft.WEIGHTS][:200])
    elif change == "other model":
        decoder = decoder.replace(hidden_size=decoder.hidden_size * 2)
    else:
        data = files[peft.WEIGHTS].replace(b"layers.1.self_attn.q_proj.lora_A", b"layers.1.lm_head.xxxxxxxx.lora_A")
        (folder / peft.WEIGHTS).write_bytes(data)
    with pytest.raises(error) as caught:
        read_adapter(str(folder), decoder, one)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_run_begins_with_an_adapter_folder_and_writes_it_back(tmp_path, capsys):
    """model.lora.path: settings and numbers are the folder's; of a run's checkpoint --lora adapter makes them again."""
    base, lora = tmp_path / "base", Lora(rank=RANK, alpha=6.0, dora=True)
    write_folder(base)
    adapters, files, _ = of_folder(base, lora, ["q_proj", "down_proj"])[2:]
    folder = written(tmp_path / "adapter", files)
    config = {
        "run_dir": str(tmp_path / "run"), "max_steps": 1, "max_length": 16, "global_batch_size": 2,
        "precision": "32-true", "accelerator": "cpu", "devices": 1, "compile_cache": "",
        "model": {"path": str(base), "lora": {"path": str(folder)}},
        "optimizer": {"learning_rate": 0.0, "weight_decay": 0.0}, "checkpoint": {"best": None},
        "logging": {"trackers": []}, "xla_options": {"xla_backend_optimization_level": 0},
    }  # fmt: skip
    texts = [{"text": "ab" * 20}] * 4
    with pytest.raises(ConfigError, match=r"model\.lora\.rank: 4, and the adapter at model\.lora\.path has 2"):
        other = {"path": str(base), "lora": {"path": str(folder), "rank": 4}}
        PretrainTrainer(config | {"model": other}, train_dataset=texts)
    trainer = PretrainTrainer(config, train_dataset=texts)
    assert trainer.config.model.lora.alpha == 6.0
    trainer.fit()
    state = arrays.flatten(jax.device_get(trainer.state.params))
    for path, array in adapters.items():
        np.testing.assert_array_equal(state[path], array)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--lora", "adapter"]) == 0
    assert load_file(tmp_path / "out" / peft.WEIGHTS).keys() == load_file(folder / peft.WEIGHTS).keys()
    for name, tensor in load_file(tmp_path / "out" / peft.WEIGHTS).items():
        np.testing.assert_array_equal(tensor, load_file(folder / peft.WEIGHTS)[name])
    assert json.loads((tmp_path / "out" / peft.CONFIG).read_text())["base_model_name_or_path"] == "base"
    assert main(["export", str(base), str(tmp_path / "no"), "--lora", "adapter"]) == 64
    assert "has no adapters" in capsys.readouterr().err
