"""What `transformers` makes of exported folders of CLIP and SigLIP; a program of its own, in an environment with torch.

    python tests/peers/transformers_embeddings.py REQUEST.json OUT.npz

REQUEST is {name: {"folder": ..., "images": npy, "texts": [...], "length": ...}}; what comes out is `name.image`,
`name.text`, `name.ids` and `name.pixels`.
"""

import json
import sys

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

found = {}
with open(sys.argv[1]) as file:
    request = json.load(file)
for name, case in request.items():
    model, info = AutoModel.from_pretrained(case["folder"], dtype=torch.float32, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], (name, kind, info[kind])
    processor = AutoImageProcessor.from_pretrained(case["folder"], backend="pil")
    tokenizer = AutoTokenizer.from_pretrained(case["folder"])
    ids = tokenizer(
        case["texts"], padding="max_length", truncation=True, max_length=case["length"], return_tensors="pt"
    )["input_ids"]
    pixels = processor([Image.fromarray(i) for i in np.load(case["images"])], return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        out = model.eval()(input_ids=ids, pixel_values=pixels)
    parts = {"image": out.image_embeds, "text": out.text_embeds, "ids": ids, "pixels": pixels}
    found |= {f"{name}.{part}": x.numpy() for part, x in parts.items()}
np.savez(sys.argv[2], **found)
