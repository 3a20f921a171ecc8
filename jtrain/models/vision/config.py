"""The shape of a vision encoder: a frozen dataclass in plain Python, so that presets and counts need no JAX."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from jtrain.errors import ConfigError
from jtrain.models.config import Activation, DecoderConfig, Kernel, Remat

HiddenAct = Literal["quick_gelu", "gelu", "gelu_pytorch_tanh"]
Pooling = Literal["class", "attention", "mean", "none"]

ACTIVATIONS: dict[str, Activation] = {
    "quick_gelu": "quick_gelu",
    "gelu": "gelu_exact",
    "gelu_pytorch_tanh": "gelu",
}
"""transformers' names of activations -> those of `DecoderConfig`."""


@dataclass(frozen=True)
class VisionConfig:
    """Shape and parts of a vision transformer (Dosovitskiy et al. 2021); transformers' names where they exist.

    Raises:
      ConfigError: numbers that make no encoder (patches that are larger than the image, a size below 1).
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    image_size: int
    """Height and width of an image, in pixels."""
    patch_size: int
    num_channels: int = 3
    layer_norm_eps: float = 1e-5
    hidden_act: HiddenAct = "gelu_pytorch_tanh"
    class_token: bool = False
    """Whether a learned token stands before the patches (CLIP)."""
    pre_norm: bool = False
    """Whether the embedded tokens are normalised before the first layer (CLIP's `pre_layrnorm`)."""
    patch_bias: bool = True
    """Whether the product that embeds the patches has a bias (CLIP's has none)."""
    pooling: Pooling = "attention"
    """What stands for an image: its class token, SigLIP's attention head, the mean of its patches; or nothing does."""
    dropout: float = 0.0
    """Rate of dropout on the embedding and on both residual branches."""
    initializer_range: float = 0.02
    """Standard deviation of the initial kernels."""
    remat: Remat = "full"
    """What the backward pass recomputes; see `jtrain.models.remat`."""
    attention: Kernel = "auto"
    """Attention kernel; see `jtrain.ops.attention`."""

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size", "num_channels"):
            if getattr(self, name) < 1:
                raise ConfigError(f"vision.{name} is {getattr(self, name)}", "Write a number of at least 1.")
        if self.image_size < self.patch_size:
            raise ConfigError(
                f"vision.patch_size {self.patch_size} is over vision.image_size {self.image_size}",
                f"Write a number up to {self.image_size}.",
            )
        for name, choices in (("hidden_act", HiddenAct), ("pooling", Pooling)):
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(
                    f"vision.{name} is {getattr(self, name)!r}", f"Choose one of {', '.join(get_args(choices))}."
                )
        if self.pooling == "class" and not self.class_token:
            raise ConfigError(
                "vision.pooling is 'class', and vision.class_token is false", "Write class_token: true, or mean."
            )
        _ = self.blocks  # its rules are those of any transformer

    @property
    def patches(self) -> int:
        """Patches of an image; what is left at its right and lower edge is not seen."""
        return self.side**2

    @property
    def side(self) -> int:
        """Patches in a row, and rows of them."""
        return self.image_size // self.patch_size

    @property
    def tokens(self) -> int:
        """Tokens of an image: its patches, and the class token before them."""
        return self.patches + self.class_token

    @cached_property
    def blocks(self) -> DecoderConfig:
        """The layers, as the parts of a decoder take their shape: every token sees every other."""
        return DecoderConfig(
            vocab_size=1,  # there is none
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            max_position_embeddings=self.tokens,
            position_embedding="learned",
            causal=False,
            norm="layernorm",
            norm_eps=self.layer_norm_eps,
            activation=ACTIVATIONS[self.hidden_act],
            attention_bias=True,
            mlp_bias=True,
            dropout=self.dropout,
            initializer_range=self.initializer_range,
            remat=self.remat,
            attention=self.attention,
        )

    def replace(self, **changes: Any) -> VisionConfig:
        """A copy with some fields changed, checked anew."""
        return dataclasses.replace(self, **changes)
