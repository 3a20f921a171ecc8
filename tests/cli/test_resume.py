"""The same command goes on with its run, also where the trainer fills in fields from the model that nobody set."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jtrain import load_config
from jtrain.cli.main import main
from tests.tasks.preferences import word_model

LLAVA = Path(__file__).parents[1] / "tasks" / "fixtures" / "llava"
SETTINGS = {
    "global_batch_size": 4,
    "precision": "32-true",
    "accelerator": "cpu",
    "devices": 1,
    "compile_cache": "",
    "xla_options": {"xla_backend_optimization_level": 0},
    "checkpoint": {"best": None},
    "logging": {"trackers": []},
}
SMALL = ["--model.hidden_size", "16", "--model.intermediate_size", "16", "--model.num_hidden_layers", "1"]
SMALL += ["--model.num_attention_heads", "2", "--model.num_key_value_heads", "2", "--data.buckets", "16"]


def sft(folder):
    model = word_model(folder / "model")
    return ["sft", "--model.path", model, "--data.buckets", "16"], {"max_length": 128}


def fresh_student(folder):
    teacher = word_model(folder / "teacher")
    return ["distill", "--distill.teacher", teacher, *SMALL], {
        "max_length": 128,
        "data.tokenizer": f"{teacher}/tokenizer.json",
    }


def contrastive(folder):
    rows = []
    for n in range(4):
        Image.fromarray(np.full((8, 8, 3), 60 * n, np.uint8)).save(folder / f"{n}.png")
        rows.append({"image": f"{n}.png", "text": f"shade {n}"})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return ["contrastive", "--model.preset", "clip-tiny"], {"max_length": 32}


def sees(folder):
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, json.loads((LLAVA / "rows.json").read_text()))))
    return ["sft", "--model.path", str(LLAVA / "clip-llama")], {"optimizer.freeze": ("vision_tower/.*",)}


@pytest.mark.parametrize(
    "case", [sft, *(pytest.param(case, marks=pytest.mark.grid) for case in (fresh_student, contrastive, sees))]
)
def test_the_same_command_goes_on_where_fields_were_filled_in(tmp_path, capsys, case):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "w3 w4", "completion": "w5 w6"}\n' * 4)
    (tmp_path / "run.yaml").write_text(json.dumps(SETTINGS))
    (verb, *flags), filled = case(tmp_path)
    run, data = tmp_path / "run", str(tmp_path / "rows.jsonl")
    command = [verb, str(tmp_path / "run.yaml"), *flags, "--run_dir", str(run), "--data.train", data]
    if verb != "contrastive":
        command += ["--data.cache_dir", str(tmp_path / "cache")]
    assert main([*command, "--max_steps", "1"]) == 0
    before = load_config(run / "config.yaml", env={})
    for field, value in filled.items():
        section, _, name = field.rpartition(".")
        assert getattr(getattr(before, section) if section else before, name) == value
    assert main([*command, "--max_steps", "2"]) == 0
    assert "resumed from step 1" in capsys.readouterr().out
    # Whoever sets the field to something else is told before the data is looked for.
    assert main([*command, "--max_steps", "3", "--max_length", "12", "--data.train", str(tmp_path / "no")]) == 64
    assert "max_length" in capsys.readouterr().err
