"""Tiny Llama folders, written with the safetensors library itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jtrain.tasks.companion_files import byte_tokenizer_json

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 264,  # five more than the tokenizer has: padded, as most are
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": 257,
    "eos_token_id": 256,
    "custom_key_of_somebody": 7,
}
SETTINGS = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|endoftext|>",
    "bos_token": "<|begin_of_text|>",
    "pad_token": "<|pad|>",
}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def tensors_of(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Strong random weights under transformers' names, torch's [out, in]."""
    rng = np.random.default_rng(seed)
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,)}
    for n in range(config["num_hidden_layers"]):
        at = f"model.layers.{n}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (d, d),
            f"{at}.self_attn.k_proj.weight": (kv, d),
            f"{at}.self_attn.v_proj.weight": (kv, d),
            f"{at}.self_attn.o_proj.weight": (d, d),
            f"{at}.mlp.gate_proj.weight": (f, d),
            f"{at}.mlp.up_proj.weight": (f, d),
            f"{at}.mlp.down_proj.weight": (d, f),
            f"{at}.input_layernorm.weight": (d,),
            f"{at}.post_attention_layernorm.weight": (d,),
        }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, d)
    return {
        name: (rng.normal(0, 1.5 / np.sqrt(shape[-1]), shape) + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_folder(
    path: Path,
    *,
    shards: int = 1,
    dtype: str = "float32",
    tokenizer: bool = True,
    template: bool = False,
    **config: Any,
) -> dict[str, np.ndarray]:
    """Writes a folder and returns its tensors as they were before a rounding to `dtype`."""
    path.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **config}
    tensors = tensors_of(config)
    (path / "config.json").write_text(json.dumps(config))
    write_weights(path, tensors, shards=shards, dtype=dtype)
    if tokenizer:
        (path / "tokenizer.json").write_bytes(byte_tokenizer_json())
        (path / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258], "temperature": 0.6}))
    if template:
        (path / "chat_template.jinja").write_text(TEMPLATE)
    return tensors


def write_weights(path: Path, tensors: dict[str, Any], *, shards: int = 1, dtype: str = "float32") -> None:
    kind = {"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)
    cast = {name: x.astype(kind) for name, x in tensors.items()}
    if shards == 1:
        save_file(cast, path / "model.safetensors", metadata={"format": "pt"})
        return
    table = {}
    for n in range(shards):
        file = f"model-{n + 1:05}-of-{shards:05}.safetensors"
        part = {name: cast[name] for name in list(cast)[n::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        table |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
