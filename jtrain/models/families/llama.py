"""Llama 2, 3, 3.1 and what has its shape."""

from __future__ import annotations

from typing import Any

from jtrain.models.config import DecoderConfig
from jtrain.models.families.family import Family
from jtrain.models.families.keys import Slot, Tensor, linear, same


class Llama(Family):
    """RMSNorm before both blocks, grouped key-value heads, SwiGLU."""

    model_type = "llama"
    architectures = ("LlamaForCausalLM",)

    def decoder_config(self, hf: dict[str, Any]) -> DecoderConfig:
        rope = hf.get("rope_parameters") or {}
        return DecoderConfig(
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            num_hidden_layers=hf["num_hidden_layers"],
            num_attention_heads=hf["num_attention_heads"],
            num_key_value_heads=hf.get("num_key_value_heads"),
            head_dim=hf.get("head_dim"),
            max_position_embeddings=hf.get("max_position_embeddings", 2048),
            norm_eps=hf.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta", hf.get("rope_theta", 10_000.0)),
            tie_word_embeddings=hf.get("tie_word_embeddings", False),
        )

    def hf_config(self, config: DecoderConfig) -> dict[str, Any]:
        c = config
        return {
            "model_type": self.model_type,
            "architectures": list(self.architectures[:1]),
            "vocab_size": c.vocab_size,
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_hidden_layers": c.num_hidden_layers,
            "num_attention_heads": c.num_attention_heads,
            "num_key_value_heads": c.kv_heads,
            "head_dim": c.head_size,
            "hidden_act": "silu",
            "max_position_embeddings": c.max_position_embeddings,
            "rms_norm_eps": c.norm_eps,
            "rope_theta": c.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
            "tie_word_embeddings": c.tie_word_embeddings,
        }

    def tensors(self, config: DecoderConfig) -> list[Tensor]:
        c = config
        d, f, h, k, s = c.hidden_size, c.intermediate_size, c.num_attention_heads, c.kv_heads, c.head_size
        out = [same("model.embed_tokens.weight", Slot("embed_tokens/embedding"), c.vocab_size, d)]
        for n in range(c.num_hidden_layers):
            at, i = f"model.layers.{n}", (n,)
            out += [
                same(f"{at}.input_layernorm.weight", Slot("layers/attention_norm/scale", i), d),
                linear(f"{at}.self_attn.q_proj.weight", Slot("layers/attention/q_proj/kernel", i), (d,), (h, s)),
                linear(f"{at}.self_attn.k_proj.weight", Slot("layers/attention/k_proj/kernel", i), (d,), (k, s)),
                linear(f"{at}.self_attn.v_proj.weight", Slot("layers/attention/v_proj/kernel", i), (d,), (k, s)),
                linear(f"{at}.self_attn.o_proj.weight", Slot("layers/attention/o_proj/kernel", i), (h, s), (d,)),
                same(f"{at}.post_attention_layernorm.weight", Slot("layers/mlp_norm/scale", i), d),
                linear(f"{at}.mlp.gate_proj.weight", Slot("layers/mlp/gate_proj/kernel", i), (d,), (f,)),
                linear(f"{at}.mlp.up_proj.weight", Slot("layers/mlp/up_proj/kernel", i), (d,), (f,)),
                linear(f"{at}.mlp.down_proj.weight", Slot("layers/mlp/down_proj/kernel", i), (f,), (d,)),
            ]
        out.append(same("model.norm.weight", Slot("final_norm/scale"), d))
        if not c.tie_word_embeddings:
            out.append(linear("lm_head.weight", Slot("lm_head/kernel"), (d,), (c.vocab_size,)))
        return out
