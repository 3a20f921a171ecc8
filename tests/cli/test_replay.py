"""`jtrain replay`: from the command line, of a run of a task, without its data."""

import json
import shutil

import pytest

from jtrain.cli.main import main

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """The third update of a run with dropout, whose data and directory are gone."""
    folder = tmp_path_factory.mktemp("replay")
    (folder / "a.txt").write_text("the cat sat on the mat. " * 400)
    flags = {
        "run_dir": folder / "run",
        "max_steps": "1 epochs",
        "max_length": 32,
        "global_batch_size": 8,
        "accelerator": "cpu",
        "devices": 2,
        "compile_cache": "",
        "precision": "32-true",
        "data.train": folder / "a.txt",
        "data.cache_dir": folder / "cache",
        "model.preset": "llama-tiny",
        "model.dropout": 0.1,
        "schedule.warmup_steps": "10%",
        "checkpoint.save_steps": 0,
        "logging.trackers": "[]",
        "faults.bundle_step": 3,
        **{f"model.{name}": value for name, value in SHAPE.items()},
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    assert main(["pretrain", *words]) == 0
    shutil.move(folder / "run/bundles/step-3", folder / "step-3")
    for gone in ("run", "cache"):
        shutil.rmtree(folder / gone)
    (folder / "a.txt").unlink()
    return folder / "step-3"


def test_an_update_of_a_run_is_made_again_without_its_data(bundle, capsys):
    assert main(["replay", str(bundle), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["batch"], found["nonfinite"], found["changed"]) == (3, 2, [], {})
    assert found["state"]["equal"] and found["steps"][0]["equal"] and found["steps"][0]["finite"]


def test_flags_change_the_config_and_what_changed_is_told(bundle, capsys):
    assert main(["replay", str(bundle), "--devices", "1"]) == 0
    text = capsys.readouterr().out
    assert "update 3, batch 2: faults.bundle_step" in text and "the state is the one that was saved" in text
    assert "changed: mesh was" in text and "all numbers are finite" in text


@pytest.mark.parametrize(("words", "code"), [([], 64), (["a", "b"], 64), (["/nowhere"], 66)])
def test_what_is_no_bundle_is_refused(words, code, capsys):
    assert main(["replay", *words]) == code
    assert "error:" in capsys.readouterr().err
    assert main(["replay", "--help"]) == 0 and "BUNDLE" in capsys.readouterr().out


def test_a_bundle_of_a_model_of_ones_own_says_how(bundle, tmp_path, capsys):
    copy = shutil.copytree(bundle, tmp_path / "copy")
    said = json.loads((copy / "bundle.json").read_text())
    (copy / "bundle.json").write_text(json.dumps(said | {"trainer": "Trainer"}))
    assert main(["replay", str(copy)]) == 66
    assert "jtrain.train.replay.replay(" in capsys.readouterr().err
