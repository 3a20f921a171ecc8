"""Sees that transformers loads what the families write to the function it was: the config.json, and all the weights.

Needs torch and transformers, 5 or 4 (4.57 for the older schema), and of this package the plain-Python families only
(no JAX):

    PYTHONPATH=. python tests/peers/check_hf_configs.py

For every folder of tests/models/families/fixtures: config.json -> our config -> config.json, and every tensor split
and joined; transformers loads the result, and its logits must be those of the oracle.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

from jtrain.models.config import DecoderConfig
from jtrain.models.families import FAMILIES, family
from jtrain.models.families.translation import of_function

FIXTURES = Path(__file__).parents[1] / "models/families/fixtures"


def rewritten(source: Path, out: Path) -> None:
    hf = json.loads((source / "config.json").read_text())
    one = family(hf["model_type"])
    config = one.decoder_config(hf)
    assert one.decoder_config(one.hf_config(config)) == config
    ids = {key: hf[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (out / "config.json").write_text(json.dumps(one.hf_config(config) | ids | {"torch_dtype": "float32"}, indent=1))
    disk = load_file(source / "model.safetensors")
    written = {tensor.key: tensor.join(tensor.split(disk[tensor.key])) for tensor in one.tensors(config)}
    save_file({k: np.ascontiguousarray(v) for k, v in written.items()}, out / "model.safetensors", {"format": "pt"})


def difference(source: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        rewritten(source, Path(folder))
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", output_loading_info=True
        )
    trouble = {key: value for key, value in info.items() if value and key != "error_msgs"}
    assert not trouble, trouble
    oracle = load_file(source / "oracle.safetensors")
    ids, mask = (torch.from_numpy(oracle[key]) for key in ("input_ids", "attention_mask"))
    with torch.no_grad():
        logits = model.float().eval()(input_ids=ids, attention_mask=mask).logits.numpy()
    live = oracle["attention_mask"] == 1
    return float(np.abs(logits - oracle["logits"])[live].max() / np.ptp(oracle["logits"][live]))


def without_aux(config: DecoderConfig) -> DecoderConfig:
    """gpt-oss: 0.9 in transformers 4 and 0.001 in 5; training alone reads it."""
    return of_function(config).replace(router_aux_loss_coef=0.0) if config.num_experts else of_function(config)


def check_defaults() -> list[str]:
    """Families for which transformers takes something else for an absent key than we do."""
    other = []
    for name, one in FAMILIES.items():
        full = transformers.AutoConfig.for_model(name).to_dict()
        ours, theirs = (one.decoder_config(hf) for hf in ({"model_type": name}, full))
        if without_aux(ours) != without_aux(theirs):
            other.append(f"the defaults of {name}")
    return other


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    print("transformers", transformers.__version__)
    failed = [] if sys.argv[1:] else check_defaults()
    for path in sorted(FIXTURES.iterdir()):
        if path.is_dir() and (not sys.argv[1:] or path.name in sys.argv[1:]):
            try:
                off = difference(path)
            except Exception as error:
                off, reason = float("inf"), f"{type(error).__name__}: {error}"
                print(reason)
            print(f"{path.name:20} {off:.1e}")
            failed += [path.name] if not off < 1e-5 else []
    sys.exit(f"not the same: {', '.join(failed)}" if failed else None)
