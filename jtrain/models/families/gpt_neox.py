"""GPT-NeoX and Pythia: LayerNorm, both blocks side by side, part of a head turns, q, k and v head by head."""

from __future__ import annotations

from typing import Any

from jtrain.models.config import DecoderConfig
from jtrain.models.families import blocks
from jtrain.models.families.fields import Fields
from jtrain.models.families.keys import Tensor, interleaved, linear, same
from jtrain.models.families.rope_schema import read_rope, write_rope
from jtrain.models.families.translation import TANH_GELU, Table


class GPTNeoX(Table):
    """GPT-NeoX."""

    model_type = "gpt_neox"
    architectures = ("GPTNeoXForCausalLM",)
    ignored = (r"gpt_neox\.layers\.\d+\.attention\.((masked_)?bias|rotary_emb\.inv_freq)",)
    names = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "max_position_embeddings": "max_position_embeddings",
        "layer_norm_eps": "norm_eps",
        "initializer_range": "initializer_range",
        "tie_word_embeddings": "tie_word_embeddings",
        "use_parallel_residual": "parallel_residual",
        "attention_bias": "attention_bias",
    }
    defaults = {
        "vocab_size": 50_432,
        "hidden_size": 6144,
        "intermediate_size": 24_576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "attention_bias": True,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10_000.0,
    }
    fixed = {"norm": "layernorm", "mlp_bias": True}
    only = {}

    def read_positions(self, fields: Fields) -> dict[str, Any]:
        return read_rope(fields, theta="rotary_emb_base", partial="rotary_pct")

    def write_positions(self, config: DecoderConfig) -> dict[str, Any]:
        return write_rope(config, theta="rotary_emb_base", partial="rotary_pct")

    def read(self, fields: Fields) -> dict[str, Any]:
        fields.seen |= {"rope_theta", "partial_rotary_factor"}  # transformers 4.57's second names for the two
        kind = fields.only("hidden_act", ("gelu", *TANH_GELU))
        return {"activation": "gelu_exact" if kind == "gelu" else "gelu"}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return {"hidden_act": "gelu" if config.activation == "gelu_exact" else TANH_GELU[0]}

    def tensors(self, config: DecoderConfig) -> list[Tensor]:
        c = config
        d, h, s = c.hidden_size, c.num_attention_heads, c.head_size
        out = [blocks.embedding(c, "gpt_neox.embed_in.weight")]
        for layer in blocks.layers(c, "gpt_neox.layers."):
            key, slot = layer.key, layer.slot
            kernels = [slot(f"attention/{p}_proj/kernel") for p in "qkv"]
            biases = [slot(f"attention/{p}_proj/bias") for p in "qkv"]
            qkv = key("attention.query_key_value.weight")
            out += blocks.norm(layer, "input_layernorm", "attention_norm")
            out += blocks.norm(layer, "post_attention_layernorm", "mlp_norm")
            parts = [linear(qkv, one, (d,), (h, s)) for one in kernels]
            out.append(interleaved(parts, h, 0))
            if c.attention_bias:
                qkv = key("attention.query_key_value.bias")
                out.append(interleaved([same(qkv, one, d, ours=(h, s)) for one in biases], h, 0))
            out += blocks.attention_out(layer, "attention.dense")
            out += blocks.feed_forward(layer, "mlp.", {"up_proj": "dense_h_to_4h", "down_proj": "dense_4h_to_h"})
        return out + blocks.final_norm(c, "gpt_neox.final_layer_norm") + blocks.head(c, "embed_out.weight")

    def ignores(self, key: str, config: DecoderConfig) -> bool:
        return super().ignores("lm_head.weight" if key == "embed_out.weight" else key, config)

    def rename(self, key: str) -> str:
        """transformers 5 calls the head `lm_head`; a model without it has no `gpt_neox.`."""
        if key == "lm_head.weight":
            return "embed_out.weight"
        return f"gpt_neox.{key}" if key.startswith(("embed_in.", "layers.", "final_layer_norm.")) else key
