"""Named decoder shapes. A preset is a shape only: it holds no weights.

Shapes are those of the published `config.json` files; `llama-tiny` to `llama-400m` are ours, for laptops and tests.
deepseek-v3 is the model without its additional layer for the prediction of further tokens.
"""

from __future__ import annotations

import difflib
from typing import Any

from jtrain.errors import ConfigError
from jtrain.models.config import DecoderConfig
from jtrain.models.rope_scaling import RopeScaling, yarn_scale


def _llama(d: int, f: int, layers: int, heads: int, kv: int, *, vocab: int = 32_000, **rest: Any) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=d,
        intermediate_size=f,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        **rest,
    )


def _llama3(d: int, f: int, layers: int, heads: int, kv: int, **rest: Any) -> DecoderConfig:
    fields = {"max_position_embeddings": 8192, "rope_theta": 500_000.0} | rest
    return _llama(d, f, layers, heads, kv, vocab=128_256, **fields)


def _gpt2(d: int, layers: int, heads: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=50_257,
        hidden_size=d,
        intermediate_size=4 * d,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=1024,
        position_embedding="learned",
        tie_word_embeddings=True,
        norm="layernorm",
        activation="gelu",
        attention_bias=True,
        mlp_bias=True,
    )


def _smollm2(d: int, f: int, layers: int, heads: int, kv: int, *, theta: float = 100_000.0) -> DecoderConfig:
    return _llama(
        d,
        f,
        layers,
        heads,
        kv,
        vocab=49_152,
        max_position_embeddings=8192,
        rope_theta=theta,
        tie_word_embeddings=True,
    )


_LONG = {"max_position_embeddings": 131_072}
_STRETCH_8 = RopeScaling(factor=8.0)
_STRETCH_32 = RopeScaling(factor=32.0)

PRESETS: dict[str, DecoderConfig] = {
    "llama-tiny": _llama(128, 512, 4, 4, 2, vocab=1024, tie_word_embeddings=True),
    "llama-15m": _llama(288, 768, 6, 6, 6, tie_word_embeddings=True),
    "llama-60m": _llama(512, 1376, 8, 8, 8),
    "llama-150m": _llama(768, 2048, 12, 12, 12),
    "llama-400m": _llama(1024, 2816, 24, 16, 16),
    "gpt2-124m": _gpt2(768, 12, 12),
    "gpt2-355m": _gpt2(1024, 24, 16),
    "gpt2-774m": _gpt2(1280, 36, 20),
    "gpt2-1.5b": _gpt2(1600, 48, 25),
    "smollm2-135m": _smollm2(576, 1536, 30, 9, 3),
    "smollm2-360m": _smollm2(960, 2560, 32, 15, 5),
    "smollm2-1.7b": _smollm2(2048, 8192, 24, 32, 32, theta=130_000.0),
    "llama2-7b": _llama(4096, 11_008, 32, 32, 32, max_position_embeddings=4096),
    "llama2-13b": _llama(5120, 13_824, 40, 40, 40, max_position_embeddings=4096),
    "llama2-70b": _llama(8192, 28_672, 80, 64, 8, max_position_embeddings=4096),
    "llama3-8b": _llama3(4096, 14_336, 32, 32, 8),
    "llama3-70b": _llama3(8192, 28_672, 80, 64, 8),
    "llama3.1-8b": _llama3(4096, 14_336, 32, 32, 8, rope_scaling=_STRETCH_8, **_LONG),
    "llama3.1-70b": _llama3(8192, 28_672, 80, 64, 8, rope_scaling=_STRETCH_8, **_LONG),
    "llama3-405b": _llama3(16_384, 53_248, 126, 128, 8, rope_scaling=_STRETCH_8, **_LONG),
    "llama3.2-1b": _llama3(
        2048, 8192, 16, 32, 8, head_dim=64, rope_scaling=_STRETCH_32, tie_word_embeddings=True, **_LONG
    ),
    "llama3.2-3b": _llama3(
        3072, 8192, 28, 24, 8, head_dim=128, rope_scaling=_STRETCH_32, tie_word_embeddings=True, **_LONG
    ),
    "mistral-7b": _llama(4096, 14_336, 32, 32, 8, vocab=32_768, max_position_embeddings=32_768, rope_theta=1e6),
    "moe-tiny": _llama(
        128, 512, 4, 4, 2, vocab=1024, tie_word_embeddings=True, num_experts=8, moe_intermediate_size=256
    ),
    "mixtral-8x7b": _llama(
        4096,
        14_336,
        32,
        32,
        8,
        max_position_embeddings=32_768,
        rope_theta=1e6,
        num_experts=8,
        router_aux_loss_coef=0.02,
    ),
    "qwen3-30b-a3b": _llama(
        2048,
        6144,
        48,
        32,
        4,
        vocab=151_936,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_theta=1e6,
        norm_eps=1e-6,
        qk_norm="head",
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "deepseek-v3": _llama(
        7168,
        18_432,
        61,
        128,
        128,
        vocab=129_280,
        max_position_embeddings=163_840,
        rope_scaling=RopeScaling(rope_type="yarn", factor=40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0),
        rope_interleave=True,
        attention_scale=192**-0.5 * yarn_scale(40.0) ** 2,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        norm_eps=1e-6,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        n_shared_experts=1,
        n_group=8,
        topk_group=4,
        scoring_func="sigmoid",
        routed_scaling_factor=2.5,
        router_aux_loss_coef=1e-4,
        router_bias_update_rate=1e-3,
        first_k_dense_replace=3,
    ),
    "mistral-nemo-12b": _llama(
        5120, 14_336, 40, 32, 8, vocab=131_072, head_dim=128, max_position_embeddings=131_072, rope_theta=1e6
    ),
}


def preset(name: str, **changes: Any) -> DecoderConfig:
    """The shape called `name`, with every field in `changes` that is not None replaced.

    A changed width or head count drops the preset's own `head_dim`, which belonged to the old ones.

    Raises:
      ConfigError: no preset has this name (the message holds the nearest one), or the result makes no decoder.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.4)
        guess = f"Did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"model.preset is {name!r}, which is no preset", f"{guess}Presets: {', '.join(PRESETS)}.")
    given = {key: value for key, value in changes.items() if value is not None}
    if ("hidden_size" in given or "num_attention_heads" in given) and "head_dim" not in given:
        given["head_dim"] = None
    return PRESETS[name].replace(**given)
