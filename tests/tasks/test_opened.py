"""Models that are no folder on this machine: GGUF files, and names on the hub."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jtrain.checkpoint.gguf.folder import gguf_to_folder
from jtrain.checkpoint.gguf.weights import GgufWeights
from jtrain.config.load import load_config
from jtrain.errors import ConfigError
from jtrain.tasks.opened import open_model
from jtrain.tasks.source import ModelSource
from tests.checkpoint.test_gguf_folder import TOKENS, model_file
from tests.data.hub_server import hub

FIXTURE = Path(__file__).parents[1] / "models" / "families" / "fixtures" / "llama"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def test_a_gguf_file_is_what_its_folder_is(tmp_path):
    model_file(tmp_path / "m.gguf")
    direct, folder = open_model(tmp_path / "m.gguf"), open_model(gguf_to_folder(tmp_path / "m.gguf", tmp_path / "out"))
    assert direct.decoder == folder.decoder and direct.dtype == folder.dtype == "float32"
    assert direct.companions.files == folder.companions.files
    tokenizer = direct.tokenizer()
    assert tokenizer.encode("ab") == [1, TOKENS.index("ab")]
    assert tokenizer.fingerprint == folder.tokenizer().fingerprint
    weights = GgufWeights(tmp_path / "m.gguf")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.entries.keys() == written.keys()
    for name, values in written.items():
        np.testing.assert_array_equal(weights.read(name), values, err_msg=name)


def test_a_run_can_begin_with_a_gguf_file(tmp_path):
    model_file(tmp_path / "m.gguf")
    (tmp_path / "a.yaml").write_text("task: pretrain\nmodel: {path: m.gguf}\nrun_dir: run\n")
    source = ModelSource(load_config(tmp_path / "a.yaml", env={}))
    assert source.decoder.vocab_size == len(TOKENS) and source.config.max_length == 64
    assert source.tokenizer.eos_id == 0


def test_a_name_on_the_hub_is_a_model_where_no_path_has_it(tmp_path, monkeypatch):
    files = {path.name: path.read_bytes() for path in FIXTURE.iterdir()}
    monkeypatch.chdir(tmp_path)
    with hub({"org/tiny": {"main": files}}) as (address, _):
        monkeypatch.setenv("HF_ENDPOINT", address)
        fetched = open_model("org/tiny")
        assert fetched.path.startswith(str(tmp_path / "hub")) and fetched.decoder == open_model(FIXTURE).decoder
        assert (Path(fetched.path) / "model.safetensors").read_bytes() == files["model.safetensors"]
        (tmp_path / "org" / "tiny").mkdir(parents=True)
        with pytest.raises(ConfigError, match=r"holds no config\.json"):
            open_model("org/tiny")  # the folder, though it is empty
