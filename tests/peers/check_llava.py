"""Compares folders that `jtrain export` wrote of the models of make_llava_goldens with what transformers makes of them.

    jtrain export tests/tasks/fixtures/llava/clip-llama /tmp/clip-llama
    python -m tests.peers.check_llava clip-llama /tmp/clip-llama

Needs transformers (4.52 or newer), torch and Pillow.
"""

from __future__ import annotations

import base64
import io
import json
import sys

import numpy as np

from tests.peers.make_llava_goldens import HERE


def main(kind: str, folder: str) -> None:
    import torch
    from PIL import Image
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    golden = json.loads((HERE / kind / "goldens.json").read_text())
    logits = np.load(HERE / kind / "goldens.npz")["logits2"]
    model, report = LlavaForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    processor = AutoProcessor.from_pretrained(folder)
    messages = json.loads((HERE / "rows.json").read_text())[2]["messages"]
    for message in messages:
        for part in message["content"]:
            if part["type"] == "image":
                part["image"] = Image.open(io.BytesIO(base64.b64decode(part.pop("base64"))))
    encoded = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    assert encoded["input_ids"][0].tolist() == golden["rows"][2]["ids"]
    with torch.no_grad():
        found = model.float()(input_ids=encoded["input_ids"], pixel_values=encoded["pixel_values"]).logits[0].numpy()
    print(f"{kind}: largest difference of logits {np.abs(found - logits).max():.3g}")
    assert np.abs(found - logits).max() < 1e-4


if __name__ == "__main__":
    main(*sys.argv[1:])
