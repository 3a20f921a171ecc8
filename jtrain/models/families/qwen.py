"""Qwen 2 (biases on q, k, v), Qwen 3 (norms on queries and keys) and Qwen 3 with experts."""

from __future__ import annotations

from typing import Any

from jtrain.models.config import DecoderConfig
from jtrain.models.families import blocks
from jtrain.models.families.fields import Fields
from jtrain.models.families.keys import Tensor
from jtrain.models.families.llama import DEFAULTS, Llama
from jtrain.models.families.translation import SILU, SIZES, layer_kinds, read_windows

_QWEN = DEFAULTS | {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "use_sliding_window": False,
}


class Qwen2(Llama):
    """Qwen 2 and 2.5."""

    model_type = "qwen2"
    architectures = ("Qwen2ForCausalLM",)
    names = SIZES | {"head_dim": "head_dim"}
    defaults = _QWEN
    fixed = {"attention_bias": True, "attention_out_bias": False}
    only = {"hidden_act": SILU, "use_mrope": (False,)}

    def read(self, fields: Fields) -> dict[str, Any]:
        """The first `max_window_layers` layers see all, the others slide, unless the file lists the kinds."""
        window, first = fields.get("sliding_window"), fields.get("max_window_layers")
        slides = fields.get("use_sliding_window") and window is not None
        kinds = [
            "sliding_attention" if slides and n >= first else "full_attention"
            for n in range(fields.get("num_hidden_layers"))
        ]
        return read_windows(fields, window if slides else None, kinds)

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        kinds = layer_kinds(config)
        full = kinds.index("sliding_attention") if "sliding_attention" in kinds else config.num_hidden_layers
        return {
            "use_sliding_window": config.sliding_window is not None,
            "sliding_window": config.sliding_window,
            "max_window_layers": full,
            "layer_types": kinds,
        }


class Qwen3(Qwen2):
    """Qwen 3, dense."""

    model_type = "qwen3"
    architectures = ("Qwen3ForCausalLM",)
    names = SIZES | {"head_dim": "head_dim", "attention_bias": "attention_bias"}
    defaults = _QWEN | {"head_dim": 128}
    fixed = {"qk_norm": "head"}


class Qwen3Moe(Llama):
    """Qwen 3 with experts in every layer."""

    model_type = "qwen3_moe"
    architectures = ("Qwen3MoeForCausalLM",)
    experts = True
    names = SIZES | {
        "head_dim": "head_dim",
        "attention_bias": "attention_bias",
        "num_experts_per_tok": "num_experts_per_tok",
        "moe_intermediate_size": "moe_intermediate_size",
        "norm_topk_prob": "norm_topk_prob",
        "router_aux_loss_coef": "router_aux_loss_coef",
    }
    defaults = DEFAULTS | {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
        "sliding_window": 4096,
    }
    fixed = {"qk_norm": "head"}
    only = {"hidden_act": SILU, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}

    def read(self, fields: Fields) -> dict[str, Any]:
        slides = fields.get("use_sliding_window", False)
        fields.get("max_window_layers")  # of no effect here: all layers slide, or none
        fields.seen.add("num_local_experts")
        return {
            "sliding_window": fields.get("sliding_window") if slides else None,
            "num_experts": fields.get("num_experts") or fields.get("num_local_experts", 128),
        }

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return {
            "use_sliding_window": config.sliding_window is not None,
            "sliding_window": config.sliding_window,
            "num_experts": config.num_experts,
            "num_local_experts": config.num_experts,
        }

    def feed_forward(self, layer: blocks.Layer) -> list[Tensor]:
        return blocks.experts(layer)
