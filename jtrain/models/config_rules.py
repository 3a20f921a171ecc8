"""What makes a decoder: the rules of `jtrain.models.config.DecoderConfig`, in plain Python."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, get_args

from jtrain.errors import ConfigError
from jtrain.models import config as fields

if TYPE_CHECKING:
    from jtrain.models.config import DecoderConfig

_AT_LEAST_ONE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip
_POSITIVE = (
    "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "sliding_window", "embedding_multiplier",
    "residual_multiplier", "logits_scaling", "final_logit_softcapping", "attn_logit_softcapping", "clip_qkv",
    "attention_scale", "swiglu_limit", "swiglu_alpha", "kv_lora_rank", "q_lora_rank",
)  # fmt: skip
_CHOICES = {
    "norm": fields.Norm,
    "norm_position": fields.NormPosition,
    "qk_norm": fields.QkNorm,
    "position_embedding": fields.Positions,
    "activation": fields.Activation,
    "remat": fields.Remat,
    "attention": fields.Kernel,
    "scoring_func": fields.Scoring,
    "expert_kernel": fields.ExpertKernel,
}
_OF_EXPERTS = (
    "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "scoring_func", "norm_topk_prob",
    "routed_scaling_factor", "n_group", "topk_group", "score_correction_bias", "router_offset", "expert_bias",
    "router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_rate", "first_k_dense_replace",
    "expert_capacity_factor", "expert_kernel",
)  # fmt: skip
"""Fields that count beside `num_experts` only."""
_OF_LATENT = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave")
"""Fields that count beside `kv_lora_rank` only."""


def check_decoder(c: DecoderConfig) -> None:
    """Sees that the fields make a decoder.

    Raises:
      ConfigError: they do not; the message names the field, its value and a legal one.
    """
    for name in _AT_LEAST_ONE:
        if getattr(c, name) < 1:
            raise ConfigError(f"model.{name} is {getattr(c, name)}", "Write a number of at least 1.")
    for name in _POSITIVE:
        value = getattr(c, name)
        if value is not None and not value > 0:
            raise ConfigError(f"model.{name} is {value}", "Write a number above 0.")
    for name, choices in _CHOICES.items():
        if getattr(c, name) not in get_args(choices):
            raise ConfigError(f"model.{name} is {getattr(c, name)!r}", f"Choose one of {', '.join(get_args(choices))}.")
    if not 0.0 <= c.dropout < 1.0:
        raise ConfigError(f"model.dropout is {c.dropout}", "Write a rate of at least 0 and below 1.")
    _check_heads(c)
    _check_latent(c)
    _check_layers(c)
    _check_rope(c)
    _check_experts(c)


def _check_heads(c: DecoderConfig) -> None:
    if not c.causal and (c.latent or c.sliding_window is not None):
        raise ConfigError(
            "model.causal is false, beside a window or latent attention",
            "An encoder has plain attention over all tokens.",
        )
    if c.head_dim is None and not c.latent and c.hidden_size % c.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size {c.hidden_size} is not divisible by model.num_attention_heads {c.num_attention_heads}",
            "Change one of them, or set model.head_dim.",
        )
    if c.kv_heads < 1 or c.num_attention_heads % c.kv_heads:
        raise ConfigError(
            f"model.num_attention_heads {c.num_attention_heads} is not divisible by "
            f"model.num_key_value_heads {c.kv_heads}",
            f"Key-value heads may be {_divisors(c.num_attention_heads)}.",
        )


def _check_latent(c: DecoderConfig) -> None:
    if not c.latent:
        given = [name for name in _OF_LATENT if getattr(c, name) not in (None, False)]
        if given:
            raise ConfigError(
                f"model.{given[0]} is {getattr(c, given[0])}, and the model has no latent attention",
                "Write model.kv_lora_rank, or leave it out.",
            )
        return
    for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        value = getattr(c, name)
        if value is None or value < 1:
            raise ConfigError(
                f"model.{name} is {value}, and model.kv_lora_rank is {c.kv_lora_rank}",
                "Latent attention needs qk_nope_head_dim, qk_rope_head_dim and v_head_dim.",
            )
    if c.kv_heads != c.num_attention_heads:
        raise ConfigError(
            f"model.num_key_value_heads is {c.kv_heads}, and latent attention has as many as query heads "
            f"({c.num_attention_heads})",
            "Leave model.num_key_value_heads out.",
        )
    plain = {"attention_sinks": False, "qk_norm": "none", "clip_qkv": None, "attention_bias": False}
    for name, value in plain.items():
        if getattr(c, name) != value:
            raise ConfigError(f"model.{name} is {getattr(c, name)!r} with latent attention", "Leave it out.")


def _check_layers(c: DecoderConfig) -> None:
    for name, known in (("layer_types", ("full_attention", "sliding_attention")), ("no_rope_layers", (0, 1))):
        values = getattr(c, name)
        if values is None:
            continue
        if len(values) != c.num_hidden_layers:
            raise ConfigError(
                f"model.{name} names {len(values)} layers of model.num_hidden_layers {c.num_hidden_layers}",
                "Write one entry a layer.",
            )
        strange = [value for value in values if value not in known]
        if strange:
            raise ConfigError(f"model.{name} has {strange[0]!r}", f"Known: {', '.join(map(str, known))}.")
    if c.layer_types is not None and "sliding_attention" in c.layer_types and c.sliding_window is None:
        raise ConfigError(
            "model.layer_types has sliding_attention, and model.sliding_window is not set",
            "Write model.sliding_window, the tokens that such a layer sees.",
        )
    if c.norm_position != "pre" and c.parallel_residual:
        raise ConfigError(
            f"model.parallel_residual with model.norm_position {c.norm_position}", "Write norm_position: pre."
        )


def _check_rope(c: DecoderConfig) -> None:
    if c.head_size < 1:
        raise ConfigError(f"the size of a head is {c.head_size}", "Write model.head_dim of at least 1.")
    if c.position_embedding != "rope":
        return
    if c.partial_rotary_factor > 1:
        raise ConfigError(
            f"model.partial_rotary_factor is {c.partial_rotary_factor}", "Write a share of a head's channels, up to 1."
        )
    if c.rotary_size < 2 or c.rotary_size % 2:
        what = "head" if c.rotary_size == c.head_size else "turning part of a head"
        raise ConfigError(
            f"the size of a {what} is {c.rotary_size}; rotary positions turn pairs of channels",
            "Make model.head_dim (or hidden_size / num_attention_heads) even.",
        )
    scaling = c.rope_scaling
    if scaling is not None and scaling.rope_type == "longrope":
        for name in ("short_factor", "long_factor"):
            count = len(getattr(scaling, name) or ())
            if count != c.rotary_size // 2:
                raise ConfigError(
                    f"rope_scaling.{name} has {count} numbers, and {c.rotary_size // 2} pairs of channels turn",
                    "Give one number a pair.",
                )


def _check_experts(c: DecoderConfig) -> None:
    for name in ("num_experts", *_OF_EXPERTS):
        value = getattr(c, name)
        if isinstance(value, int | float) and value < 0:
            raise ConfigError(f"model.{name} is {value}", "Write a number that is not negative.")
    if c.num_experts == 0:
        defaults = {field.name: field.default for field in dataclasses.fields(c)}
        for name in _OF_EXPERTS:
            if getattr(c, name) != defaults[name]:
                raise ConfigError(
                    f"model.{name} is {getattr(c, name)!r}, and the model has no experts",
                    "Write model.num_experts, or leave it out.",
                )
        return
    if not 1 <= c.num_experts_per_tok <= c.num_experts:
        raise ConfigError(
            f"model.num_experts_per_tok is {c.num_experts_per_tok} of model.num_experts {c.num_experts}",
            f"Write a number from 1 to {c.num_experts}.",
        )
    if c.expert_size < 1:
        raise ConfigError(f"model.moe_intermediate_size is {c.expert_size}", "Write a number of at least 1.")
    if c.first_k_dense_replace >= c.num_hidden_layers:
        raise ConfigError(
            f"model.first_k_dense_replace is {c.first_k_dense_replace} of model.num_hidden_layers "
            f"{c.num_hidden_layers}: no layer would have experts",
            f"Write at most {c.num_hidden_layers - 1}, or model.num_experts: 0.",
        )
    if c.mlp_bias:
        raise ConfigError(
            "model.mlp_bias is true, and experts have no biases", "Leave model.mlp_bias out, or write expert_bias."
        )
    _check_groups(c)


def _check_groups(c: DecoderConfig) -> None:
    if c.n_group < 1 or c.num_experts % c.n_group:
        raise ConfigError(
            f"model.num_experts {c.num_experts} is not divisible by model.n_group {c.n_group}",
            f"Groups may be {_divisors(c.num_experts)}.",
        )
    if not 1 <= c.topk_group <= c.n_group:
        raise ConfigError(
            f"model.topk_group is {c.topk_group} of model.n_group {c.n_group}", f"Write a number from 1 to {c.n_group}."
        )
    size = c.num_experts // c.n_group
    if c.n_group > 1 and (size < 2 or c.topk_group * size < c.num_experts_per_tok):
        raise ConfigError(
            f"model.topk_group {c.topk_group} groups of {size} experts, and a token goes through "
            f"model.num_experts_per_tok {c.num_experts_per_tok}",
            "Choose from more groups, or make fewer groups (a group has two experts at least).",
        )


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
