"""The decoder's shape from the config: a preset with fields replaced, or a loaded model's own."""

from __future__ import annotations

from typing import Any

from jtrain.config.schema import Config, ModelConfig
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import ConfigError, DataError
from jtrain.models.config import DecoderConfig
from jtrain.models.presets import preset

OF_TRAINING = (
    "remat", "attention", "dropout", "router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_rate",
    "expert_capacity_factor", "expert_kernel", "max_position_embeddings",
)  # fmt: skip
"""Fields of `model` that may be set beside `model.path`: they change how it is trained, and no weight's shape."""


FIELDS = tuple(name for name in ModelConfig.model_fields if name in DecoderConfig.__dataclass_fields__)
"""Fields of `model` that are the decoder's own."""


def preset_shape(config: Config, tokenizer: Tokenizer) -> DecoderConfig:
    """The preset with the fields that the config sets; the vocabulary is the tokenizer's where none is set.

    Raises:
      ConfigError: an unknown preset, or fields that make no decoder.
      DataError: a tokenizer with more tokens than `model.vocab_size`.
    """
    section = config.model
    shape = preset(section.preset, **{name: getattr(section, name) for name in FIELDS})
    if section.vocab_size is None:
        return shape.replace(vocab_size=tokenizer.vocab_size)
    if tokenizer.vocab_size > section.vocab_size:
        raise DataError(
            f"data.tokenizer={config.data.tokenizer!r} has {tokenizer.vocab_size} tokens, model.vocab_size is "
            f"{section.vocab_size}",
            f"write model.vocab_size: {tokenizer.vocab_size} (or more), or leave it out",
        )
    return shape


def shape_beside(config: Config, tokenizer: Tokenizer, base: DecoderConfig) -> DecoderConfig:
    """The shape of the model that `model.path` names, with what the config's `model` section may say besides.

    Raises:
      ConfigError: a field that says something else than the model.
      DataError: a tokenizer with more tokens than the model.
    """
    section = config.model
    where = f"model.path: {section.path}"
    if section.preset != type(section).model_fields["preset"].default:
        raise ConfigError(
            f"model.preset: {section.preset} beside {where}", "leave model.preset out: the folder says the shape"
        )
    changes: dict[str, Any] = {}
    for name in FIELDS:
        value = getattr(section, name)
        if value is None:
            continue
        if name in OF_TRAINING:
            changes[name] = value
        elif value != _held(base, name):
            raise ConfigError(
                f"model.{name}: {value} contradicts {where}, whose {name} is {_held(base, name)}",
                f"leave model.{name} out, or write model.preset in place of model.path to train from the start",
            )
    longer = section.max_position_embeddings is not None and (
        section.max_position_embeddings != base.max_position_embeddings
    )
    if longer and base.position_embedding == "learned":
        raise ConfigError(
            f"model.max_position_embeddings: {section.max_position_embeddings} contradicts {where}, which has a table "
            f"of {base.max_position_embeddings} positions",
            "leave it out",
        )
    if tokenizer.vocab_size > base.vocab_size:
        raise DataError(
            f"data.tokenizer: {tokenizer.spec} has {tokenizer.vocab_size} tokens, and {where} has a vocabulary of "
            f"{base.vocab_size}",
            "use the tokenizer that belongs to the model (leave data.tokenizer out)",
        )
    return base.replace(**changes)


def _held(base: DecoderConfig, name: str) -> Any:
    """A field of a decoder with what None stands for."""
    filled = {"num_key_value_heads": base.kv_heads, "head_dim": base.head_size}
    return filled.get(name, getattr(base, name))
