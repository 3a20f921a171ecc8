"""Logits and ids that `transformers` gives for exported folders; a program of its own, in an environment with torch.

    python tests/peers/transformers_logits.py REQUEST.json OUT.safetensors

REQUEST is {name: {"folder": ..., "ids": [[...]], "texts": [...]}}; what comes out is `name.logits`, and `name.text.n`.
"""

import json
import sys

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

found = {}
with open(sys.argv[1]) as file:
    request = json.load(file)
for name, case in request.items():
    model, info = AutoModelForCausalLM.from_pretrained(
        case["folder"], dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], (name, kind, info[kind])
    with torch.no_grad():
        logits = model.eval()(torch.tensor(case["ids"])).logits
    found[f"{name}.logits"] = logits.float().numpy()
    if case.get("texts"):
        tokenizer = AutoTokenizer.from_pretrained(case["folder"])
        for n, text in enumerate(case["texts"]):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            found[f"{name}.text.{n}"] = np.asarray(ids, np.int64)
            assert tokenizer.decode(ids) == text
save_file(found, sys.argv[2])
