"""`jtrain import` and `jtrain export`: exit codes and the one message of what is wrong, without a traceback."""

from __future__ import annotations

import json
import sys

import pytest

from jtrain.cli.main import main
from tests.checkpoint.hf.folders import write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_folder(path)
    return path


def run(capsys, *args):
    code = main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


def test_a_folder_goes_in_and_out_with_its_logits_compared(folder, tmp_path, capsys):
    code, out, _ = run(capsys, "import", folder, tmp_path / "ours")
    assert code == 0 and "imported" in out and "llama" in out
    code, out, _ = run(capsys, "export", tmp_path / "ours", tmp_path / "back", "--max-shard-size=20KB")
    assert code == 0 and "largest difference 0 " in out and "3 files" in out
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "float32"

    code, _, err = run(capsys, "train", write_yaml(tmp_path / "run.yaml", "ours"))
    assert code == 64 and "is what jtrain import made" in err and "model.path" in err


def write_yaml(path, run_dir):
    text = path.parent / "text.txt"
    text.write_text("some words " * 50)
    path.write_text(f"run_dir: {run_dir}\naccelerator: cpu\ndevices: 1\ndata: {{train: {text}}}\n")
    return path


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["import"], 64, ("HF_DIR is missing", "usage: jtrain import")),
        (["import", "{folder}"], 64, ("OUT is missing",)),
        (["import", "{folder}", "{tmp}/a", "{tmp}/b"], 64, ("one argument too many",)),
        (["import", "{folder}", "{tmp}/a", "--dtipe", "float32"], 64, ("Did you mean --dtype?",)),
        (["import", "{folder}", "{tmp}/a", "--dtype"], 64, ("--dtype has no value",)),
        (["import", "{folder}", "{tmp}/a", "--dtype", "int4"], 64, ("int4", "bfloat16")),
        (["import", "{folder}", "{folder}"], 64, ("is not empty",)),
        (["import", "{tmp}/nowhere", "{tmp}/a"], 64, ("does not exist",)),
        (["import", "{folder}/config.json", "{tmp}/a"], 64, ("is a file",)),
        (["import", "", "{tmp}/a"], 64, ("empty",)),
        (["import", "gs://bucket/model", "{tmp}/a"], 64, ("gs://bucket/model",)),
        (["export", "{tmp}", "{tmp}/a"], 64, ("no config.json",)),
        (["export", "{folder}", "{tmp}/a", "--step", "two"], 64, ("'two' is not a whole number",)),
        (["export", "{folder}", "{tmp}/a", "--step", "2"], 64, ("it has no steps",)),
        (["export", "{folder}", "{tmp}/a", "--max-shard-size", "big"], 64, ("'big'", "5GB")),
        (["export", "{folder}", "{tmp}/a", "--mesh", "tensor=64"], 64, ("64 devices",)),
        (["exprot", "{folder}", "{tmp}/a"], 64, ("Did you mean 'export'?",)),
    ],
)
def test_the_stupidest_inputs_are_answered(folder, tmp_path, capsys, args, code, words):
    given = [arg.format(folder=folder, tmp=tmp_path) for arg in args]
    found, _, err = run(capsys, *given)
    assert found == code
    for word in words:
        assert word in err, err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ({"model_type": "lama"}, 64, ("'lama'", "Did you mean 'llama'?", "docs/models.md")),
        ({"model_type": None}, 64, ("None",)),
        ({"hidden_size": "many"}, 64, ("hidden_size",)),
        ({"num_attention_heads": 5}, 64, ("num_attention_heads",)),
        ({"num_hidden_layers": 3}, 66, ("missing (9)", "model.layers.2.")),
        ({"num_hidden_layers": 1}, 66, ("not used (9)", "there are 2 layers, and config.json says 1")),
        ({"vocab_size": 300}, 66, ("[264, 16]", "[300, 16]", "vocab_size: 300")),
        ({"quantization_config": {"quant_method": "gptq"}}, 66, ("gptq",)),
        ({"hidden_act": "swoosh"}, 64, ("hidden_act", "swoosh")),
    ],
)
def test_a_config_that_is_not_that_of_the_weights_is_answered(folder, tmp_path, capsys, config, code, words):
    write_folder(tmp_path / "bad")
    text = json.loads((tmp_path / "bad" / "config.json").read_text()) | config
    (tmp_path / "bad" / "config.json").write_text(json.dumps(text))
    found, _, err = run(capsys, "import", tmp_path / "bad", tmp_path / "out")
    assert found == code, err
    for word in words:
        assert word in err, err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "package", "extra"),
    [
        (["import", "s3://bucket/model", "{tmp}/a"], "s3fs", "jtrain[s3]"),
        (["export", "gs://bucket/run", "{tmp}/a"], "gcsfs", "jtrain[gcs]"),
        (["export", "gs://bucket/run", "{tmp}/a", "--lora", "adapter"], "gcsfs", "jtrain[gcs]"),
        (["pretrain", "demo", "--run_dir", "gs://bucket/run"], "gcsfs", "jtrain[gcs]"),
        (["contrastive", "digits", "--model.path", "gs://bucket/m", "--run_dir", "{tmp}/r"], "gcsfs", "jtrain[gcs]"),
        (["pretrain", "demo", "--data.train", "s3://bucket/a.txt", "--run_dir", "{tmp}/r"], "s3fs", "jtrain[s3]"),
    ],
)
def test_a_url_whose_package_is_missing_names_the_extra(tmp_path, capsys, monkeypatch, args, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    found, _, err = run(capsys, *(arg.format(tmp=tmp_path) for arg in args))
    assert found == 64
    assert "://bucket/" in err
    assert extra in err
