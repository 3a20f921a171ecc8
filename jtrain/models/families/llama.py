"""Llama 2, 3, 3.1 and what has its shape: RMSNorm before both blocks, grouped key-value heads, SwiGLU."""

from __future__ import annotations

from typing import Any

from jtrain.models.config import DecoderConfig
from jtrain.models.families import blocks
from jtrain.models.families.keys import Tensor
from jtrain.models.families.translation import SIZES, Table

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "mlp_bias": False,
}


class Llama(Table):
    """Llama; its key map serves every family with these blocks and names."""

    model_type = "llama"
    architectures = ("LlamaForCausalLM",)
    names = SIZES | {"head_dim": "head_dim", "attention_bias": "attention_bias", "mlp_bias": "mlp_bias"}
    defaults = DEFAULTS

    def tensors(self, config: DecoderConfig) -> list[Tensor]:
        out = [blocks.embedding(config)]
        for layer in blocks.layers(config):
            out += self.norms(layer) + blocks.attention(layer) + self.feed_forward(layer)
        return out + blocks.final_norm(config) + blocks.head(config)

    def norms(self, layer: blocks.Layer) -> list[Tensor]:
        """The norms of a layer."""
        return [
            *blocks.norm(layer, "input_layernorm", "attention_norm"),
            *blocks.norm(layer, "post_attention_layernorm", "mlp_norm"),
        ]

    def feed_forward(self, layer: blocks.Layer) -> list[Tensor]:
        """The feed-forward of a layer."""
        return blocks.feed_forward(layer)

    def rename(self, key: str) -> str:
        """A key of the model without its head has no `model.`."""
        bare = key.startswith(("layers.", "embed_tokens.", "norm."))
        return f"model.{key}" if bare else key
