"""LLaVA (Liu et al. 2023): a CLIP or SigLIP encoder, a projector, and a text model of any family here."""

from __future__ import annotations

import dataclasses
from typing import Any

from jtrain.errors import ConfigError
from jtrain.models.config import DecoderConfig
from jtrain.models.families.family import Family
from jtrain.models.families.fields import Fields
from jtrain.models.families.keys import Slot, Tensor, linear, same
from jtrain.models.families.vision_tower import CLIP, read_tower, tower_tensors, write_tower
from jtrain.models.multimodal_config import ImageConfig

_OWN = (
    "image_token_index", "vision_feature_layer", "vision_feature_select_strategy", "projector_hidden_act",
    "multimodal_projector_bias",
)  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "image_token_index": 32_000,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
    "tie_word_embeddings": False,
}
_TOWER = {  # transformers' default of an absent vision_config
    "model_type": CLIP, "intermediate_size": 4096, "hidden_size": 1024, "patch_size": 14, "image_size": 336,
    "num_hidden_layers": 24, "num_attention_heads": 16,
}  # fmt: skip
_TEXT = "language_model."


class Llava(Family):
    """LLaVA. Keys are those of its published folders; transformers 4.52 and 5 write others, which are read as well."""

    model_type = "llava"
    architectures = ("LlavaForConditionalGeneration",)
    ignored = (*Family.ignored, r"language_model\..*\.rotary_emb\.inv_freq", r".*\.embeddings\.position_ids")

    def decoder_config(self, hf: dict[str, Any]) -> DecoderConfig:
        fields = Fields(hf, _DEFAULTS)
        text = _section(fields, "text_config", {"model_type": "llama"})
        tower = read_tower(_section(fields, "vision_config", _TOWER))
        fields.get("image_seq_length"), fields.get("initializer_range")  # they follow from the parts
        token = fields.get("image_token_index")
        if token is None or "image_token_index" not in hf:
            token = fields.get("image_token_id", token)
        if isinstance(token, bool) or not isinstance(token, int):
            raise ConfigError(f"config.json: image_token_index is {token!r}", "Write the id of the image token.")
        tied = bool(fields.get("tie_word_embeddings"))
        own = {name: fields.get(name) for name in _OWN if name != "image_token_index"}
        layers = own["vision_feature_layer"]
        if isinstance(layers, list) and len(layers) == 1:
            own["vision_feature_layer"] = layers[0]
        images = ImageConfig(encoder=tower, image_token_index=token, **own)
        decoder = _text_family(text.get("model_type")).decoder_config(text)
        if decoder.embedding_multiplier != 1.0:
            raise ConfigError(
                f"config.json: text_config is of {text.get('model_type')}, which scales its embeddings",
                "jtrain reads LLaVA with a text model that does not.",
            )
        if not 0 <= token < decoder.vocab_size:
            raise ConfigError(
                f"config.json: image_token_index is {token}, and the text model has {decoder.vocab_size} tokens",
                "Resize its embeddings (transformers: resize_token_embeddings), so that the image token has a row.",
            )
        fields.finish()
        return decoder.replace(images=images, tie_word_embeddings=tied or decoder.tie_word_embeddings)

    def hf_config(self, config: DecoderConfig) -> dict[str, Any]:
        images = _needed(config)
        text = self._text(config)
        return {
            "model_type": self.model_type,
            "architectures": list(self.architectures),
            **{name: getattr(images, name) for name in _OWN},
            "image_seq_length": images.tokens,
            "tie_word_embeddings": config.tie_word_embeddings,
            "text_config": text.hf_config(config.replace(images=None)),
            "vision_config": write_tower(images.encoder),
        }

    def tensors(self, config: DecoderConfig) -> list[Tensor]:
        images, d = _needed(config), config.hidden_size
        v = images.encoder.hidden_size
        tensors = tower_tensors(images.encoder, "vision_tower.vision_model.", "vision_tower/")
        for name, size in (("linear_1", v), ("linear_2", d)):
            path = f"multi_modal_projector/{name}"
            tensors.append(linear(f"multi_modal_projector.{name}.weight", Slot(f"{path}/kernel"), (size,), (d,)))
            if images.multimodal_projector_bias:
                tensors.append(same(f"multi_modal_projector.{name}.bias", Slot(f"{path}/bias"), d))
        text = self._text(config).tensors(config.replace(images=None))
        return tensors + [dataclasses.replace(tensor, key=_TEXT + tensor.key) for tensor in text]

    def rename(self, key: str) -> str:
        """transformers 4.52: `model.language_model.…`, `lm_head.…`; 5: `vision_tower.encoder.…`."""
        if key.startswith("lm_head."):
            return _TEXT + key
        if key.startswith("model.language_model."):
            return f"{_TEXT}model." + key.removeprefix("model.language_model.")
        key = key.removeprefix("model.") if key.startswith(("model.vision_tower.", "model.multi_modal_")) else key
        if key.startswith("vision_tower.") and not key.startswith("vision_tower.vision_model."):
            key = "vision_tower.vision_model." + key.removeprefix("vision_tower.")
        return key

    def ignores(self, key: str, config: DecoderConfig) -> bool:
        inner = key.removeprefix(_TEXT)
        if inner != key and self._text(config).ignores(inner, config.replace(images=None)):
            return True
        return super().ignores(key, config)

    def _text(self, config: DecoderConfig) -> Family:
        from jtrain.models.families import family_of  # the table of which this family is a part

        return family_of(config.replace(images=None))


def _text_family(model_type: Any) -> Family:
    from jtrain.models.families import family

    found = family(model_type)
    if isinstance(found, Llava):
        raise ConfigError("config.json: text_config is of llava itself", "Write the model_type of its text model.")
    return found


def _section(fields: Fields, name: str, default: dict[str, Any]) -> dict[str, Any]:
    section = fields.get(name)
    section = default if section is None else section
    if not isinstance(section, dict):
        raise ConfigError(f"config.json: {name} is {section!r}", "Write the config.json of that part.")
    return section if "model_type" in section else {"model_type": default["model_type"], **section}


def _needed(config: DecoderConfig) -> ImageConfig:
    if config.images is None:
        raise ConfigError("the model has no images", "A text model is of another family.")
    return config.images
