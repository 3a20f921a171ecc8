"""That DPO learns: adapters of SmolLM2-135M on the bundled pairs, a right and a wrong answer to one question each.

What tells the halves of a pair apart: three in four ask for the definition of a word, and the rejected answer is a
definition of WordNet as well, but another word's; the others ask for a greatest common divisor or the root of a linear
equation, and the rejected number is off by a little. So a held-out pair is judged by what its words mean, not by a
phrase that was seen: no question, no word and no definition of the held-out pairs stands in a pair that is trained on.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jtrain import DPOTrainer
from tests.models.smollm2 import download

PAIRS = Path(__file__).parents[2] / "configs" / "assets" / "dpo-pairs.jsonl.gz"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The model's own template without its system message: half the tokens."""


def pairs() -> list[dict[str, Any]]:
    with gzip.open(PAIRS, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def marks(pair: dict[str, Any]) -> set[str]:
    """What two pairs may not share across the split: the question, its word, the definitions (a number is none)."""
    (question,), *answers = (pair[name] for name in ("prompt", "chosen", "rejected"))
    texts = {answer["content"] for (answer,) in answers}
    return {
        question["content"],
        *re.findall('"(.+?)"', question["content"]),
        *(t for t in texts if re.search("[a-z]", t)),
    }


def split(records: list[dict[str, Any]], seed: int, held_out: int) -> tuple[list[Any], list[Any]]:
    """Shuffled groups of pairs that share a mark: the first `held_out` pairs or a few more, and the rest."""
    group = list(range(len(records)))

    def root(number: int) -> int:
        while group[number] != number:
            number = group[number]
        return number

    first: dict[str, int] = {}
    for number, record in enumerate(records):
        for mark in marks(record):
            group[root(number)] = root(first.setdefault(mark, number))
    groups = defaultdict(list)
    for number, record in enumerate(records):
        groups[root(number)].append(record)
    order = list(groups.values())
    random.Random(seed).shuffle(order)
    parts: tuple[list[Any], list[Any]] = ([], [])
    for members in order:
        parts[len(parts[0]) >= held_out].extend(members)
    return parts


def log_ratios(trainer: DPOTrainer, records: list[dict[str, Any]]) -> np.ndarray:
    found = trainer.predict(records)
    return np.asarray(found["chosen_logps"], np.float64) - np.asarray(found["rejected_logps"], np.float64)


def learned(model: Path, folder: Path, seed: int, **changes: Any) -> tuple[float, float]:
    """Share of held-out pairs whose chosen answer is the likelier one before, and has the higher reward after."""
    held_out, rest = split(pairs(), seed, 120)
    assert not set.union(*map(marks, held_out)) & set.union(*map(marks, rest))
    (folder / "chatml.jinja").write_text(CHATML)
    config: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "max_length": 48,
        "max_steps": 40,
        "per_device_batch_size": 8,
        "seed": seed,
        "precision": "32-true",
        "accelerator": "cpu",
        "devices": 1,
        "compile_cache": "",
        "model": {"path": str(model), "lora": {"rank": 16, "alpha": 32}, "remat": "none"},
        "data": {"buckets": [48], "chat_template": str(folder / "chatml.jinja"), "cache_dir": str(folder / "cache")},
        "optimizer": {"learning_rate": 5e-4},
        "schedule": {"warmup_steps": 0.1},
        "checkpoint": {"save_steps": 0, "best": None},
        "logging": {"log_every_n_steps": 1, "trackers": []},
    }
    trainer = DPOTrainer(config | changes, train_dataset=rest)
    before = log_ratios(trainer, held_out)
    trainer.fit()
    rewards = log_ratios(trainer, held_out) - before  # over beta; the policy began as its reference
    return float((before > 0).mean()), float((rewards > 0).mean())


@pytest.mark.learn
@pytest.mark.network
@pytest.mark.timeout(1800)
def test_held_out_pairs_are_told_apart(tmp_path):
    """320 pairs seen once; 120 others. Before the first update all rewards are 0: right by chance in one of two."""
    likelier, accuracy = learned(download(tmp_path), tmp_path, seed=0)
    print(f"the chosen answer was likelier in {likelier:.1%}; its reward is higher in {accuracy:.1%}")
    assert accuracy >= 0.8
