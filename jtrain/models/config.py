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
        for name, choices in (("norm", Norm), ("activation", Activation), ("remat", Remat), ("attention", Kernel)):
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

    def replace(self, **changes: Any) -> DecoderConfig:
        """A copy with some fields changed, checked anew."""
        return dataclasses.replace(self, **changes)


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)


def layer_parameter_count(config: DecoderConfig) -> int:
    """Parameters of one layer, by arithmetic."""
    c = config
    attention = c.hidden_size * c.head_size * (2 * c.num_attention_heads + 2 * c.kv_heads)
    if c.attention_bias:
        attention += c.head_size * (c.num_attention_heads + 2 * c.kv_heads) + c.hidden_size
    kernels = 3 if c.gated else 2
    mlp = kernels * c.hidden_size * c.intermediate_size
    if c.mlp_bias:
        mlp += (kernels - 1) * c.intermediate_size + c.hidden_size
    return attention + mlp + 2 * _norm_parameter_count(c)


def parameter_count(config: DecoderConfig, *, embedding: bool = True) -> int:
    """Parameters of the whole decoder, by arithmetic (no array is made).

    Args:
      config: the decoder.
      embedding: False leaves the embedding table and an untied head out, as scaling laws count.
    """
    count = config.num_hidden_layers * layer_parameter_count(config) + _norm_parameter_count(config)
    if embedding:
        count += config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    return count


def _norm_parameter_count(config: DecoderConfig) -> int:
    return config.hidden_size * (1 if config.norm == "rmsnorm" else 2)
