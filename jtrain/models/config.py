"""The shape of a decoder: a frozen dataclass in plain Python, so that presets and parameter counts need no JAX."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from jtrain.errors import ConfigError

Norm = Literal["rmsnorm", "layernorm"]
Activation = Literal["swiglu", "geglu", "gelu"]
Remat = Literal[
    "none", "full", "minimal", "save_dots", "save_qkv", "save_attention", "save_out", "offload", "offload_dots"
]
Kernel = Literal["auto", "xla", "splash", "cudnn"]
Scoring = Literal["softmax", "sigmoid"]
ExpertKernel = Literal["auto", "blocks", "ragged_dot", "megablox"]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretch of the rotary frequencies (Llama 3 paper, section 3.4.3, and Meta's reference code).

    Wavelengths longer than `original_length / low_freq_factor` are stretched by `factor`, those shorter than
    `original_length / high_freq_factor` are kept, and those between are blended.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and parts of a decoder-only transformer. Field names are Hugging Face's where they exist.

    Raises:
      ConfigError: numbers that make no decoder (heads that do not divide, an odd head size, a size below 1).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    """Key-value heads; None: as many as query heads. Each serves a group of query heads (GQA)."""
    head_dim: int | None = None
    """Size of a head; None: hidden_size / num_attention_heads."""
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    norm: Norm = "rmsnorm"
    norm_eps: float = 1e-5
    activation: Activation = "swiglu"
    attention_bias: bool = False
    mlp_bias: bool = False
    dropout: float = 0.0
    """Rate of dropout on the embedding and on both residual branches."""
    initializer_range: float = 0.02
    """Standard deviation of the initial kernels and of the embedding."""
    remat: Remat = "full"
    """What the backward pass recomputes; see `jtrain.models.remat`."""
    attention: Kernel = "auto"
    """Attention kernel; see `jtrain.ops.attention`."""
    num_experts: int = 0
    """Routed experts of a layer; 0: a dense feed-forward. See `jtrain.models.moe`."""
    num_experts_per_tok: int = 2
    """Experts that a token goes through, beside the shared ones."""
    moe_intermediate_size: int | None = None
    """Width of an expert; None: intermediate_size."""
    n_shared_experts: int = 0
    """Experts that every token goes through: one feed-forward of this many times the width of an expert."""
    scoring_func: Scoring = "softmax"
    """How router logits become scores: over all experts (Mixtral, Qwen3), or each by itself (DeepSeek-V3)."""
    norm_topk_prob: bool = True
    """Whether the scores of a token's experts are divided by their sum."""
    routed_scaling_factor: float = 1.0
    """What the sum of the routed experts is multiplied by."""
    router_aux_loss_coef: float = 0.001
    """Weight of the load-balancing loss of every layer."""
    router_z_loss_coef: float = 0.0
    """Weight of the router z-loss of every layer (ST-MoE, Zoph et al. 2022, eq. 5: 0.001)."""
    router_bias_update_rate: float = 0.0
    """Step of the bias that balances without a loss (DeepSeek-V3: 0.001); 0: there is no bias."""
    first_k_dense_replace: int = 0
    """Leading layers with a dense feed-forward of intermediate_size."""
    expert_capacity_factor: float = 0.0
    """Tokens of a row that an expert takes, relative to an even share; 0: all of them (dropless)."""
    expert_kernel: ExpertKernel = "auto"
    """Kernel of the dropless experts; see `jtrain.ops.grouped_matmul`."""

    def __post_init__(self) -> None:
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "max_position_embeddings",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name} is {getattr(self, name)}", "Write a number of at least 1.")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(
                    f"model.{name} is {getattr(self, name)!r}", f"Choose one of {', '.join(get_args(choices))}."
                )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"model.dropout is {self.dropout}", "Write a rate of at least 0 and below 1.")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"model.hidden_size {self.hidden_size} is not divisible by "
                f"model.num_attention_heads {self.num_attention_heads}",
                "Change one of them, or set model.head_dim.",
            )
        if self.kv_heads < 1 or self.num_attention_heads % self.kv_heads:
            raise ConfigError(
                f"model.num_attention_heads {self.num_attention_heads} is not divisible by "
                f"model.num_key_value_heads {self.kv_heads}",
                f"Key-value heads may be {_divisors(self.num_attention_heads)}.",
            )
        if self.head_size < 2 or self.head_size % 2:
            raise ConfigError(
                f"the size of a head is {self.head_size}; rotary positions turn pairs of channels",
                "Make model.head_dim (or hidden_size / num_attention_heads) even.",
            )
        _check_experts(self)

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads, filled in."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """Size of a head, filled in."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate (three kernels) or not (two)."""
        return self.activation != "gelu"

    @property
    def expert_size(self) -> int:
        """Width of an expert, filled in."""
        return self.intermediate_size if self.moe_intermediate_size is None else self.moe_intermediate_size

    @property
    def num_dense_layers(self) -> int:
        """Layers whose feed-forward is dense: all of them where there are no experts."""
        return self.first_k_dense_replace if self.num_experts else self.num_hidden_layers

    @property
    def num_expert_layers(self) -> int:
        """Layers with experts."""
        return self.num_hidden_layers - self.num_dense_layers

    def replace(self, **changes: Any) -> DecoderConfig:
        """A copy with some fields changed, checked anew."""
        return dataclasses.replace(self, **changes)


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


