"""Models that are no folder on this machine: GGUF files, and names on the hub."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jtrain.checkpoint.gguf.folder import gguf_to_folder
from jtrain.config.load import load_config
from jtrain.errors import ConfigError
from jtrain.tasks.loading import load_model
from jtrain.tasks.opened import open_model
from jtrain.tasks.source import ModelSource
from tests.checkpoint.test_gguf_folder import TOKENS, model_file
from tests.data.hub_server import hub

FIXTURE = Path(__file__).parents[1] / "models" / "families" / "fixtures" / "llama"


def leaves(model):
    return {
        jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(model.params)
    }


def assert_equal(first, second):
    first, second = leaves(first), leaves(second)
    assert first.keys() == second.keys()
    for name, values in first.items():
        np.testing.assert_array_equal(values, second[name], err_msg=name)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def test_a_gguf_file_is_a_model_with_its_tokenizer(tmp_path):
    model_file(tmp_path / "m.gguf")
    direct = load_model(tmp_path / "m.gguf")
    assert direct.tokenizer.encode("ab") == [1, TOKENS.index("ab")]
    assert direct.source.files.keys() == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    folder = load_model(gguf_to_folder(tmp_path / "m.gguf", tmp_path / "folder"))
    assert_equal(direct, folder)
    assert folder.tokenizer.fingerprint == direct.tokenizer.fingerprint


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
        assert_equal(load_model("org/tiny"), load_model(FIXTURE))
        (tmp_path / "org" / "tiny").mkdir(parents=True)
        with pytest.raises(ConfigError, match=r"holds no config\.json"):
            open_model("org/tiny")  # the folder, though it is empty
