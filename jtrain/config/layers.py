"""One layer of settings a source (file, environment, flags, Python), each in the one flat form; later layers win.

Here aliases become fields, short forms become fields, and a name that is no field is answered with the nearest one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from jtrain.config import names
from jtrain.config.schema import Config, split_sources
from jtrain.config.yaml_file import parse_scalar
from jtrain.errors import ConfigError

ENVIRONMENT = "JTRAIN_"
RESERVED = frozenset({"JTRAIN_CACHE_DIR", "JTRAIN_SUPERVISED", "JTRAIN_ATTEMPT", "JTRAIN_LAST_END"})
"""Variables with the prefix that are not fields."""

EXCLUSIVE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("max_steps", ("num_train_epochs",)),
    ("num_train_epochs", ("max_steps",)),
    ("data.train", ("data.weights",)),
    (
        "strategy",
        (
            *(f"mesh.{axis}" for axis in ("data", "fsdp", "pipeline", "context", "tensor", "expert")),
            "sharding.optimizer_axes",
            "sharding.gradient_axes",
        ),
    ),
)
"""A field that a stronger layer sets, and the fields of weaker layers that it replaces."""


@dataclass
class Layer:
    """Dotted path -> value, with the place where each was written."""

    values: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    """Sections that this layer replaces as a whole: a short form, or a model object."""

    def put(self, path: str, value: Any, origin: str, *, once: bool = True) -> None:
        """Sets a field. With `once`, setting it under two names with two values is an error."""
        if once and path in self.values and self.values[path] != value:
            raise ConfigError(
                f"{origin}: {value!r} contradicts {self.origin[path]}: {self.values[path]!r}",
                f"Both mean {path}: keep one of them.",
            )
        self.values[path] = value
        self.origin[path] = origin

    def replace(self, section: str) -> None:
        """Puts a section back to its defaults; what weaker layers say about it no longer counts."""
        self.replaced.add(section)
        for path in [path for path in self.values if path.startswith(section + ".")]:
            del self.values[path], self.origin[path]

    def over(self, weaker: Layer) -> Layer:
        """Both layers as one."""
        dropped = {loser for winner, losers in EXCLUSIVE if self.values.get(winner) is not None for loser in losers}
        if "mesh" in self.replaced:
            dropped.add("strategy")
            if weaker.values.get("strategy"):  # which may have been written out already
                dropped |= {"sharding.optimizer_axes", "sharding.gradient_axes"}
        gone = tuple(f"{section}." for section in self.replaced)
        kept = [path for path in weaker.values if path not in dropped and not path.startswith(gone)]
        return Layer(
            {path: weaker.values[path] for path in kept} | self.values,
            {path: weaker.origin[path] for path in kept} | self.origin,
            self.replaced | weaker.replaced,
        )


Place = Callable[[str], str]
"""Name as it was written -> how a message names it and its place."""


def from_mapping(data: Mapping[str, Any], place: Place) -> Layer:
    """A layer of nested mappings; keys may also be dotted, hyphenated or aliases.

    Raises:
      ConfigError: an unknown name, two names for one field, a short form that is not one.
    """
    layer = Layer()
    for key, value in _dotted(data):
        assign(layer, key, value, place(key), text=False)
    return layer


def _dotted(data: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in data.items():
        path = prefix + names.plain(str(key))
        if isinstance(value, Mapping) and path in names.sections():
            yield from _dotted(value, path + ".")
        else:
            yield path, value


def from_environment(env: Mapping[str, str], warn: Callable[[str], None]) -> Layer:
    """The layer of `JTRAIN_MESH__FSDP=4` and its like.

    A variable with the prefix that no field is near to belongs to somebody else: `warn` hears of it. A near miss,
    or one with `__`, is an error.
    """
    layer = Layer()
    for variable in sorted(env):
        if not variable.startswith(ENVIRONMENT) or variable in RESERVED:
            continue
        name = variable[len(ENVIRONMENT) :].lower().replace("__", ".")
        if not known(name) and "." not in name and not names.nearest(name, [*names.fields(), *names.ALIASES]):
            warn(f"{variable} is not a field of the config: it is left alone")
            continue
        assign(layer, name, env[variable], variable, text=True)
    return layer


def known(name: str) -> bool:
    """Whether the dotted name is a field, a section or an alias."""
    return name in names.fields() or name in names.sections() or name in names.ALIASES


def assign(layer: Layer, name: str, value: Any, origin: str, *, text: bool, once: bool = True) -> None:
    """Puts one setting into the layer.

    Args:
      layer: receives it.
      name: dotted path, section or alias; underscores.
      value: its value; with `text`, a string as it was typed.
      origin: how messages name it.
      text: whether strings still have to be read as YAML values.
      once: whether a second value for the same field is an error.
    """
    value = _plain_value(value)
    if name in names.sections():
        _assign_section(layer, name, value, origin, text=text)
        return
    alias = names.ALIASES.get(name)
    path = alias.target if alias else name
    if path not in names.fields():
        raise unknown(name, origin)
    if text and isinstance(value, str):
        value = read_text(path, value, translated=alias is not None and alias.convert is not None)
    if alias and alias.convert:
        value = alias.convert(value)
        if value is None:
            return
    if value is None and not names.optional(path):
        return  # a blank value: as if it were not there
    if path == "data.train" and isinstance(value, list | tuple):
        try:
            value, weights = split_sources(value)
        except ValueError as error:
            raise ConfigError(f"{origin}: {error}", "Write every source as {path: ..., weight: ...}.") from None
        if weights:
            layer.put("data.weights", weights, origin, once=once)
    layer.put(path, value, origin, once=once)


def _assign_section(layer: Layer, section: str, value: Any, origin: str, *, text: bool) -> None:
    if value is None:
        return
    if isinstance(value, BaseModel):
        if not isinstance(value, names.sections()[section]):
            raise ConfigError(
                f"{origin}: a {type(value).__name__}", f"Give a {names.sections()[section].__name__} or a mapping."
            )
        layer.replace(section)
        for path in set_fields(value, f"{section}."):
            layer.put(path, _leaf(value, path.removeprefix(f"{section}.")), origin)
        return
    if isinstance(value, Mapping):
        for key, item in _dotted(value, section + "."):
            assign(layer, key, item, origin, text=text)
        return
    if not isinstance(value, str):
        raise ConfigError(f"{origin}: {value!r} is not a section", f"Write {short_form(section)}.")
    if value in names.NOT_BUILT.get(section, ()):
        raise not_built(section, value, origin)
    layer.replace(section)
    for pair in value.split(","):
        key, equals, item = pair.partition("=")
        path = f"{section}.{names.plain(key.strip())}"
        if not equals or not key.strip() or not item.strip():
            raise ConfigError(f"{origin}: {value!r} is not a list of name=value", f"Write {short_form(section)}.")
        if path not in names.fields():
            raise unknown(path, origin)
        if path in layer.values:
            raise ConfigError(f"{origin}: {value!r} names `{key.strip()}` twice", "Keep one of them.")
        layer.put(path, read_text(path, item.strip()), origin)


def short_form(section: str) -> str:
    """An example of what may be written for a whole section."""
    if section == "mesh" or section.startswith("roles."):
        return f"{section}: fsdp=4,tensor=2"
    leaves = list(names.sections()[section].model_fields)[:2]
    return f"{section}: {{{leaves[0]}: ..., {leaves[1]}: ...}}"


def read_text(path: str, text: str, *, translated: bool = False) -> Any:
    """A value typed on the command line or in the environment; text stays text where the field takes only that."""
    if not translated and names.takes(path, str) and not names.is_duration(path):
        return None if names.optional(path) and text.lower() in ("none", "null", "~") else text
    if names.choices(path) and text in names.choices(path):
        return text
    if names.optional(path) and text.lower() in ("none", "null", ""):
        return None
    value = parse_scalar(text)
    return text if value is None and not translated else value


def _plain_value(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()  # a number of NumPy or JAX
    if isinstance(value, list | tuple):
        return type(value)(_plain_value(item) for item in value)
    return value


def unknown(name: str, origin: str) -> ConfigError:
    """The error for a name that is no field."""
    meant = None if name.startswith("roles.") else names.nearest_name(name)  # axes have their names in `mesh`, too
    section = next((s for s in (name.rpartition(".")[0], name.partition(".")[0]) if s in names.sections()), "")
    if meant:
        remedy = f"Did you mean {'--' if origin.startswith('-') else ''}{meant}?"
    elif section:
        known = list(names.sections()[section].model_fields)
        more = f" and {len(known) - 12} more (docs/config.md)" if len(known) > 12 else ""
        remedy = f"{section} has: {', '.join(known[:12])}{more}."
    else:
        remedy = "`jtrain config docs` lists every field."
    where = origin if origin.replace("-", "_").endswith(name) else f"{origin}: {name}"
    return ConfigError(f"{where}: there is no such field", remedy)


def not_built(path: str, value: Any, origin: str) -> ConfigError:
    """The error for a value that the config foresees and that does not exist yet."""
    allowed = names.choices(path) if path in names.fields() else ()
    remedy = f"Write one of {', '.join(allowed)}." if allowed else "Write the mesh out, such as mesh: fsdp=4,tensor=2."
    return ConfigError(f"{origin}: {value!r} is not built yet", remedy)


def from_config(config: Config) -> Layer:
    """The layer of the fields that a config object sets."""
    layer = Layer()
    for path in set_fields(config):
        layer.put(path, _leaf(config, path), path)
    return layer


def _leaf(section: BaseModel, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), section)


def set_fields(section: BaseModel, prefix: str = "") -> list[str]:
    """Dotted paths of the fields that were given, and not left to their defaults."""
    given: list[str] = []
    for name in section.model_fields_set:
        if prefix + name in names.sections():
            given.extend(set_fields(getattr(section, name), f"{prefix}{name}."))
        else:
            given.append(prefix + name)
    return given
