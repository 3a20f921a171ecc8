"""gpt-oss: attention sinks, every other layer slides, experts stacked on disk with gate and up channel by channel."""

from __future__ import annotations

from typing import Any

from jtrain.models.config import DecoderConfig
from jtrain.models.families import blocks
from jtrain.models.families.fields import Fields
from jtrain.models.families.keys import Tensor, interleaved, linear, same
from jtrain.models.families.llama import DEFAULTS, Llama
from jtrain.models.families.translation import SILU, SIZES, layer_kinds, read_windows


class GptOss(Llama):
    """gpt-oss. Its softmax over the chosen experts is that over all, normalised."""

    model_type = "gpt_oss"
    architectures = ("GptOssForCausalLM",)
    experts = True
    names = SIZES | {
        "head_dim": "head_dim",
        "attention_bias": "attention_bias",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_tok",
        "router_aux_loss_coef": "router_aux_loss_coef",
        "swiglu_alpha": "swiglu_alpha",
        "swiglu_limit": "swiglu_limit",
    }
    defaults = DEFAULTS | {
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "router_aux_loss_coef": 0.001,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "sliding_window": 128,
    }
    fixed = {"attention_sinks": True, "activation": "swiglu_clamped", "router_offset": True, "expert_bias": True}
    only = {"hidden_act": SILU}

    def read(self, fields: Fields) -> dict[str, Any]:
        count = fields.get("num_hidden_layers")
        kinds = ["full_attention" if n % 2 else "sliding_attention" for n in range(count)]
        fields.seen.add("experts_per_token")  # another name of num_experts_per_tok
        return {
            "moe_intermediate_size": fields.get("intermediate_size"),
            **read_windows(fields, fields.get("sliding_window"), kinds),
        }

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return {
            "intermediate_size": config.expert_size,
            "layer_types": layer_kinds(config),
            "sliding_window": config.sliding_window or config.max_position_embeddings,
        }

    def feed_forward(self, layer: blocks.Layer) -> list[Tensor]:
        c = layer.config
        e, d, f = c.num_experts, c.hidden_size, c.expert_size
        key, slot = layer.key, layer.slot
        kernels = [slot(f"mlp/experts/{name}_proj") for name in ("gate", "up")]
        biases = [slot(f"mlp/experts/{name}_bias") for name in ("gate", "up")]
        gate_up = key("mlp.experts.gate_up_proj")
        return [
            linear(key("mlp.router.weight"), slot("mlp/router"), (d,), (e,)),
            same(key("mlp.router.bias"), slot("mlp/router_offset"), e),
            interleaved([same(gate_up, one, e, d, f) for one in kernels], f, 2),
            interleaved([same(f"{gate_up}_bias", one, e, f) for one in biases], f, 1),
            same(key("mlp.experts.down_proj"), slot("mlp/experts/down_proj"), e, f, d),
            same(key("mlp.experts.down_proj_bias"), slot("mlp/experts/down_bias"), e, d),
        ]
