"""Granite 3: Llama with factors on the embedding, the scores, both branches and the logits."""

from __future__ import annotations

from typing import Any

from jtrain.models.config import DecoderConfig
from jtrain.models.families.fields import Fields
from jtrain.models.families.llama import DEFAULTS, Llama


class Granite(Llama):
    """Granite, dense."""

    model_type = "granite"
    architectures = ("GraniteForCausalLM",)
    names = Llama.names | {
        "embedding_multiplier": "embedding_multiplier",
        "residual_multiplier": "residual_multiplier",
        "logits_scaling": "logits_scaling",
    }
    defaults = DEFAULTS | {
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "attention_multiplier": 1.0,
    }

    def read(self, fields: Fields) -> dict[str, Any]:
        return {"attention_scale": fields.get("attention_multiplier")}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        scale = config.attention_scale
        return {"attention_multiplier": config.head_size**-0.5 if scale is None else scale}
