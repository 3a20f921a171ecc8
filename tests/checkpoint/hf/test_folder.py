"""What is refused of a Hugging Face folder before a number is read, and what is said of it."""

from __future__ import annotations

import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jtrain.checkpoint.hf.companions import portable
from jtrain.checkpoint.hf.folder import HfFolder
from jtrain.checkpoint.hf.weights import match
from jtrain.errors import CheckpointError, ConfigError
from jtrain.models.families import family
from tests.checkpoint.hf.folders import TEMPLATE, write_folder, write_weights

INDEX = "model.safetensors.index.json"


@pytest.fixture
def whole(tmp_path):
    return tmp_path / "one", write_folder(tmp_path / "one", template=True)


@pytest.fixture
def sharded(tmp_path):
    return tmp_path / "three", write_folder(tmp_path / "three", shards=3)


def matched(path):
    folder = HfFolder(path)
    llama = family("llama")
    shape = llama.decoder_config(dict(folder.companions.config))
    return match(folder, llama.tensors(shape), rename=llama.rename, ignores=lambda key: llama.ignores(key, shape))


def refused(path, error, *words):
    with pytest.raises(error) as caught:
        matched(path)
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))
    assert caught.value.remedy


def change_index(path, **changes):
    index = json.loads((path / INDEX).read_text())
    for name, file in changes.items():
        index["weight_map"][name.replace("__", ".")] = file
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_is_read_as_the_library_wrote_it(tmp_path, dtype, shards):
    tensors = write_folder(tmp_path, shards=shards, dtype=dtype)
    folder = HfFolder(tmp_path)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    assert set(folder.entries) == set(tensors)
    for name, tensor in tensors.items():
        read = folder.read(name)
        assert read.dtype == kind
        np.testing.assert_array_equal(read, tensor.astype(kind))


def test_the_small_files_are_carried_unchanged(whole):
    path, _ = whole
    companions = HfFolder(path).companions
    assert companions.config["custom_key_of_somebody"] == 7
    assert companions.files["chat_template.jinja"] == TEMPLATE.encode()
    assert companions.json("generation_config.json") == {"eos_token_id": [256, 258], "temperature": 0.6}
    assert companions.files["tokenizer.json"] == (path / "tokenizer.json").read_bytes()


def test_missing_and_unused_tensors_are_one_error_that_lists_them_all(whole):
    path, tensors = whole
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.extra.weight"] = tensors["model.layers.0.mlp.gate.weight"] = np.zeros(3, np.float32)
    write_weights(path, tensors)
    names = ("model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.extra.weight", "mlp.gate.weight")
    refused(path, CheckpointError, "missing (2)", "there, and not used (2)", *names)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("lm_head.weight"), ("tie_word_embeddings: true",)),
        (lambda t: t.update({n.replace(".1.", ".2."): x for n, x in t.items() if ".1." in n}), ("3 layers", "says 2")),
        (lambda t: [t.pop(n) for n in list(t) if "layers.1" in n], ("a shard may not have been downloaded",)),
        (lambda t: t.update({"base_model.model.q_proj.lora_A.weight": t["model.norm.weight"]}), ("PEFT adapter",)),
        (lambda t: t.update({"model.layers.0.mlp.up_proj.qweight": t["model.norm.weight"]}), ("quantised",)),
    ],
)
def test_the_likely_cause_is_named(whole, change, words):
    path, tensors = whole
    change(tensors)
    write_weights(path, tensors)
    refused(path, CheckpointError, *words)


def test_buffers_and_the_copy_of_a_tied_table_are_no_surplus(tmp_path):
    tensors = write_folder(tmp_path, tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)
    write_weights(tmp_path, tensors)
    names = [pair.name for pair in matched(tmp_path)]
    assert "lm_head.weight" not in names and len(names) == len(tensors) - 2


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("model.layers.0.mlp.up_proj.weight", (16, 24), ("[16, 24]", "[24, 16]", "transposed")),
        ("model.embed_tokens.weight", (265, 16), ("[265, 16]", "[264, 16]", "vocab_size: 264")),
        ("model.norm.weight", (16, 1), ("[16, 1]", "[16]", "another kind of model")),
    ],
)
def test_a_wrong_shape_names_the_tensor_both_shapes_and_the_cause(whole, name, shape, words):
    path, tensors = whole
    tensors[name] = np.zeros(shape, np.float32)
    write_weights(path, tensors)
    refused(path, CheckpointError, name, *words)


@pytest.mark.parametrize(("dtype", "word"), [(ml_dtypes.float8_e4m3fn, "F8_E4M3"), (np.int8, "I8")])
def test_types_that_are_not_read_are_refused_with_the_tensor(whole, dtype, word):
    path, tensors = whole
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(dtype)
    save_file(tensors, path / "model.safetensors")
    refused(path, CheckpointError, "model.norm.weight", word, "bfloat16")


def test_quantised_models_are_refused(whole):
    path, _ = whole
    config = json.loads((path / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(config))
    refused(path, CheckpointError, "quantization_config", "mxfp4")


@pytest.mark.parametrize("left", [0, 5, 100, -1])
def test_a_shard_that_is_cut_off_is_named(sharded, left):
    path, _ = sharded
    shard = path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:left])
    refused(path, CheckpointError, shard.name, "cut off", f"{shard.stat().st_size:,} bytes")


