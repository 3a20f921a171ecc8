"""Makes tests/tasks/goldens/evaluation.json: transformers' perplexity of long texts, by windows that overlap.

    python -m tests.peers.make_eval_goldens

Needs transformers and torch. Model and tokenizer are those of make_sft_goldens.py; the loop is the one of Hugging
Face's page "Perplexity of fixed-length models", with each text by itself.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

from tests.peers.make_sft_goldens import HERE, MODEL, WORDS

OUT = Path(__file__).parents[1] / "tasks" / "goldens" / "evaluation.json"
LENGTH, STRIDES = 32, (8, 16, 31)


def texts() -> list[str]:
    """Texts of 90, 20, 33 and 64 words."""
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=count)) for count in (90, 20, 33, 64)]


def write_folder(folder: Path) -> None:
    """The tiny Llama with the tokenizer of one word a token."""
    for file in (
        *HERE.glob("tokenizer*.json"),
        *HERE.glob("*.jinja"),
        *MODEL.glob("*.json"),
        MODEL / "model.safetensors",
    ):
        (folder / file.name).write_bytes(file.read_bytes())


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as name:
        write_folder(Path(name))
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(name)
    found = {}
    for stride in STRIDES:
        total, count = 0.0, 0
        for text in texts():
            ids = tokenizer(text, return_tensors="pt").input_ids
            previous = 0
            for begin in range(0, ids.size(1), stride):
                end = min(begin + LENGTH, ids.size(1))
                window, targets = ids[:, begin:end], ids[:, begin:end].clone()
                targets[:, : previous - begin] = -100
                with torch.no_grad():
                    loss = model(window, labels=targets).loss
                live = int((targets[:, 1:] != -100).sum())
                total, count, previous = total + float(loss) * live, count + live, end
                if end == ids.size(1):
                    break
        found[str(stride)] = {"loss": total / count, "tokens": count}
    OUT.write_text(json.dumps({"max_length": LENGTH, "texts": texts(), "windows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
