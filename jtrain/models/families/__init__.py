"""Families of models that a Hugging Face folder may hold; one short file each."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from jtrain.errors import ConfigError
from jtrain.models.config import DecoderConfig
from jtrain.models.families.deepseek import DeepseekV3
from jtrain.models.families.family import Family
from jtrain.models.families.gemma import Gemma, Gemma2, Gemma3, Gemma3Text
from jtrain.models.families.gpt2 import GPT2
from jtrain.models.families.gpt_neox import GPTNeoX
from jtrain.models.families.gpt_oss import GptOss
from jtrain.models.families.granite import Granite
from jtrain.models.families.keys import Slot, Tensor
from jtrain.models.families.llama import Llama
from jtrain.models.families.llava import Llava
from jtrain.models.families.mistral import Mistral, Mixtral
from jtrain.models.families.olmo import Olmo2, Olmoe
from jtrain.models.families.phi3 import Phi3
from jtrain.models.families.qwen import Qwen2, Qwen3, Qwen3Moe
from jtrain.models.families.smollm3 import SmolLM3
from jtrain.models.families.translation import of_function

__all__ = ["FAMILIES", "Family", "Slot", "Tensor", "family", "family_of"]

_ALL: tuple[Family, ...] = (
    Llama(), Mistral(), Qwen2(), Qwen3(), SmolLM3(), Olmo2(), Granite(), Gemma(), Gemma2(), Gemma3Text(), Gemma3(),
    Phi3(), GPT2(), GPTNeoX(), Mixtral(), Qwen3Moe(), Olmoe(), GptOss(), DeepseekV3(),
    Llava(),
)  # fmt: skip
"""In the order in which `family_of` tries them: what most programs can read comes first."""

FAMILIES: dict[str, Family] = {one.model_type: one for one in _ALL}


def family(model_type: str) -> Family:
    """The family of a config.json's `model_type`.

    Raises:
      ConfigError: there is none; the message lists those that there are.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        near = difflib.get_close_matches(str(model_type), FAMILIES, n=1)
        guess = f"Did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"model_type is {model_type!r}, which is no family that jtrain reads",
            f"{guess}Families: {', '.join(FAMILIES)}. For a model of one's own, give Trainer any Flax module: "
            "docs/models.md, 'A model of your own'.",
        )
    return FAMILIES[model_type]


def family_of(config: DecoderConfig) -> Family:
    """The family whose config.json can say what `config` says: reading what it writes gives the same decoder.

    Fields that say how to train (remat, kernels, dropout, the router's z-loss...) are left out of the comparison.

    Raises:
      ConfigError: none can; the message names what the nearest one lacks.
    """
    wanted = of_function(config)
    lacking: dict[str, list[str]] = {}
    for one in FAMILIES.values():
        try:
            held = of_function(one.decoder_config(one.hf_config(config)))
        except ConfigError:  # it writes what would make no decoder: another shape altogether
            continue
        lacking[one.model_type] = _differences(wanted, held)
        if not lacking[one.model_type]:
            return one
    nearest = min(lacking, key=lambda name: len(lacking[name]))
    fields = ", ".join(f"model.{name} {getattr(wanted, name)!r}" for name in lacking[nearest])
    raise ConfigError(
        f"no family of Hugging Face has this decoder: {nearest} is nearest, and cannot say {fields}",
        f"Change it, or keep the model in jtrain's own checkpoint. Families: {', '.join(FAMILIES)}.",
    )


def _differences(a: DecoderConfig, b: DecoderConfig) -> list[str]:
    def values(config: DecoderConfig) -> dict[str, Any]:
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}

    other = values(b)
    return [name for name, value in values(a).items() if value != other[name]]
