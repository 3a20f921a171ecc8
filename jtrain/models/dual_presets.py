"""Named shapes of CLIP and SigLIP. The tiny ones are ours, for laptops and tests; the others are the published ones."""

from __future__ import annotations

import difflib
import math

from jtrain.errors import ConfigError
from jtrain.models.dual_encoder import DualEncoderConfig, Kind, text_tower
from jtrain.models.vision.config import VisionConfig


def _clip(
    image: int, patch: int, d: int, layers: int, heads: int, text: tuple[int, int, int, int]
) -> DualEncoderConfig:
    """`text`: width, layers, heads and positions; the embeddings are as wide as the text tower."""
    vision = VisionConfig(
        d, 4 * d, layers, heads, image, patch,
        hidden_act="quick_gelu", class_token=True, pre_norm=True, patch_bias=False, pooling="class",
    )  # fmt: skip
    return DualEncoderConfig("clip", _text("clip", 49_408, *text), vision, text[0], 49_407)


def _siglip(image: int, patch: int, d: int, f: int, layers: int, heads: int, positions: int = 64) -> DualEncoderConfig:
    vision = VisionConfig(d, f, layers, heads, image, patch, layer_norm_eps=1e-6)
    return DualEncoderConfig(
        "siglip", _text("siglip", 32_000, d, layers, heads, positions, f), vision, d, logit_scale_init=math.log(10)
    )


def _text(kind: Kind, vocab: int, d: int, layers: int, heads: int, positions: int, f: int | None = None):
    return text_tower(
        kind,
        vocab_size=vocab,
        hidden_size=d,
        intermediate_size=f or 4 * d,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=positions,
        hidden_act="quick_gelu" if kind == "clip" else "gelu_pytorch_tanh",
        layer_norm_eps=1e-5 if kind == "clip" else 1e-6,
    )


def _strong(shape: DualEncoderConfig) -> DualEncoderConfig:
    """What narrow towers and small batches need at the start.

    Weights are wider: with 0.02, all texts begin as one. SigLIP's bias begins at the log-odds of a pair being one in a
    batch of tens, not of ten thousands: from -10, all embeddings would first be drawn together.
    """
    wide = shape.trained_with(initializer_range=0.1)
    return wide.replace(logit_bias_init=-4.0) if shape.kind == "siglip" else wide


DUAL_PRESETS: dict[str, DualEncoderConfig] = {
    "clip-tiny": _strong(_clip(8, 2, 64, 2, 4, (64, 2, 4, 32))),
    "clip-vit-base-patch32": _clip(224, 32, 768, 12, 12, (512, 12, 8, 77)),
    "clip-vit-base-patch16": _clip(224, 16, 768, 12, 12, (512, 12, 8, 77)),
    "clip-vit-large-patch14": _clip(224, 14, 1024, 24, 16, (768, 12, 12, 77)),
    "siglip-tiny": _strong(_siglip(8, 2, 64, 256, 2, 4, positions=32)),
    "siglip-base-patch16-224": _siglip(224, 16, 768, 3072, 12, 12),
    "siglip-so400m-patch14-384": _siglip(384, 14, 1152, 4304, 27, 16),
}


def dual_preset(name: str) -> DualEncoderConfig:
    """The shape of this name.

    Raises:
      ConfigError: there is none.
    """
    if name not in DUAL_PRESETS:
        near = difflib.get_close_matches(name, DUAL_PRESETS, n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"model.preset: {name} is no model of images and texts", f"{guess}There are: {', '.join(DUAL_PRESETS)}."
        )
    return DUAL_PRESETS[name]
