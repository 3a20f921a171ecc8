"""The hub's client against a server on this machine."""

import re
import socket
from pathlib import Path

import pytest

from jtrain.data.files import find_files
from jtrain.data.hub import hub_dataset_files, hub_folder
from jtrain.errors import ConfigError, DataError
from tests.data.hub_server import hub

pytest.importorskip("huggingface_hub")

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model-00001-of-00002.safetensors": b"1",
    "model-00002-of-00002.safetensors": b"2",
    "model.safetensors.index.json": b"{}",
    "tokenizer.json": b"{}",
    "additional_chat_templates/tool_use.jinja": b"t",
    "pytorch_model.bin": b"pickle",
    "modeling_own.py": b"import os",
    "original/consolidated.safetensors": b"again",
    "README.md": b"#",
}
MODELS = {
    "org/name": {"main": FILES, "v1": {"config.json": b"old", "model.safetensors": b"0"}},
    "org/shut": {"main": {}},
}
PART = "-of-00002.parquet"
DATASETS = {
    "org/two": {
        "main": {f"data/train-00000{PART}": b"a", f"data/train-00001{PART}": b"b", "data/test-0.parquet": b"c"}
    },
    "org/plain": {"main": {"all.jsonl": b"x\n", "README.md": b""}},
    "org/script": {
        "main": {"script.py": b"", "README.md": b""},
        "refs/convert/parquet": {"default/train/0000.parquet": b"p", "default/test/0000.parquet": b"q"},
    },
    "org/many": {"main": {"one/train/0.parquet": b"1", "two/train/0.parquet": b"2"}},
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.fixture(scope="module")
def server():
    with hub(MODELS, DATASETS, gated=("org/shut",)) as (address, asked):
        yield address, asked


@pytest.fixture
def asked(server, monkeypatch):
    address, asked = server
    monkeypatch.setenv("HF_ENDPOINT", address)
    asked.clear()
    return asked


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_model_comes_without_code_pickles_and_copies(asked):
    folder = hub_folder("org/name")
    left_out = {"pytorch_model.bin", "modeling_own.py", "original/consolidated.safetensors", "README.md"}
    assert names(folder) == FILES.keys() - left_out
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == b"2"
    assert not [path for path in asked if any(name in path for name in left_out)]


def test_a_revision_is_its_own(asked):
    assert (hub_folder("org/name@v1") / "config.json").read_bytes() == b"old"
    assert (hub_folder("org/name@main") / "config.json").read_bytes() == FILES["config.json"]


def test_what_is_there_is_enough_without_the_hub(asked, monkeypatch):
    first = hub_folder("org/name")
    asked.clear()
    assert hub_folder("org/name") == first
    assert not [path for path in asked if "resolve" in path]
    with socket.socket() as taken:  # a port where nobody answers
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert hub_folder("org/name") == first
        with pytest.raises(ConfigError, match=r"can't be (reached|fetched)") as error:
            hub_folder("org/other")
        assert "path of a copy" in error.value.remedy or "HF_ENDPOINT" in error.value.remedy
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub_folder("org/name") == first
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        hub_folder("org/other")


@pytest.mark.parametrize(
    ("spec", "message", "remedy"),
    [
        ("org/gone", "no such repository", r"\./"),
        ("org/name@v9", "no such revision", "branch, tag or commit"),
        ("org/shut", "is gated", "HF_TOKEN"),
        ("name", "no name of a model", "org/name"),
        ("a/b/c", "no name of a model", "org/name"),
        ("../etc", "no name of a model|can't", "org/name"),
    ],
)
def test_what_cannot_be_had_is_named_with_a_remedy(asked, spec, message, remedy):
    with pytest.raises(ConfigError, match=message) as error:
        hub_folder(spec)
    assert spec in str(error.value)
    assert re.search(remedy, error.value.remedy)


def test_a_split_of_a_dataset_is_its_files_in_order(asked):
    def contents(spec):
        return [Path(path).read_bytes() for path in find_files(spec, field="data.train")]

    assert contents("hf:org/two") == contents("hf:org/two:train") == [b"a", b"b"]
    assert contents("hf:org/two@main:test") == [b"c"]
    assert contents("hf:org/plain") == [b"x\n"]
    assert contents("hf:org/script:test") == [b"q"]  # the hub's own Parquet copy
    assert contents("hf:org/many/two") == [b"2"]


def test_a_dataset_is_enough_without_the_hub(asked, monkeypatch):
    first = hub_dataset_files("hf:org/two:train")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub_dataset_files("hf:org/two:train") == first
    Path(first[0]).unlink()
    with pytest.raises(DataError, match="1 of 2 files"):
        hub_dataset_files("hf:org/two:train")
    with pytest.raises(DataError, match="not on this machine"):
        hub_dataset_files("hf:org/plain")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hf:org/gone", "no such repository"),
        ("hf:org/two:validation", "no data file of the split validation; there are: data/test"),
        ("hf:org/many", "several folders: one, two"),
        ("hf:name", "no name of a dataset"),
    ],
)
def test_what_is_no_data_is_a_data_error(asked, spec, message):
    with pytest.raises(DataError, match=message) as error:
        find_files(spec, field="data.train")
    assert error.value.remedy and spec in str(error.value)