_CHOICES = {
    "norm": Norm,
    "activation": Activation,
    "remat": Remat,
    "attention": Kernel,
    "scoring_func": Scoring,
    "expert_kernel": ExpertKernel,
}
_OF_EXPERTS = (
    "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "scoring_func", "norm_topk_prob",
    "routed_scaling_factor", "router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_rate",
    "first_k_dense_replace", "expert_capacity_factor", "expert_kernel",
)  # fmt: skip
"""Fields that count beside `num_experts` only."""


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
        raise ConfigError("model.mlp_bias is true, and experts have no biases", "Leave model.mlp_bias out.")


def layer_parameter_count(config: DecoderConfig, *, experts: int | None = None) -> int:
    """Parameters of one layer, by arithmetic.

    Args:
      config: the decoder.
      experts: routed experts that are counted; by default a dense feed-forward.
    """
    c = config
    attention = c.hidden_size * c.head_size * (2 * c.num_attention_heads + 2 * c.kv_heads)
    if c.attention_bias:
        attention += c.head_size * (c.num_attention_heads + 2 * c.kv_heads) + c.hidden_size
    kernels = 3 if c.gated else 2
    if experts is None:
        mlp = kernels * c.hidden_size * c.intermediate_size
        if c.mlp_bias:
            mlp += (kernels - 1) * c.intermediate_size + c.hidden_size
    else:
        mlp = kernels * c.hidden_size * c.expert_size * (experts + c.n_shared_experts) + c.hidden_size * c.num_experts
    return attention + mlp + 2 * _norm_parameter_count(c)


def parameter_count(config: DecoderConfig, *, embedding: bool = True, active: bool = False) -> int:
    """Parameters of the whole decoder, by arithmetic (no array is made).

    Args:
      config: the decoder.
      embedding: False leaves the embedding table and an untied head out, as scaling laws count.
      active: True counts the experts that a token goes through, in place of all.
    """
    c = config
    count = c.num_dense_layers * layer_parameter_count(c) + _norm_parameter_count(c)
    if c.num_experts:
        experts = c.num_experts_per_tok if active else c.num_experts
        count += c.num_expert_layers * layer_parameter_count(c, experts=experts)
    if embedding:
        count += c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
    return count


def _norm_parameter_count(config: DecoderConfig) -> int:
    return config.hidden_size * (1 if config.norm == "rmsnorm" else 2)
