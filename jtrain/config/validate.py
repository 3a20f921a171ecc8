"""Every field checked by itself, with mistakes said in the words of the schema."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from jtrain.config import layers, names
from jtrain.config.layers import Layer
from jtrain.config.schema import Config
from jtrain.config.yaml_file import nested
from jtrain.errors import ConfigError


def validate(layer: Layer) -> Config:
    """The config of a layer, with every field checked by itself.

    Raises:
      ConfigError: a value that its field does not take.
    """
    for path, value in layer.values.items():
        foreseen = names.NOT_BUILT.get(path, ())
        if isinstance(value, str) and value in foreseen:
            raise layers.not_built(path, value, layer.origin[path])
        if isinstance(value, bool) and not (names.takes(path, bool)):
            raise invalid(path, value, layer.origin[path])
    try:
        return Config.model_validate(nested(layer.values))
    except ValidationError as error:
        raise from_validation(error, layer) from None


def from_validation(error: ValidationError, layer: Layer) -> ConfigError:
    """The first mistake that pydantic found, in our words."""
    mistake = error.errors()[0]
    path = ""
    for part in mistake["loc"]:
        longer = f"{path}.{part}" if path else str(part)
        if longer not in names.fields() and longer not in names.sections():
            break
        path = longer
    if path in names.fields():
        return invalid(path, layer.values.get(path), layer.origin.get(path, path))
    return ConfigError(f"{path or 'config'}: {mistake['msg']}", "`jtrain config docs` shows the form.")


def invalid(path: str, value: Any, origin: str) -> ConfigError:
    """The error for a value that its field does not take."""
    remedy = f"Write {names.expected(path)}."
    words = names.choices(path)
    if words and isinstance(value, str):
        meant = names.nearest(value, words)
        remedy += f" Did you mean {meant}?" if meant else ""
    if path == "max_steps" and value == -1:
        remedy = "Leave max_steps out and write num_train_epochs."
    named = origin if origin.endswith(path) or ":" not in origin else f"{origin} ({path})"
    return ConfigError(f"{named}: {value!r} is not allowed", remedy)
