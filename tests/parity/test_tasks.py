"""Every task: one answer on every mesh, and a run that was stopped goes on bit by bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jtrain.tasks import trainer_of
from tests.parity.runs import Ledger, bits
from tests.tasks.preferences import settings, word_model

grid = pytest.mark.grid
TESTS = Path(__file__).parents[1]
LLAVA = TESTS / "tasks" / "fixtures" / "llava"
OWN_MODEL = {"images": LLAVA / "clip-llama", "image and text": TESTS / "models" / "fixtures" / "clip"}
"""Forms of rows that the model of words can not read, and what reads them."""
MESH = {"devices": 8, "mesh": "fsdp=2,tensor=2,pipeline=2"}


def words(draw: np.random.Generator, least: int, most: int) -> str:
    return " ".join(f"w{n}" for n in draw.integers(3, 96, draw.integers(least, most)))


def records(form: str) -> list[dict[str, Any]]:
    """Ten rows of many lengths: with four in a batch, a step crosses the end of an epoch."""
    draw, found = np.random.default_rng(0), []
    if form == "images":  # conversations with one image, with two and with none
        return json.loads((LLAVA / "rows.json").read_text()) * 2
    for number in range(10):
        prompt, first, second = words(draw, 1, 12), f" {words(draw, 1, 9)}", f" {words(draw, 1, 9)}"
        found.append(
            {
                "text": {"text": prompt + first},
                "completion": {"prompt": prompt, "completion": first},
                "pair": {"prompt": prompt, "chosen": first, "rejected": second},
                "single": {"prompt": prompt, "completion": first, "label": number % 3 > 0},
                "image and text": {"image": draw.integers(0, 256, (12, 12, 3), np.uint8), "text": f"red {number % 7}"},
            }[form]
        )
    return found


DROPOUT = {"model": {"dropout": 0.1}}
TASKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "pretrain": ("pretrain", "text", {"data": {"buckets": [], "packing": "best_fit"}} | DROPOUT),
    "sft": ("sft", "completion", {"sft": {"neftune_noise_alpha": 5.0}, "loss": {"label_smoothing": 0.1}} | DROPOUT),
    "sft, packed": ("sft", "completion", {"data": {"buckets": [], "packing": "best_fit"}} | DROPOUT),
    "dpo": ("dpo", "pair", {"dpo": {"beta": 0.5}}),
    "dpo, adapters": ("dpo", "pair", {"model": {"lora": {"rank": 2}}}),
    "dpo, precomputed": ("dpo", "pair", {"dpo": {"precompute_ref_log_probs": True}}),
    "ipo and cross-entropy": ("dpo", "pair", {"dpo": {"loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.5]}}),
    "aot": ("dpo", "pair", {"dpo": {"loss_type": "aot"}}),
    "kto": ("dpo", "single", {"dpo": {"loss_type": "kto"}}),
    "orpo": ("dpo", "pair", {"dpo": {"loss_type": "orpo"}}),
    "simpo": ("dpo", "pair", {"dpo": {"loss_type": "simpo"}}),
    "reward": ("reward", "pair", {"reward": {"center_rewards_coefficient": 0.01}}),
    "distill": ("distill", "completion", {"distill": {"loss": "jsd", "beta": 0.3, "top_k": 5, "ce_weight": 0.25}}),
    # The encoder is trained as well: its gradient has to find its way.
    "sft, images": ("sft", "images", {"sft": {"assistant_only_loss": True}, "optimizer": {"freeze": []}} | DROPOUT),
    "contrastive": ("contrastive", "image and text", {"max_length": 8} | DROPOUT),
}
SMOKE = "dpo"
ON_A_MESH = ("sft, packed", "dpo, adapters", "kto", "contrastive")
"""Stopped and resumed there; the others on one device."""


def cases() -> list[Any]:
    return [pytest.param(name, marks=() if name == SMOKE else grid) for name in TASKS]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "model"
    word_model(folder)
    word_model(folder.parent / "teacher", "qwen2")
    return folder


def trainer_for(name: str, model: Any, folder: Any, stop_at: int | None = None, **changes: Any) -> Any:
    task, form, particular = TASKS[name]
    config = settings(folder, task, data={"shuffle": True})
    for part in (particular, {"max_steps": 4, "optimizer": {"learning_rate": 3e-3}}, changes):
        for key, value in part.items():
            config[key] = config.get(key, {}) | value if isinstance(value, dict) else value
    config["model"] |= {"path": str(OWN_MODEL.get(form, model))}
    if task == "distill":
        config["distill"] |= {"teacher": str(model.parent / "teacher")}
    if task == "contrastive":  # its rows have one length and no tables
        config["data"] = {"shuffle": True}
    ledger = Ledger(stop_at)
    trainer = trainer_of(task)(config, train_dataset=records(form), callbacks=[ledger])
    trainer.fit()
    return trainer


FIGURES = (
    *("loss", "grad_norm", "rewards/margins", "rewards/chosen", "entropy", "accuracy", "mean_token_accuracy"),
    *("kl", "logit_scale", "image_to_text_accuracy"),
)


def lines(trainer: Any) -> list[list[float]]:
    return [[line[name] for name in FIGURES if name in line] for line in trainer.history.train]


@pytest.mark.parametrize("name", cases())
def test_a_mesh_gives_the_losses_of_one_device(name, model, tmp_path):
    """In float64, where nothing but another order of sums is left; the other figures are logged in float32."""
    runs = [
        lines(trainer_for(name, model, tmp_path / where, precision="64-true", **layout))
        for where, layout in (("one", {}), ("mesh", MESH))
    ]
    (one, mesh), steps = (np.asarray(run) for run in runs), 4
    assert one.shape[0] == steps and one.shape[1] >= 3
    np.testing.assert_allclose(mesh[:, :2], one[:, :2], rtol=1e-9)  # loss and norm of the gradient
    np.testing.assert_allclose(mesh, one, rtol=1e-6, atol=1e-8)


@grid
@pytest.mark.parametrize("name", TASKS)
def test_a_run_that_was_stopped_goes_on_bit_by_bit(name, model, tmp_path):
    shared: dict[str, Any] = {"data": {"cache_dir": str(tmp_path / "cache")}}
    shared |= MESH if name in ON_A_MESH else {}
    whole = trainer_for(name, model, tmp_path / "whole", **shared)
    trainer_for(name, model, tmp_path / "parts", stop_at=2, **shared)
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)  # a table of a reference is in the run, too
    parts = trainer_for(name, model, tmp_path / "parts", **shared)
    assert bits(parts.state) == bits(whole.state)
    assert parts.counters == whole.counters
    assert lines(parts) == lines(whole)[-2:]
