"""CLIP and SigLIP of transformers: their config.json, and a map of their tensors."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from jtrain.errors import ConfigError
from jtrain.models.dual_encoder import DualEncoderConfig, Kind, text_tower
from jtrain.models.families import blocks
from jtrain.models.families.fields import Fields
from jtrain.models.families.keys import Slot, Tensor, linear, same
from jtrain.models.families.vision_tower import read_tower, tower_tensors, write_tower
from jtrain.models.vision.config import ACTIVATIONS

MODEL_TYPES: tuple[Kind, ...] = ("clip", "siglip")
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "layer_norm_eps", "initializer_range",
)  # fmt: skip
_DEFAULTS: dict[Kind, dict[str, Any]] = {
    "clip": {
        "vocab_size": 49_408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 8, "max_position_embeddings": 77, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
        "initializer_range": 0.02, "eos_token_id": 49_407,
    },
    "siglip": {
        "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "max_position_embeddings": 64, "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6, "initializer_range": 0.02,
    },
}  # fmt: skip
"""What transformers takes for keys of a text_config that are not there."""


def dual_encoder_config(hf: Mapping[str, Any]) -> DualEncoderConfig:
    """The two towers of a config.json of CLIP or SigLIP.

    Raises:
      ConfigError: it is of another model, or asks for something that is not done.
    """
    kind: Any = hf.get("model_type")
    if kind not in MODEL_TYPES:
        raise ConfigError(
            f"config.json: model_type is {kind!r}", f"Models of images and texts are {', '.join(MODEL_TYPES)}."
        )
    fields = Fields(dict(hf), {"text_config": {}, "vision_config": {}})
    text, vision = (_section(fields, name) for name in ("text_config", "vision_config"))
    tower = read_tower({"model_type": f"{kind}_vision_model", **vision})
    own: dict[str, Any] = {"logit_scale_init": math.log(10)}
    if kind == "clip":
        dim = fields.get("projection_dim", 512)
        own = {"logit_scale_init": fields.get("logit_scale_init_value", 2.6592)}
        if not isinstance(own["logit_scale_init"], int | float):
            raise ConfigError(f"config.json: logit_scale_init_value is {own['logit_scale_init']!r}", "Write a number.")
    fields.get("initializer_factor")
    fields.finish()
    inner = Fields(dict(text), _DEFAULTS[kind])
    sizes = {name: inner.get(name) for name in _SIZES}
    eos, act = inner.get("eos_token_id", 2), inner.get("hidden_act")
    if kind == "siglip":
        dim = inner.get("projection_size") or sizes["hidden_size"]
    for name, value in {**sizes, "eos_token_id": eos, "projection_dim": dim}.items():
        kinds: Any = (int, float) if name in ("layer_norm_eps", "initializer_range") else int
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ConfigError(f"config.json: {name} of text_config is {value!r}", "Write one number.")
    if act not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: hidden_act of text_config is {act!r}", f"jtrain does {', '.join(ACTIVATIONS)}."
        )
    for name in ("projection_dim", "initializer_factor"):
        inner.get(name)
    inner.finish()
    return DualEncoderConfig(kind, text_tower(kind, hidden_act=act, **sizes), tower, dim, eos, **own)


def dual_encoder_json(config: DualEncoderConfig) -> dict[str, Any]:
    """The inverse of `dual_encoder_config`: what transformers loads to the same function.

    Raises:
      ConfigError: transformers has no such vision tower.
    """
    kind, act = config.kind, {ours: theirs for theirs, ours in ACTIVATIONS.items()}[config.text.activation]
    text = {name: getattr(config.text, {"layer_norm_eps": "norm_eps"}.get(name, name)) for name in _SIZES}
    text |= {"model_type": f"{kind}_text_model", "hidden_act": act, "eos_token_id": config.eos_token_id}
    vision = write_tower(config.vision)
    if vision["model_type"] != f"{kind}_vision_model":
        raise ConfigError(f"a vision tower of {vision['model_type']} in a {kind} model", "Take that of the same kind.")
    out: dict[str, Any] = {"model_type": kind, "text_config": text, "vision_config": vision}
    if kind == "siglip":
        text["projection_size"] = config.projection_dim
        return out | {"architectures": ["SiglipModel"]}
    text["projection_dim"] = vision["projection_dim"] = config.projection_dim
    return out | {
        "architectures": ["CLIPModel"],
        "projection_dim": config.projection_dim,
        "logit_scale_init_value": config.logit_scale_init,
    }


def dual_encoder_tensors(config: DualEncoderConfig) -> list[Tensor]:
    """Every tensor of a folder of CLIP or SigLIP."""
    kind, text, at = config.kind, config.text, "text_model."
    d, e, size = text.hidden_size, config.projection_dim, config.vision.hidden_size
    positions = Slot("embed_positions/embedding")
    tower = [
        blocks.embedding(text, f"{at}embeddings.token_embedding.weight"),
        same(f"{at}embeddings.position_embedding.weight", positions, text.max_position_embeddings, d),
    ]
    for layer in blocks.layers(text, f"{at}encoder.layers."):
        tower += [
            *blocks.norm(layer, "layer_norm1", "attention_norm"),
            *blocks.attention(layer, out="out_proj"),
            *blocks.norm(layer, "layer_norm2", "mlp_norm"),
            *blocks.feed_forward(layer, names={"up_proj": "fc1", "down_proj": "fc2"}),
        ]
    tower += blocks.final_norm(text, f"{at}final_layer_norm")
    tensors = [
        dataclasses.replace(one, slots=tuple(dataclasses.replace(s, path=f"text/{s.path}") for s in one.slots))
        for one in tower
    ]
    tensors += tower_tensors(config.vision, "vision_model.", "vision/")
    if kind == "siglip":
        return [
            *tensors,
            linear(f"{at}head.weight", Slot("text_projection/kernel"), (d,), (e,)),
            same(f"{at}head.bias", Slot("text_projection/bias"), e),
            same("logit_scale", Slot("logit_scale"), 1),
            same("logit_bias", Slot("logit_bias"), 1),
        ]
    return [
        *tensors,
        linear("text_projection.weight", Slot("text_projection/kernel"), (d,), (e,)),
        linear("visual_projection.weight", Slot("image_projection/kernel"), (size,), (e,)),
        same("logit_scale", Slot("logit_scale"), ours=(1,)),
    ]


def carries_nothing(key: str) -> bool:
    """Whether a key on disk that no tensor has is a buffer."""
    return re.fullmatch(r".*\.position_ids", key) is not None


def _section(fields: Fields, name: str) -> dict[str, Any]:
    section = fields.get(name) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"config.json: {name} is {section!r}", "Write the config.json of that tower.")
    return section
