"""GPT-2: LayerNorm, learned positions, biases everywhere, q, k and v in one kernel, [in, out] on disk."""

from __future__ import annotations

from typing import Any

from jtrain.models.config import DecoderConfig
from jtrain.models.families import blocks
from jtrain.models.families.fields import Fields
from jtrain.models.families.keys import Slot, Tensor, conv1d, fused, same
from jtrain.models.families.translation import TANH_GELU, Table


class GPT2(Table):
    """GPT-2 and DistilGPT-2."""

    model_type = "gpt2"
    architectures = ("GPT2LMHeadModel",)
    ignored = (r"transformer\.h\.\d+\.attn\.(masked_)?bias",)
    names = {
        "vocab_size": "vocab_size",
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "norm_eps",
        "initializer_range": "initializer_range",
        "tie_word_embeddings": "tie_word_embeddings",
    }
    defaults = {
        "vocab_size": 50_257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    }
    fixed = {"norm": "layernorm", "attention_bias": True, "mlp_bias": True, "position_embedding": "learned"}
    only = {"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)}

    def read_positions(self, fields: Fields) -> dict[str, Any]:
        return {}

    def write_positions(self, config: DecoderConfig) -> dict[str, Any]:
        return {}

    def read(self, fields: Fields) -> dict[str, Any]:
        kind = fields.only("activation_function", (TANH_GELU[1], TANH_GELU[0], "gelu"))
        return {
            "intermediate_size": fields.get("n_inner") or 4 * fields.get("n_embd"),
            "activation": "gelu_exact" if kind == "gelu" else "gelu",
        }

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return {
            "n_inner": config.intermediate_size,
            "activation_function": "gelu" if config.activation == "gelu_exact" else TANH_GELU[1],
        }

    def tensors(self, config: DecoderConfig) -> list[Tensor]:
        c = config
        d, f, heads = c.hidden_size, c.intermediate_size, (c.num_attention_heads, c.head_size)
        positions = Slot("embed_positions/embedding")
        out = [blocks.embedding(c, "transformer.wte.weight")]
        out.append(same("transformer.wpe.weight", positions, c.max_position_embeddings, d))
        for layer in blocks.layers(c, "transformer.h."):
            key, slot = layer.key, layer.slot
            kernels = [slot(f"attention/{p}_proj/kernel") for p in "qkv"]
            biases = [slot(f"attention/{p}_proj/bias") for p in "qkv"]
            out += [
                *blocks.norm(layer, "ln_1", "attention_norm"),
                fused([conv1d(key("attn.c_attn.weight"), one, (d,), heads) for one in kernels], axis=1),
                fused([same(key("attn.c_attn.bias"), one, d, ours=heads) for one in biases]),
                conv1d(key("attn.c_proj.weight"), slot("attention/o_proj/kernel"), heads, (d,)),
                same(key("attn.c_proj.bias"), slot("attention/o_proj/bias"), d),
                *blocks.norm(layer, "ln_2", "mlp_norm"),
                conv1d(key("mlp.c_fc.weight"), slot("mlp/up_proj/kernel"), (d,), (f,)),
                same(key("mlp.c_fc.bias"), slot("mlp/up_proj/bias"), f),
                conv1d(key("mlp.c_proj.weight"), slot("mlp/down_proj/kernel"), (f,), (d,)),
                same(key("mlp.c_proj.bias"), slot("mlp/down_proj/bias"), d),
            ]
        return out + blocks.final_norm(c, "transformer.ln_f") + blocks.head(c)

    def rename(self, key: str) -> str:
        """The folders of the model without its head, OpenAI's own among them, have no `transformer.`."""
        return f"transformer.{key}" if key.startswith(("wte.", "wpe.", "h.", "ln_f.")) else key
