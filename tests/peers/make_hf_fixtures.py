"""Makes the tiny Hugging Face folders of tests/models/families/fixtures that did not come with the project.

Needs torch and transformers (5.24 made those that are committed), and neither JAX nor this package:

    python tests/peers/make_hf_fixtures.py tests/models/families/fixtures [name ...]

Each folder: config.json, model.safetensors, and oracle.safetensors with input_ids, attention_mask, labels [2, 40],
logits, loss and `gradnorm.<parameter>`. Float32, eager attention. Row 1 begins with nine padding tokens; positions are
0…39 in every row. Weights are drawn strong (1.5 / sqrt(fan-in), norms and biases perturbed): with a default draw a
wrong rotation, scale or window would not show.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM

COMMON = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LENGTH, PADS = 40, 9

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.0, 2.0, 3.5, 6.0],
}
FOLDERS = {
    "mixtral": {
        "hidden_size": 16, "head_dim": 8, "intermediate_size": 12, "num_local_experts": 4, "sliding_window": 12,
    },
    "gemma": {"head_dim": 8, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gpt-neox": {"num_attention_heads": 3, "hidden_act": "gelu", "rope_parameters": {"partial_rotary_factor": 0.5}},
    "olmo2": {},
    "olmoe": {
        "hidden_size": 16, "intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.0,
    },
    # 16 of 40 positions fit the first training: the long factors
    "phi3-long": {
        "hidden_size": 32, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 16,
        "rope_parameters": LONGROPE,
    },
    # all 40 fit: the short factors; half of a head turns
    "phi3-short": {
        "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 64, "sliding_window": 12, "rope_parameters": LONGROPE,
    },
    "smollm3": {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True},
    "granite": {
        "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 2.0,
    },
    "llama-linear": {
        "attention_bias": True, "mlp_bias": True, "rope_parameters": {"rope_type": "linear", "factor": 4.0},
    },
    "qwen2-yarn": {
        "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
        "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    # biases so large that both clamps are met
    "gpt-oss-clamped": {
        "hidden_size": 16, "intermediate_size": 12, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 12,
    },
    "gemma3-linear": {
        "num_hidden_layers": 2, "head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 12,
        "layer_types": ["full_attention", "sliding_attention"], "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "deepseek-v3-yarn": {
        "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_key_value_heads": 4,
        "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "n_shared_experts": 2, "q_lora_rank": None, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 4, "routed_scaling_factor": 1.5,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5,
        },
    },
}  # fmt: skip
TYPES = {
    "phi3-long": "phi3", "phi3-short": "phi3", "llama-linear": "llama", "qwen2-yarn": "qwen2", "gpt-neox": "gpt_neox",
    "deepseek-v3-yarn": "deepseek_v3", "gpt-oss-clamped": "gpt_oss", "gemma3-linear": "gemma3_text",
}  # fmt: skip


def draw(model: torch.nn.Module, seed: int) -> None:
    """Strong weights, perturbed norms, biases and buffers of the routers."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if not parameter.is_floating_point() or "inv_freq" in name or "embed_scale" in name:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if name.endswith("gate_up_proj_bias"):
                parameter.copy_(4.0 * noise)
            elif parameter.ndim >= 2:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
            elif "norm" in name and name.endswith("weight"):
                parameter.copy_(parameter + 0.2 * noise)
            else:
                parameter.copy_(0.2 * noise)


def make(name: str, out: Path) -> None:
    kind = TYPES.get(name, name)
    fields = copy.deepcopy(COMMON | FOLDERS[name])  # transformers writes into it
    if kind == "gpt_neox":  # knows no groups
        del fields["num_key_value_heads"]
    # transformers writes the chosen kernel nowhere; eager is the plain arithmetic.
    config = AutoConfig.for_model(kind, **fields, attn_implementation="eager", dtype="float32")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    seed = sum(map(ord, name))
    draw(model, seed)
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, COMMON["vocab_size"], (2, LENGTH))
    mask = np.ones_like(ids)
    ids[1, :PADS], mask[1, :PADS] = 0, 0
    labels = np.where((mask == 1) & (rng.random(ids.shape) < 0.9), ids, -100)
    labels[1, PADS] = -100  # it would be predicted from padding
    out = out / name
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    # the reloaded one is what a folder means
    model = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager", dtype=torch.float32).eval()
    tensors = {key: torch.from_numpy(value) for key, value in (("input_ids", ids), ("attention_mask", mask))}
    result = model(**tensors, labels=torch.from_numpy(labels))
    result.loss.backward()
    oracle = {"input_ids": ids, "attention_mask": mask, "labels": labels, "logits": result.logits.detach().numpy()}
    oracle["loss"] = result.loss.detach().numpy()[None]
    for key, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        oracle[f"gradnorm.{key}"] = gradient.norm().numpy()[None]
    save_file({key: np.ascontiguousarray(value) for key, value in oracle.items()}, out / "oracle.safetensors")
    (out / "generation_config.json").unlink(missing_ok=True)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{name}: loss {result.loss:.4f}, logits up to {result.logits.abs().max():.2f}, {size / 1024:.0f} KB")


if __name__ == "__main__":
    for chosen in sys.argv[2:] or FOLDERS:
        make(chosen, Path(sys.argv[1]))
