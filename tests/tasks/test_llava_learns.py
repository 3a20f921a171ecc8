"""That a model learns to see: digits as conversations, of the commands in docs/multimodal.md."""

from pathlib import Path

import numpy as np
import pytest

import jtrain
from jtrain import ContrastiveTrainer, SFTTrainer
from jtrain.tasks.dual_encoder import load_dual_encoder
from jtrain.tasks.dual_export import export_dual_encoder
from jtrain.tasks.image_import import import_with_vision

ROOT = Path(__file__).parents[2]


@pytest.mark.learn
@pytest.mark.timeout(2400)
def test_a_model_of_texts_learns_to_read_digits(tmp_path, monkeypatch):
    """CLIP on 1,438 pictures, and its encoder, frozen, before the tiny model of texts; 359 other pictures are read."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    import digits_chat

    digits_chat.write(tmp_path)
    shared = {"devices": 1, "compile_cache": str(tmp_path / "xla")}
    ContrastiveTrainer("digits", run_dir=str(tmp_path / "clip"), **shared).fit()
    export_dual_encoder(load_dual_encoder(str(tmp_path / "clip")), tmp_path / "clip-folder", dtype="float32")
    import_with_vision(ROOT / "configs" / "assets" / "tinykjv-1m", tmp_path / "clip-folder", tmp_path / "model")
    config = {
        "run_dir": str(tmp_path / "run"),
        "max_steps": 300,
        "global_batch_size": 32,
        "max_length": 48,
        "precision": "32-true",
        **shared,
        "model.remat": "none",
        "sft.assistant_only_loss": True,
        "optimizer.learning_rate": 2e-3,
        "data.train": [str(tmp_path / "train.jsonl")],
        "data.eval": [str(tmp_path / "eval.jsonl")],
        "data.cache_dir": str(tmp_path / "cache"),
        "checkpoint.save_steps": 0,
        "eval.eval_steps": 0,
    }
    SFTTrainer(config, model=str(tmp_path / "model")).fit()
    rows, labels = digits_chat.conversations()
    held_out = rows[-digits_chat.HELD_OUT :]
    model = jtrain.load_model(str(tmp_path / "run"))
    found = jtrain.generate(model, [row["messages"][:1] for row in held_out], max_new_tokens=6, batch_size=60)
    names = [digits_chat.NAMES[label] for label in labels[-len(held_out) :]]
    accuracy = np.mean([one.text.strip() == name for one, name in zip(found, names, strict=True)])
    print(f"accuracy on {len(held_out)} held-out digits: {accuracy:.3f}")
    assert accuracy >= 0.85