@pytest.mark.parametrize(
    ("limit", "value", "word"),
    [
        ("tensor_file.MAX_HEADER_BYTES", 100, "at most 100 are read"),
        ("tensor_file.MAX_TENSORS", 1, "tensors; at most 1 are read"),
        ("folder.MAX_JSON_BYTES", 10, "at most 10"),
    ],
)
def test_what_is_too_large_is_refused_before_it_is_parsed(whole, limit, value, word, monkeypatch):
    monkeypatch.setattr(f"jtrain.checkpoint.hf.{limit}", value)
    refused(whole[0], CheckpointError, word)


@pytest.mark.parametrize("length", [2**63, 10**9, 99_999_999])
def test_a_header_that_claims_more_than_the_file_has_is_refused(sharded, length):
    path, _ = sharded
    shard = path / "model-00002-of-00003.safetensors"
    shard.write_bytes(length.to_bytes(8, "little") + shard.read_bytes()[8:])
    refused(path, CheckpointError, shard.name, f"{length:,} bytes")


def test_a_shard_that_is_missing_is_named(sharded):
    path, tensors = sharded
    (path / "model-00003-of-00003.safetensors").unlink()
    refused(path, CheckpointError, "model-00003-of-00003.safetensors is missing", f"of {len(tensors)} tensors")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors"])
def test_an_index_can_not_name_a_file_outside(sharded, name):
    path, tensors = sharded
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, path.parent / "secret.safetensors")
    change_index(path, model__norm__weight=name)
    refused(path, CheckpointError, name, "outside of the folder")


@pytest.mark.parametrize("file", ["model-00002-of-00003.safetensors", "config.json", "tokenizer.json"])
def test_links_out_of_the_folder_are_not_followed_but_for_the_cache_of_the_hub(sharded, file, tmp_path):
    path, _ = sharded
    (tmp_path / "elsewhere").mkdir()
    shutil.move(path / file, tmp_path / "elsewhere" / file)
    (path / file).symlink_to(tmp_path / "elsewhere" / file)
    refused(path, CheckpointError, file, "outside of the folder")

    snapshot, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in os.listdir(path):
        shutil.copy(path / name, blobs / f"blob-{name}")
        (snapshot / name).symlink_to(f"../../blobs/blob-{name}")
    assert matched(snapshot)


def test_an_index_that_does_not_fit_the_shards_is_one_error(sharded):
    path, tensors = sharded
    change_index(path, model__ghost__weight="model-00001-of-00003.safetensors")
    first = path / "model-00001-of-00003.safetensors"
    save_file(load_file(first) | {"model.stray.weight": tensors["model.norm.weight"]}, first)
    words = ("in the index only (1): model.ghost.weight", "in a shard only (1): model.stray.weight")
    refused(path, CheckpointError, *words)


def test_an_index_that_names_the_wrong_shard_is_refused(sharded):
    path, _ = sharded
    index = json.loads((path / INDEX).read_text())["weight_map"]
    other = next(file for file in sorted(set(index.values())) if file != index["model.norm.weight"])
    change_index(path, model__norm__weight=other)
    refused(path, CheckpointError, "in another shard (1): model.norm.weight")


@pytest.mark.parametrize(
    ("content", "word"),
    [("{", "not JSON"), ("[1]", "a JSON list"), ('{"weight_map": {}}', "no weight_map"), ("\xff", "not JSON")],
)
def test_an_index_that_is_none_is_refused(sharded, content, word):
    path, _ = sharded
    (path / INDEX).write_bytes(content.encode("latin-1"))
    refused(path, CheckpointError, INDEX, word)


def test_pickles_are_refused_with_the_way_to_convert_them(whole):
    path, _ = whole
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refused(path, CheckpointError, "pytorch_model.bin", "pickle", "safe_serialization=True")


def test_other_folders_are_answered_with_what_is_there(whole, tmp_path):
    path, _ = whole
    refused(tmp_path / "nowhere", ConfigError, "does not exist")
    refused(path / "config.json", ConfigError, "is a file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", ConfigError, "no config.json", "no files")
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    refused(tmp_path / "empty", ConfigError, "PEFT adapter")
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    refused(path, CheckpointError, "model-00001-of-00002.safetensors", INDEX)
    (path / "model-00001-of-00002.safetensors").unlink()
    refused(path, CheckpointError, "holds no weights")
    (path / "config.json").write_text("{'a': 1}")
    refused(path, CheckpointError, "config.json is not JSON")


def test_files_leave_the_machine_without_its_places():
    settings = {
        "name_or_path": "/home/me/secret-project/llama",
        "tokenizer_file": "~/x/tokenizer.json",
        "model_max_length": 8,
        "eos_token": "/s",
        "base": {"_name_or_path": "meta-llama/Llama-3"},
    }
    files = {"tokenizer_config.json": json.dumps(settings).encode(), "tokenizer.json": b'{"file": "/a/b"}'}
    made = portable(files)
    assert json.loads(made["tokenizer_config.json"]) == settings | {
        "name_or_path": "llama",
        "tokenizer_file": "tokenizer.json",
    }
    assert made["tokenizer.json"] == files["tokenizer.json"]
    untouched = {"tokenizer_config.json": b'{"a":1}', "generation_config.json": b"not JSON"}
    assert portable(untouched) == untouched
