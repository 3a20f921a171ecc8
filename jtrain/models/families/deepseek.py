"""DeepSeek-V3 and R1: latent attention, sigmoid routing in groups with a bias for the choice, shared experts."""

from __future__ import annotations

import re
from math import log
from typing import Any

from jtrain.errors import ConfigError
from jtrain.models.config import DecoderConfig
from jtrain.models.families import blocks
from jtrain.models.families.fields import Fields
from jtrain.models.families.keys import Slot, Tensor, linear, same
from jtrain.models.families.llama import DEFAULTS, Llama
from jtrain.models.families.translation import SILU, SIZES
from jtrain.models.rope_scaling import RopeScaling

_SHARED = {name: name for name in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
_SHARED |= {name: name for name in ("n_shared_experts", "n_group", "topk_group", "routed_scaling_factor")}
_SHARED |= {name: name for name in ("num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size")}
_SHARED |= {name: name for name in ("first_k_dense_replace", "rope_interleave")}


class DeepseekV3(Llama):
    """DeepSeek-V3. The layers for predicting several tokens are left out, as transformers does."""

    model_type = "deepseek_v3"
    architectures = ("DeepseekV3ForCausalLM",)
    experts = True
    names = SIZES | _SHARED | {"n_routed_experts": "num_experts", "aux_loss_alpha": "router_aux_loss_coef"}
    defaults = DEFAULTS | {
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "rope_interleave": True,
        "aux_loss_alpha": 0.001,
    }
    fixed = {"scoring_func": "sigmoid", "score_correction_bias": True}
    only = {
        "hidden_act": SILU,
        "attention_bias": (False,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    }

    def read_positions(self, fields: Fields) -> dict[str, Any]:
        fields.seen |= {"head_dim", "qk_head_dim"}  # follow from the others
        positions = super().read_positions(fields)
        size = fields.get("qk_nope_head_dim") + fields.get("qk_rope_head_dim")
        return positions | {"attention_scale": size**-0.5 * _stretch(positions["rope_scaling"])}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        if not config.latent:
            raise ConfigError("model.kv_lora_rank is not set", "deepseek_v3 has latent attention only.")
        return {"head_dim": config.qk_rope_head_dim, "num_nextn_predict_layers": 0}

    def tensors(self, config: DecoderConfig) -> list[Tensor]:
        out = [blocks.embedding(config)]
        for layer in blocks.layers(config):
            out += self.norms(layer) + _attention(layer)
            out += _experts(layer) if layer.experts else blocks.feed_forward(layer)
        return out + blocks.final_norm(config) + blocks.head(config)

    def ignores(self, key: str, config: DecoderConfig) -> bool:
        layer = re.match(r"model\.layers\.(\d+)\.", key)
        if layer and int(layer[1]) >= config.num_hidden_layers:
            return True
        return super().ignores(key, config)


def _stretch(scaling: RopeScaling | None) -> float:
    """What YaRN multiplies the scores by: mscale(factor, mscale_all_dim)^2."""
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
        return 1.0
    return (0.1 * scaling.mscale_all_dim * log(scaling.factor) + 1.0) ** 2


def _attention(layer: blocks.Layer) -> list[Tensor]:
    c = layer.config
    d, h, rank, rope = c.hidden_size, c.num_attention_heads, c.kv_lora_rank or 0, c.qk_rope_head_dim or 0

    def kernel(key: str, path: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Tensor:
        return linear(layer.key(f"self_attn.{key}.weight"), layer.slot(f"attention/{path}/kernel"), inputs, outputs)

    def scale(key: str, path: str, size: int) -> Tensor:
        return same(layer.key(f"self_attn.{key}.weight"), layer.slot(f"attention/{path}/scale"), size)

    if c.q_lora_rank is None:
        out = [kernel("q_proj", "q_proj", (d,), (h, c.head_size))]
    else:
        out = [
            kernel("q_a_proj", "q_a_proj", (d,), (c.q_lora_rank,)),
            scale("q_a_layernorm", "q_a_norm", c.q_lora_rank),
            kernel("q_b_proj", "q_b_proj", (c.q_lora_rank,), (h, c.head_size)),
        ]
    return [
        *out,
        kernel("kv_a_proj_with_mqa", "kv_a_proj", (d,), (rank + rope,)),
        scale("kv_a_layernorm", "kv_a_norm", rank),
        kernel("kv_b_proj", "kv_b_proj", (rank,), (h, (c.qk_nope_head_dim or 0) + c.value_size)),
        *blocks.attention_out(layer, "self_attn.o_proj"),
    ]


def _experts(layer: blocks.Layer) -> list[Tensor]:
    c = layer.config
    d, f = c.hidden_size, c.n_shared_experts * c.expert_size
    bias = Slot("router_bias", (layer.index,), variable=True)
    out = [*blocks.experts(layer), same(layer.key("mlp.gate.e_score_correction_bias"), bias, c.num_experts)]
    if c.n_shared_experts:
        for name in ("gate_proj", "up_proj", "down_proj"):
            inputs, outputs = ((f,), (d,)) if name == "down_proj" else ((d,), (f,))
            key = layer.key(f"mlp.shared_experts.{name}.weight")
            out.append(linear(key, layer.slot(f"mlp/shared_experts/{name}"), inputs, outputs))
    return out
