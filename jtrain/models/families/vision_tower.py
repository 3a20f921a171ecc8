"""Vision encoders of Hugging Face's CLIP and SigLIP: their config, and a map of their tensors."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import numpy as np

from jtrain.errors import ConfigError
from jtrain.models.families import blocks
from jtrain.models.families.keys import Slot, Tensor, fused, linear, same
from jtrain.models.vision.config import HiddenAct, VisionConfig

CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size",
    "num_channels", "layer_norm_eps", "hidden_act", "initializer_range",
)  # fmt: skip
_DEFAULTS: dict[str, dict[str, Any]] = {
    CLIP: {"patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    SIGLIP: {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
_SHARED = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "num_channels": 3,
    "initializer_range": 0.02,
}


def read_tower(hf: dict[str, Any]) -> VisionConfig:
    """The encoder of a `vision_config`; transformers' defaults stand for what it does not say.

    Raises:
      ConfigError: another kind of encoder, or a value that can't be.
    """
    kind = hf.get("model_type")
    if kind not in _DEFAULTS:
        raise ConfigError(
            f"config.json: model_type of vision_config is {kind!r}", f"jtrain reads {' and '.join(_DEFAULTS)}."
        )
    values: dict[str, Any] = {name: hf.get(name, {**_SHARED, **_DEFAULTS[kind]}.get(name)) for name in _SIZES}
    for name, value in values.items():
        kinds: Any = {"hidden_act": str, "layer_norm_eps": (int, float), "initializer_range": (int, float)}.get(
            name, int
        )
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ConfigError(f"config.json: {name} of vision_config is {value!r}", "Write a value of the right kind.")
    if values["hidden_act"] not in get_args(HiddenAct):
        raise ConfigError(
            f"config.json: hidden_act of vision_config is {values['hidden_act']!r}",
            f"jtrain does {', '.join(get_args(HiddenAct))}.",
        )
    if kind == CLIP:
        return VisionConfig(**values, class_token=True, pre_norm=True, patch_bias=False, pooling="class")
    return VisionConfig(**values, pooling="attention" if hf.get("vision_use_head", True) else "none")


def write_tower(config: VisionConfig) -> dict[str, Any]:
    """The `vision_config` of an encoder.

    Raises:
      ConfigError: neither CLIP nor SigLIP has such an encoder.
    """
    values = {name: getattr(config, name) for name in _SIZES}
    own: dict[str, Any] = {"model_type": CLIP if config.class_token else SIGLIP}
    if not config.class_token:
        own["vision_use_head"] = config.pooling != "none"
    found = {**values, **own}
    training = {name: getattr(config, name) for name in ("dropout", "remat", "attention")}
    if read_tower(found).replace(**training) != config:
        raise ConfigError(
            "no vision encoder of Hugging Face's CLIP or SigLIP has these parts", "Take those of one of the two."
        )
    return found


def tower_tensors(config: VisionConfig, prefix: str, root: str) -> list[Tensor]:
    """The tensors of an encoder.

    Args:
      config: the encoder.
      prefix: of its keys on disk, with the dot at the end: `vision_model.`
      root: of its parameters' paths, with the slash at the end: `vision_tower/`.
    """
    c, d = config, config.hidden_size
    tensors = [_patches(config)]
    if c.patch_bias:
        tensors.append(same("embeddings.patch_embedding.bias", Slot("patch_embed/bias"), d))
    if c.class_token:
        tensors.append(same("embeddings.class_embedding", Slot("class_token"), d))
    tensors.append(same("embeddings.position_embedding.weight", Slot("embed_positions/embedding"), c.tokens, d))
    if c.pre_norm:
        tensors += _norm("pre_layrnorm", "pre_norm", d)
    for layer in blocks.layers(c.blocks, "encoder.layers."):
        tensors += [
            *blocks.norm(layer, "layer_norm1", "attention_norm"),
            *blocks.attention(layer, out="out_proj"),
            *blocks.norm(layer, "layer_norm2", "mlp_norm"),
            *blocks.feed_forward(layer, names={"up_proj": "fc1", "down_proj": "fc2"}),
        ]
    tensors += _norm("post_layernorm", "post_norm", d)
    if c.pooling == "attention":
        tensors += _head(config)
    return [
        dataclasses.replace(
            tensor,
            key=prefix + tensor.key,
            slots=tuple(dataclasses.replace(slot, path=root + slot.path) for slot in tensor.slots),
        )
        for tensor in tensors
    ]


def _patches(config: VisionConfig) -> Tensor:
    """torch's Conv2d [D, C, p, p] to the product's [p * p * C, D]."""
    d, c, p = config.hidden_size, config.num_channels, config.patch_size
    return Tensor(
        "embeddings.patch_embedding.weight",
        (d, c, p, p),
        (Slot("patch_embed/kernel"),),
        lambda x: (x.transpose(2, 3, 1, 0).reshape(p * p * c, d),),
        lambda parts: np.ascontiguousarray(parts[0].reshape(p, p, c, d).transpose(3, 2, 0, 1)),
    )


def _norm(key: str, path: str, d: int) -> list[Tensor]:
    return [same(f"{key}.weight", Slot(f"{path}/scale"), d), same(f"{key}.bias", Slot(f"{path}/bias"), d)]


def _head(config: VisionConfig) -> list[Tensor]:
    """SigLIP's attention pooling: torch's MultiheadAttention has queries, keys and values in one array."""
    d, f = config.hidden_size, config.intermediate_size
    heads = (config.num_attention_heads, config.blocks.head_size)
    names = ("q_proj", "k_proj", "v_proj")
    at = "head.attention."
    return [
        same("head.probe", Slot("head/probe"), 1, 1, d, ours=(d,)),
        fused([linear(f"{at}in_proj_weight", Slot(f"head/{name}/kernel"), (d,), heads) for name in names]),
        fused([same(f"{at}in_proj_bias", Slot(f"head/{name}/bias"), d, ours=heads) for name in names]),
        linear(f"{at}out_proj.weight", Slot("head/o_proj/kernel"), heads, (d,)),
        same(f"{at}out_proj.bias", Slot("head/o_proj/bias"), d),
        *_norm("head.layernorm", "head/mlp_norm", d),
        linear("head.mlp.fc1.weight", Slot("head/mlp/up_proj/kernel"), (d,), (f,)),
        same("head.mlp.fc1.bias", Slot("head/mlp/up_proj/bias"), f),
        linear("head.mlp.fc2.weight", Slot("head/mlp/down_proj/kernel"), (f,), (d,)),
        same("head.mlp.fc2.bias", Slot("head/mlp/down_proj/bias"), d),
    ]
