"""Sees that transformers has the rewards of an exported reward model: AutoModelForSequenceClassification, one label.

In two environments, since jtrain's has no torch:

    python tests/peers/check_reward.py write FOLDER     # jtrain: trains two steps, exports, writes rewards.json
    python tests/peers/check_reward.py check FOLDER     # torch and transformers: loads it and compares
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def write(folder: Path) -> None:
    sys.path.insert(0, str(ROOT))
    import numpy as np

    import jtrain
    from tests.tasks.preferences import RUNS, settings, trained, word_model

    folder.mkdir(parents=True)
    word_model(folder / "model")
    trainer = trained(settings(folder, "reward", max_steps=2), RUNS["pairs"])
    batch, rewards = trainer.train_rows.rows(np.arange(4)), trainer.predict(RUNS["pairs"])
    jtrain.export(jtrain.load_model(folder / "run"), folder / "out")
    halves = ("chosen", "rejected")
    content = {
        half: {name: batch[f"{half}_{name}"].tolist() for name in ("input_ids", "segment_ids")} for half in halves
    }
    for half in halves:
        content[half]["rewards"] = rewards[f"{half}_rewards"].tolist()
    (folder / "rewards.json").write_text(json.dumps(content))


def check(folder: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification

    model, info = AutoModelForSequenceClassification.from_pretrained(folder / "out", output_loading_info=True)
    trouble = {key: value for key, value in info.items() if value and key != "error_msgs"}
    assert not trouble, trouble
    assert model.config.num_labels == 1
    for half, batch in json.loads((folder / "rewards.json").read_text()).items():
        ids, mask = torch.tensor(batch["input_ids"]), torch.tensor(batch["segment_ids"])
        with torch.no_grad():
            theirs = model.float().eval()(input_ids=ids, attention_mask=mask).logits[:, 0]
        difference = (theirs - torch.tensor(batch["rewards"])).abs().max().item()
        print(f"{half}: rewards differ by {difference:.2e}")
        assert difference < 1e-5


if __name__ == "__main__":
    {"write": write, "check": check}[sys.argv[1]](Path(sys.argv[2]))
