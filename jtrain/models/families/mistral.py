"""Mistral (a sliding window on every layer) and Mixtral (with experts)."""

from __future__ import annotations

from typing import Any

from jtrain.models.config import DecoderConfig
from jtrain.models.families import blocks
from jtrain.models.families.fields import Fields
from jtrain.models.families.keys import Tensor
from jtrain.models.families.llama import DEFAULTS, Llama
from jtrain.models.families.translation import SILU, SIZES

_MISTRAL = DEFAULTS | {
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}


class Mistral(Llama):
    """Mistral 7B, Nemo and those after it."""

    model_type = "mistral"
    architectures = ("MistralForCausalLM",)
    names = SIZES | {"head_dim": "head_dim", "sliding_window": "sliding_window"}
    defaults = _MISTRAL


class Mixtral(Mistral):
    """Mixtral: two of eight experts, their weights normalised."""

    model_type = "mixtral"
    architectures = ("MixtralForCausalLM",)
    experts = True
    names = SIZES | {
        "head_dim": "head_dim",
        "sliding_window": "sliding_window",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "router_aux_loss_coef": "router_aux_loss_coef",
    }
    defaults = _MISTRAL | {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    }
    only = {"hidden_act": SILU, "router_jitter_noise": (0.0,)}

    def read(self, fields: Fields) -> dict[str, Any]:
        return {"moe_intermediate_size": fields.get("intermediate_size")}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return {"intermediate_size": config.expert_size}

    def feed_forward(self, layer: blocks.Layer) -> list[Tensor]:
        return blocks.experts(layer, "block_sparse_moe.", ("w1", "w3", "w2"))
