"""Families of models that a Hugging Face folder may hold; one short file each."""

from __future__ import annotations

import difflib

from jtrain.errors import ConfigError
from jtrain.models.config import DecoderConfig
from jtrain.models.families.family import Family
from jtrain.models.families.keys import Slot, Tensor
from jtrain.models.families.llama import Llama

__all__ = ["FAMILIES", "Family", "Slot", "Tensor", "family", "family_of"]

FAMILIES: dict[str, Family] = {one.model_type: one for one in (Llama(),)}


def family(model_type: str) -> Family:
    """The family of a config.json's `model_type`.

    Raises:
      ConfigError: there is none; the message lists those that there are.
    """
    if model_type not in FAMILIES:
        near = difflib.get_close_matches(model_type, FAMILIES, n=1)
        guess = f"Did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"model_type is {model_type!r}, which is no family that jtrain reads",
            f"{guess}Families: {', '.join(FAMILIES)}. For a model of one's own, give Trainer any Flax module: "
            "docs/models.md, 'A model of your own'.",
        )
    return FAMILIES[model_type]


def family_of(config: DecoderConfig) -> Family:
    """The family whose config.json can say what `config` says.

    Raises:
      ConfigError: none can; the message names the field.
    """
    return FAMILIES["llama"]
