"""Rows, models and trainers of the tests of preferences: those of tests/peers/make_trl_goldens.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from jtrain.tasks import trainer_of

GOLDENS = Path(__file__).parent / "goldens"
RUNS = json.loads((GOLDENS / "preference_runs.json").read_text())
FIXTURES = Path(__file__).parents[1] / "models/families/fixtures"
FIGURES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


def word_model(folder: Path, fixture: str = "llama") -> str:
    """A tiny model of the fixtures with a tokenizer of one token a word: w3 is token 3."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FIXTURES / fixture / name, folder)
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{n}": n for n in range(3, 96)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": n, "content": text, "special": True} | flags for text, n in vocabulary.items() if n < 3]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<pad>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"eos_token": "<eos>", "bos_token": "<bos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return str(folder)


def settings(folder: Path, task: str, **changes: Any) -> dict[str, Any]:
    """A small float32 run on one device, all rows in one batch; dicts replace parts of sections."""
    config: dict[str, Any] = {
        "task": task,
        "run_dir": str(folder / "run"),
        "max_steps": 1,
        "max_length": 32,
        "global_batch_size": 4,
        "precision": "32-true",
        "compile_cache": "",
        "accelerator": "cpu",
        "devices": 1,
        "model": {"path": str(folder / "model"), "remat": "none"},
        "data": {"shuffle": False, "buckets": [32], "cache_dir": str(folder / "cache")},
        "optimizer": {"learning_rate": 1e-3},
        "checkpoint": {"save_steps": 0, "best": None},
        "logging": {"log_every_n_steps": 1, "trackers": []},
    }
    for name, value in changes.items():
        config[name] = config[name] | value if isinstance(value, dict) and isinstance(config.get(name), dict) else value
    return config


def trained(config: dict[str, Any], rows: Any = None, **arguments: Any) -> Any:
    """The trainer of a config after its `fit`."""
    trainer = trainer_of(config["task"])(config, train_dataset=rows, **arguments)
    trainer.fit()
    return trainer


def first_line(config: dict[str, Any], rows: Any) -> dict[str, Any]:
    """The figures of the first step."""
    return trained(config, rows).history.train[0]
