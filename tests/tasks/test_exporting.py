"""Models in and out: the same logits on every mesh, the same bytes from every mesh, and what stops an export."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jtrain import load_model
from jtrain.checkpoint.hf.companions import Companions
from jtrain.data.tokenizers import ByteTokenizer, load_tokenizer
from jtrain.errors import CheckpointError, ConfigError, DataError, StorageError
from jtrain.models.presets import PRESETS, preset
from jtrain.tasks import exporting, importing
from jtrain.tasks.companion_files import config_json, with_tokenizer
from jtrain.tasks.exporting import export, shard_size
from jtrain.tasks.importing import import_model
from jtrain.tasks.opened import decoder_of
from tests.checkpoint.hf.folders import write_folder

TRANSFORMERS = Path(__file__).parents[1] / "models" / "families" / "fixtures" / "llama-tied"
MESHES = (None, "fsdp=2,tensor=2", "pipeline=2")


@pytest.fixture(scope="module")
def loaded():
    return {mesh: load_model(TRANSFORMERS, mesh=mesh) for mesh in MESHES}


@pytest.mark.parametrize("mesh", MESHES)
def test_logits_are_those_of_transformers_on_every_mesh(loaded, mesh):
    oracle = load_file(TRANSFORMERS / "oracle.safetensors")
    logits = loaded[mesh](oracle["input_ids"], oracle["attention_mask"])
    live = oracle["attention_mask"].astype(bool)
    assert logits.dtype == np.float32 and logits.shape == oracle["logits"].shape
    largest = np.abs(np.asarray(logits) - oracle["logits"])[live].max()
    assert largest < 2e-4 * np.ptp(oracle["logits"][live])


def test_every_mesh_writes_the_same_bytes_and_they_are_those_that_were_read(loaded, tmp_path, monkeypatch):
    written = {}
    for number, mesh in enumerate(MESHES):
        if number:  # the first export is compared for good, the others compile nothing
            monkeypatch.setattr(exporting, "_compare", lambda *_: (0.0, 1.0))
        done = export(loaded[mesh], tmp_path / str(number))
        assert done.difference == 0.0
        written[mesh] = {path.name: path.read_bytes() for path in (tmp_path / str(number)).iterdir()}
    assert written[None] == written["fsdp=2,tensor=2"] == written["pipeline=2"]
    before, after = load_file(TRANSFORMERS / "model.safetensors"), load_file(tmp_path / "0" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def test_a_narrower_type_is_written_in_shards_and_its_difference_is_told(loaded, tmp_path):
    done = export(loaded[None], tmp_path / "out", dtype="bfloat16", max_shard_size="10KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert done.files == len(files) > 2 and index["metadata"]["total_size"] == done.size
    assert all((tmp_path / "out" / file).stat().st_size < 12_000 for file in files)
    before = load_file(TRANSFORMERS / "model.safetensors")
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(load_file(tmp_path / "out" / file)[name], before[name].astype(ml_dtypes.bfloat16))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert 0 < done.difference < 0.1 * done.scale
    narrow = load_model(tmp_path / "out", dtype="bfloat16")
    assert narrow.params["embed_tokens"]["embedding"].dtype == ml_dtypes.bfloat16


def test_what_is_read_again_with_other_logits_is_refused_and_nothing_is_left(loaded, tmp_path, monkeypatch):
    def spoiled(*arguments):
        array = tensor_of(*arguments)
        return array[::-1].copy() if arguments[0].key.endswith("o_proj.weight") else array

    tensor_of = exporting.tensor_of
    monkeypatch.setattr(exporting, "tensor_of", spoiled)
    with pytest.raises(CheckpointError, match="other logits when it is read again"):
        export(loaded[None], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_gets_full_leaves_nothing(loaded, tmp_path, monkeypatch):
    def full(name):
        if name.endswith("layers.1.mlp.up_proj.weight"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return read(name)

    tensors = {t.key: t for t in tensors_of(loaded[None])}
    read = exporting._reader(loaded[None].params, loaded[None].variables, tensors, "float32")
    monkeypatch.setattr(exporting, "_reader", lambda *_: full)
    with pytest.raises(StorageError, match="No space left on device"):
        export(loaded[None], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def tensors_of(model):
    return exporting.family_for(model.decoder, model.source).tensors(model.decoder)


def test_room_is_looked_for_before_a_byte_is_written(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr("jtrain.checkpoint.staging.free_bytes", lambda path: 1000)
    with pytest.raises(StorageError, match="1,000 are free"):
        export(loaded[None], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_in_it_is_not_written_over(loaded, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    for name, word in (("full", "is not empty"), ("file", "is a file")):
        with pytest.raises(ConfigError, match=word):
            export(loaded[None], tmp_path / name)
    assert (tmp_path / "full" / "mine.txt").read_text() == (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dtype": "float8"}, "dtype='float8'"),
        ({"max_shard_size": "5 apples"}, "5 apples"),
        ({"max_shard_size": 0}, "0"),
    ],
)
def test_arguments_that_can_not_be_are_refused(loaded, tmp_path, changes, word):
    with pytest.raises(ConfigError, match=word):
        export(loaded[None], tmp_path / "out", **changes)


def test_sizes_are_read_as_people_write_them():
    assert [shard_size(text) for text in ("5GB", "500 mb", "2GiB", 1000, "1.5KB")] == [
        5 * 10**9, 500 * 10**6, 2 * 2**30, 1000, 1500,
    ]  # fmt: skip


def test_numbers_beyond_float16_are_refused(tmp_path, loaded):
    params = {**loaded[None].params, "final_norm": {"scale": loaded[None].params["final_norm"]["scale"] * 1e6}}
    with pytest.raises(CheckpointError, match=r"model.norm.weight .*float16"):
        export(loaded[None].with_weights(params, {}), tmp_path / "out", dtype="float16")


def test_arguments_of_a_call_are_looked_at(loaded):
    model = loaded[None]
    for arguments, word in (
        (([1, 2],), "give integers"),
        (([[0.5]],), "give integers"),
        (([[1, 96]],), "the token 96, and the model has 96"),
        (([[-1, 3]],), "the token -1"),
        (([[1, 2]], [[1]]), "attention_mask has the shape"),
    ):
        with pytest.raises(DataError, match=word):
            model(*arguments)


def test_the_byte_tokenizer_is_exported_as_one_with_the_same_ids(tmp_path):
    """All kinds of UTF-8: one to four bytes, controls, and the names of its own special tokens as text."""
    for name, data in with_tokenizer(Companions(), ByteTokenizer(), 64).files.items():
        (tmp_path / name).write_bytes(data)
    theirs, ours = load_tokenizer(str(tmp_path)), ByteTokenizer()
    assert (theirs.eos_id, theirs.bos_id, theirs.pad_id) == (ours.eos_id, ours.bos_id, ours.pad_id)
    assert theirs.vocab_size == ours.vocab_size
    texts = ["plain text", "  two  spaces\n\t\r\0\x7f", "naïve Ωμέγα 東京 🙂", "".join(map(chr, range(1, 500))), ""]
    assert theirs.encode_batch(texts) == ours.encode_batch(texts)
    assert [theirs.decode(ids) for ids in ours.encode_batch(texts)] == texts


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_says_what_it_is_in_the_words_of_hugging_face(name):
    shape = preset(name)
    config = config_json(shape, Companions(), ByteTokenizer())
    assert config["eos_token_id"] == 256
    again = decoder_of(Companions(config), "here")[1]
    assert config_json(again, Companions(config), None) == {**config}


def test_an_import_is_loaded_and_begun_with(tmp_path, monkeypatch):
    write_folder(tmp_path / "hf", dtype="bfloat16")
    done = import_model(tmp_path / "hf", tmp_path / "out", mesh="fsdp=2")
    assert done.model_type == "llama" and done.dtype == "float32"
    ours, theirs = load_model(tmp_path / "out"), load_model(tmp_path / "hf")
    for path in ("embed_tokens", "final_norm", "lm_head"):
        for name, leaf in theirs.params[path].items():
            np.testing.assert_array_equal(ours.params[path][name], leaf)
    assert ours.decoder == theirs.decoder and ours.tokenizer.fingerprint == theirs.tokenizer.fingerprint
    with pytest.raises(ConfigError, match="is not empty"):
        import_model(tmp_path / "hf", tmp_path / "out")

    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(importing, "save", fails)
    with pytest.raises(StorageError):
        import_model(tmp_path / "hf", tmp_path / "full")
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "out"}


def test_a_preset_is_a_model_with_random_weights_and_no_steps():
    with pytest.raises(ConfigError, match="llama-tiny is a preset: it has no steps"):
        load_model("llama-tiny", step=3)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"mesh": "tensor=3"}, "mesh.tensor=3"),
        ({"mesh": "tensor=16"}, "needs 16 devices"),
        ({"mesh": "tenser=2"}, "tensor"),
        ({"step": 3}, "it has no steps"),
    ],
)
def test_what_can_not_be_loaded_so_is_said_at_once(arguments, word):
    with pytest.raises(ConfigError, match=word):
        load_model(TRANSFORMERS, **arguments)


def test_a_correction_bias_keeps_its_float32_in_every_export(tmp_path):
    """transformers keeps it in float32 as well; rounded to bfloat16, near ones would choose other experts."""
    model = load_model(TRANSFORMERS.parent / "deepseek-v3")
    shape = model.variables["router_bias"].shape
    bias = (14.6 + 0.003 * np.random.default_rng(0).normal(size=shape)).astype(np.float32)
    done = export(
        model.with_weights(
            model.params,
            model.variables | {"router_bias": jax.device_put(bias, model.variables["router_bias"].sharding)},
        ),
        tmp_path / "out",
        dtype="bfloat16",
    )
    written = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.{}.mlp.gate.e_score_correction_bias"
    np.testing.assert_array_equal(np.stack([written[name.format(1)], written[name.format(2)]]), bias)
    assert written["model.norm.weight"].dtype == ml_dtypes.bfloat16 and done.size == sum(
        x.nbytes for x in written.values()
    )


def test_another_tokenizer_brings_its_own_ends():
    """The model's generation settings stay, its token ids do not."""
    files = {"generation_config.json": json.dumps({"eos_token_id": [97], "temperature": 0.6}).encode()}
    before = Companions({"model_type": "llama", "eos_token_id": 97, "bos_token_id": 3}, files)
    after = with_tokenizer(before, ByteTokenizer(), 64)
    settings = after.json("generation_config.json")
    assert settings == {"temperature": 0.6, "bos_token_id": 257, "eos_token_id": 256, "pad_token_id": 258}
    assert config_json(preset("llama-tiny"), after, ByteTokenizer())["eos_token_id"] == 256
