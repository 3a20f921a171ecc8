"""From llama.cpp's words and tensors to Hugging Face's, for the architectures that are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jtrain.checkpoint.gguf.reader import GgufFile
from jtrain.errors import CheckpointError, ConfigError

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTSIDE = re.compile(r"(\w+)\.(weight|bias)")
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ARCHITECTURES = tuple(_CLASSES)
_FREQUENCIES = "rope_freqs.weight"
# How Llama 3.1 and 3.2 were stretched, but for the factor: their files hold the outcome only.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class Renamed(NamedTuple):
    """A tensor under its name in Hugging Face's folder."""

    name: str
    dtype: str  # safetensors' word for what `read` gives
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def renamed_tensors(file: GgufFile) -> Iterator[Renamed]:
    """All tensors in order; `rope_freqs` goes into the config.

    Raises:
      CheckpointError: a tensor that has no place in the architecture.
    """
    for name, shape in file.shapes.items():
        if name == _FREQUENCIES:
            continue
        dtype = file.types[name] if file.types[name] in ("F16", "BF16") else "F32"
        inside, outside = _BLOCK.fullmatch(name), _OUTSIDE.fullmatch(name)
        if inside and inside[2] in _INNER:
            target = f"model.layers.{inside[1]}.{_INNER[inside[2]]}.{inside[3]}"
            if file.architecture == "llama" and inside[2] in ("attn_q", "attn_k"):
                heads = file.own("attention.head_count") if inside[2] == "attn_q" else _kv_heads(file)
                yield Renamed(target, dtype, shape, partial(_read_unpermuted, file, name, heads))
                continue
        elif outside and outside[1] in _OUTER:
            target = f"{_OUTER[outside[1]]}.{outside[2]}"
        else:
            raise CheckpointError(
                f"{file.path}: the tensor {name} has no place in a model of the architecture {file.architecture}",
                "take the Hugging Face folder that the file was made from",
            )
        yield Renamed(target, dtype, shape, partial(file.read, name))


def _read_unpermuted(file: GgufFile, name: str, heads: int) -> np.ndarray:
    return unpermute(file.read(name), heads)


def unpermute(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection [H * Dh, D] in Hugging Face's order.

    llama.cpp turns neighbours 2i, 2i + 1 of a head where Hugging Face turns i, i + Dh/2, so that it has the rows of
    each head in the order 0, Dh/2, 1, Dh/2 + 1, ... (convert_hf_to_gguf.py, LlamaModel.permute).
    """
    rows = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return rows.swapaxes(1, 2).reshape(array.shape)


def config_json(file: GgufFile, special_tokens: dict[str, int]) -> dict[str, Any]:
    """config.json of transformers, with both ways to write RoPE.

    Raises:
      ConfigError: an architecture, or a variant of it, that is not read.
    """
    kind = file.architecture
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path} holds a model of the architecture {kind}",
            f"read are {', '.join(ARCHITECTURES)}: take the Hugging Face folder that the file was made from",
        )
    if file.own("expert_count", 0):
        raise ConfigError(
            f"{file.path} holds a mixture of {file.own('expert_count')} experts",
            "take the Hugging Face folder that the file was made from",
        )
    heads, hidden = file.own("attention.head_count"), file.own("embedding_length")
    head_dim = file.own("attention.key_length", hidden // heads)
    turned = file.own("rope.dimension_count", head_dim)
    values = file.own("attention.value_length", head_dim)
    if turned != head_dim or values != head_dim:
        raise ConfigError(
            f"{file.path}: heads of {head_dim} of which {turned} turn, and values of {values}",
            "read are heads of one size that turn as a whole",
        )
    theta = float(file.own("rope.freq_base", 10000.0))
    scaling = _rope_scaling(file, head_dim, theta)
    embeddings = file.shapes.get("token_embd.weight")
    if embeddings is None:
        raise CheckpointError(f"{file.path} has no token_embd.weight", "it holds no whole model: a vocabulary only?")
    config = {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "vocab_size": embeddings[0],
        "hidden_size": hidden,
        "intermediate_size": file.own("feed_forward_length"),
        "num_hidden_layers": file.own("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(file),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.own("context_length"),
        # A float32 in the file, where 1e-5 is 9.999999747e-06: the decimal number that was meant.
        "rms_norm_eps": float(f"{file.own('attention.layer_norm_rms_epsilon'):.6g}"),
        "attention_bias": "blk.0.attn_q.bias" in file.shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in file.shapes,
        "tie_word_embeddings": "output.weight" not in file.shapes,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": theta},
        **special_tokens,
    }
    if kind != "llama":
        del config["mlp_bias"]
        config |= {"use_sliding_window": False, "sliding_window": None}
    if kind == "qwen2":
        del config["attention_bias"], config["head_dim"]
    return config


def _kv_heads(file: GgufFile) -> int:
    count = file.own("attention.head_count_kv", file.own("attention.head_count"))
    if not isinstance(count, int):
        raise ConfigError(f"{file.path}: attention.head_count_kv differs by layer", "read are models of equal layers")
    return count


def _rope_scaling(file: GgufFile, head_dim: int, theta: float) -> dict[str, Any] | None:
    kind = file.own("rope.scaling.type", "none")
    factor = float(file.own("rope.scaling.factor", 1.0))
    if _FREQUENCIES in file.shapes:
        found = np.asarray(file.read(_FREQUENCIES), np.float64)
        scaling = {"rope_type": "llama3", "factor": float(round(float(found.max()), 4)), **_LLAMA3}
        if not np.allclose(found, llama3_divisors(head_dim, theta, scaling), rtol=1e-3):
            raise ConfigError(
                f"{file.path}: {_FREQUENCIES} is not what Llama 3.1 has",
                "take the Hugging Face folder it was made from",
            )
        return scaling
    if kind in ("none", None) or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        length = file.own("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    raise ConfigError(
        f"{file.path}: rope.scaling.type is {kind!r}", "read are none, linear, yarn and that of Llama 3.1"
    )


def llama3_divisors(head_dim: int, theta: float, scaling: dict[str, Any]) -> np.ndarray:
    """What each frequency is divided by (transformers/modeling_rope_utils.py, _compute_llama3_parameters) [Dh/2]."""
    length = scaling["original_max_position_embeddings"]
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    smooth = np.clip((length / waves - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
