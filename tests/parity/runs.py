"""A run with everything in it that resume and meshes could break: mixture, packing, dropout, accumulation, epochs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jtrain import Callback, PretrainTrainer

WORDS = """the quick brown fox jumps over a lazy dog while seven wizards brew strong potions at dawn""".split()  # noqa: SIM905
STEPS = 20
"""Also of runs that stop earlier: their programs are then the same, and each is compiled once for all files."""


def write_corpus(folder: Path) -> list[str]:
    """Two sources of short documents; at 8 rows a step their rows last for less than 12 steps."""
    paths = []
    for name, documents, seed in (("a", 60, 0), ("b", 25, 1)):
        generator = np.random.default_rng(seed)
        path = folder / f"{name}.jsonl"
        lines = [
            json.dumps({"text": " ".join(generator.choice(WORDS, size=int(generator.integers(2, 9))))})
            for _ in range(documents)
        ]
        path.write_text("\n".join(lines) + "\n")
        paths.append(str(path))
    return paths


def settings(corpus: list[str], run_dir: Path, **changes: Any) -> dict[str, Any]:
    """The config as a dict; `changes` replace whole fields or, given dicts, parts of sections."""
    config: dict[str, Any] = {
        "run_dir": str(run_dir),
        "max_steps": STEPS,
        "max_length": 32,
        "global_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "precision": "32-true",
        "compile_cache": "",
        "accelerator": "cpu",
        "devices": 1,
        "mesh": {"data": -1},
        "model": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "dropout": 0.1,
            "remat": "none",
        },
        "data": {
            "train": corpus,
            "weights": [2.0, 1.0],
            "packing": "best_fit",
            "cache_dir": str(run_dir.parent / "cache"),
        },
        "optimizer": {"learning_rate": 3e-3},
        "checkpoint": {"save_steps": 0, "best": None},
        "logging": {"log_every_n_steps": 1, "trackers": []},
    }
    for name, value in changes.items():
        config[name] = config[name] | value if isinstance(value, dict) and isinstance(config.get(name), dict) else value
    return config


class Ledger(Callback):
    """Writes down which rows each update used, and stops after `stop_at`."""

    def __init__(self, stop_at: int | None = None):
        self.stop_at = stop_at
        self.rows: dict[int, list[tuple[int, int]]] = {}

    def on_step_start(self, trainer: PretrainTrainer, step: int) -> None:
        total = trainer.program.batch.total
        source, row = trainer.train_rows.row_ids(np.arange((step - 1) * total, step * total))
        self.rows[step] = list(zip(source.tolist(), row.tolist(), strict=True))
        if step == self.stop_at:
            trainer.request_stop("the test says so")


def train(config: dict[str, Any], stop_at: int | None = None) -> tuple[PretrainTrainer, Ledger]:
    """Runs (or resumes) to `stop_at` or to the end."""
    ledger = Ledger(stop_at)
    trainer = PretrainTrainer(config, callbacks=[ledger])
    trainer.fit()
    return trainer, ledger


def bits(tree: Any) -> list[bytes]:
    """Every leaf's bits, in the tree's order."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jax.device_get(tree))]


FIGURES = ("loss", "grad_norm", "learning_rate", "tokens", "examples", "mean_token_accuracy", "skipped_steps")


def figures(trainer: PretrainTrainer) -> dict[int, tuple[Any, ...]]:
    """Step -> the figures of its line that do not depend on the clock."""
    return {line["step"]: tuple(line[name] for name in FIGURES) for line in trainer.history.train}
