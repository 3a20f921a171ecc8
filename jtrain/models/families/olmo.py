"""OLMo 2 (norms after the blocks) and OLMoE (experts): one norm over all query heads, one over all key heads."""

from __future__ import annotations

from typing import Any

from jtrain.models.config import DecoderConfig
from jtrain.models.families import blocks
from jtrain.models.families.keys import Tensor
from jtrain.models.families.llama import DEFAULTS, Llama
from jtrain.models.families.translation import SIZES

_OLMO: dict[str, Any] = DEFAULTS | {"vocab_size": 50_304, "rms_norm_eps": 1e-5}


class Olmo2(Llama):
    """OLMo 2."""

    model_type = "olmo2"
    architectures = ("Olmo2ForCausalLM",)
    names = SIZES | {"head_dim": "head_dim", "attention_bias": "attention_bias"}
    defaults = _OLMO
    fixed = {"norm_position": "post", "qk_norm": "full"}

    def norms(self, layer: blocks.Layer) -> list[Tensor]:
        return [
            *blocks.norm(layer, "post_attention_layernorm", "post_attention_norm"),
            *blocks.norm(layer, "post_feedforward_layernorm", "post_mlp_norm"),
        ]


class Olmoe(Llama):
    """OLMoE; the weights of a token's experts are not normalised by default."""

    model_type = "olmoe"
    architectures = ("OlmoeForCausalLM",)
    experts = True
    names = SIZES | {
        "attention_bias": "attention_bias",
        "clip_qkv": "clip_qkv",
        "num_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "norm_topk_prob": "norm_topk_prob",
        "router_aux_loss_coef": "router_aux_loss_coef",
    }
    defaults = _OLMO | {
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.01,
    }
    fixed = {"qk_norm": "full"}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return {"intermediate_size": config.expert_size}

    def feed_forward(self, layer: blocks.Layer) -> list[Tensor]:
        return blocks.experts(layer)
