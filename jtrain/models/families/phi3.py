"""Phi-3 and Phi-4: q, k, v in one kernel, gate and up in another, LongRoPE, part of a head turns."""

from __future__ import annotations

from typing import Any

from jtrain.errors import ConfigError
from jtrain.models.config import DecoderConfig
from jtrain.models.families import blocks
from jtrain.models.families.fields import Fields
from jtrain.models.families.keys import Tensor, fused, linear
from jtrain.models.families.llama import DEFAULTS, Llama
from jtrain.models.families.rope_schema import read_rope, write_rope
from jtrain.models.families.translation import SILU, SIZES


class Phi3(Llama):
    """Phi-3."""

    model_type = "phi3"
    architectures = ("Phi3ForCausalLM",)
    names = SIZES | {"sliding_window": "sliding_window"}
    defaults = DEFAULTS | {
        "vocab_size": 32_064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
    }

    only = {"hidden_act": SILU, "attention_bias": (False,)}

    def read_positions(self, fields: Fields) -> dict[str, Any]:
        fields.get("original_max_position_embeddings")
        return read_rope(
            fields, partial="partial_rotary_factor", aliases={"yarn": "longrope"}
        )  # as transformers has it: early folders said so

    def write_positions(self, config: DecoderConfig) -> dict[str, Any]:
        """transformers 4 wants three fields exactly: it has the factor from the two lengths."""
        out = write_rope(config, partial="partial_rotary_factor")
        scaling = out["rope_scaling"]
        if scaling is None:
            return out
        if scaling["rope_type"] != "longrope":
            raise ConfigError(f"rope_scaling.rope_type is {scaling['rope_type']}", "phi3 knows longrope only.")
        original = scaling.pop("original_max_position_embeddings")
        scaling["type"] = scaling.pop("rope_type")
        if scaling["factor"] == config.max_position_embeddings / original:
            del scaling["factor"]
        return out

    def tensors(self, config: DecoderConfig) -> list[Tensor]:
        out = [blocks.embedding(config)]
        for layer in blocks.layers(config):
            out += self.norms(layer) + self._blocks(layer)
        return out + blocks.final_norm(config) + blocks.head(config)

    def _blocks(self, layer: blocks.Layer) -> list[Tensor]:
        c = layer.config
        d, f, s = c.hidden_size, c.intermediate_size, c.head_size
        heads = {"q": c.num_attention_heads, "k": c.kv_heads, "v": c.kv_heads}
        qkv, gate_up = layer.key("self_attn.qkv_proj.weight"), layer.key("mlp.gate_up_proj.weight")
        return [
            fused([linear(qkv, layer.slot(f"attention/{p}_proj/kernel"), (d,), (h, s)) for p, h in heads.items()]),
            *blocks.attention_out(layer, "self_attn.o_proj"),
            fused([linear(gate_up, layer.slot(f"mlp/{p}_proj/kernel"), (d,), (f,)) for p in ("gate", "up")]),
            linear(layer.key("mlp.down_proj.weight"), layer.slot("mlp/down_proj/kernel"), (f,), (d,)),
        ]
