"""Flags: `--mesh.fsdp 4`, `--mesh fsdp=4,tensor=2`, aliases. Rewritten to the schema's own names, then parsed by tyro.

tyro is imported when there are flags to parse or a help page to print.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, get_origin

from jtrain.config import layers, names, rules
from jtrain.config.layers import Layer
from jtrain.config.schema import Config
from jtrain.config.task_defaults import with_task_defaults
from jtrain.config.validate import validate
from jtrain.config.yaml_file import parse_scalar
from jtrain.errors import ConfigError

_SWITCHES = ("bf16", "fp16", "gradient_checkpointing", "load_in_8bit", "load_in_4bit")
"""Aliases that stand for a word of another field."""
_NUMBER = re.compile(r"-(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?|-(inf|nan)")


class Flag(NamedTuple):
    """A flag as it was typed: dotted name with underscores, its values, and how messages name it."""

    name: str
    values: tuple[Any, ...]
    typed: str


def split(argv: Sequence[str]) -> tuple[list[str], list[Flag]]:
    """Positional arguments, and flags with their values.

    A flag of a list takes what follows up to the next flag; true-or-false flags may stand alone; `--no-x` is false.

    Raises:
      ConfigError: an unknown flag, or a missing value.
    """
    positional: list[str] = []
    flags: list[Flag] = []
    queue = list(argv)
    while queue:
        token = queue.pop(0)
        bare = re.fullmatch(r"([A-Za-z][\w.-]*)=(.*)", token, re.DOTALL)
        if bare and layers.known(names.plain(bare[1])):
            token = "--" + token
        if not token.startswith("-") or _NUMBER.fullmatch(token):
            positional.append(token)
            continue
        typed, equals, joined = token.partition("=")
        name, negated = _resolve(typed)
        if equals:
            flags.append(Flag(name, _joined(name, joined), typed))
            continue
        if negated:
            flags.append(Flag(name, ("false",), typed))
            continue
        flags.append(Flag(name, _values(name, queue, typed), typed))
    return positional, flags


def _resolve(typed: str) -> tuple[str, bool]:
    """The dotted name behind a typed flag, and whether it was negated (`--sharding.no-offload-optimizer`)."""
    name = names.plain(typed.lstrip("-"))
    if typed.startswith("--") and layers.known(name):
        return name, False
    section, dot, leaf = name.rpartition(".")
    positive = section + dot + leaf.removeprefix("no_")
    if typed.startswith("--") and leaf.startswith("no_") and layers.known(positive) and _is_switch(positive):
        return positive, True
    raise layers.unknown(name, typed)


def _target(name: str) -> str:
    alias = names.ALIASES.get(name)
    return alias.target if alias else name


def _is_switch(name: str) -> bool:
    """Whether the flag may stand alone."""
    if name in names.sections():
        return False
    alias = names.ALIASES.get(name)
    return name in _SWITCHES or names.takes(alias.target if alias else name, bool)


def _joined(name: str, text: str) -> tuple[Any, ...]:
    """The values of `--name=text`; a list may be written as in YAML: `--data.train=[a.txt,b.txt]`."""
    value = parse_scalar(text) if name not in names.sections() and names.many(_target(name)) else None
    return tuple(_items(value)) if isinstance(value, list) else (text,)


def _items(values: list[Any]) -> Iterator[Any]:
    """The items of a list as they would be typed, pairs one behind the other; mappings (sources with weights) as they
    are."""
    for value in values:
        if isinstance(value, list):
            yield from _items(value)
        else:
            yield value if isinstance(value, dict) else str(value)


def _values(name: str, queue: list[str], typed: str) -> tuple[Any, ...]:
    def at_value() -> bool:
        return bool(queue) and (not queue[0].startswith("-") or bool(_NUMBER.fullmatch(queue[0])))

    if name in names.sections() or not names.many(_target(name)):
        if _is_switch(name) and not (at_value() and _reads_as_switch(name, queue[0])):
            return ("true",)
        if not at_value():
            remedy = layers.short_form(name) if name in names.sections() else names.expected(_target(name))
            raise ConfigError(f"{typed}: a value is missing", f"Write {remedy}.")
        return (queue.pop(0),)
    taken: list[str] = []
    while at_value() and not _is_assignment(queue[0]):
        taken.append(queue.pop(0))
    whole = " ".join(taken)  # without quotes the shell cuts `[cat, dog]` at its spaces
    if whole.startswith("[") and whole.endswith("]") and (found := _joined(name, whole)) != (whole,):
        return found
    return tuple(taken)


def _is_assignment(token: str) -> bool:
    name, equals, _ = token.partition("=")
    return bool(equals) and layers.known(names.plain(name))


def _reads_as_switch(name: str, token: str) -> bool:
    number = names.takes(_target(name), int) and re.fullmatch(r"-?\d+", token)
    return bool(number) or token.lower() in ("true", "false", "yes", "no", "on", "off", "0", "1")


def to_layer(flags: Iterable[Flag]) -> Layer:
    """The layer of the flags, by which they replace what weaker layers say. The last of two equal flags counts."""
    layer = Layer()
    for flag in flags:
        target = _target(flag.name)
        if flag.name not in names.sections() and names.many(target):
            converted = flag.name in names.ALIASES and names.ALIASES[flag.name].convert is not None
            value: Any = flag.values[0] if len(flag.values) == 1 and (converted or target == "data.eval") else None
            value = _grouped(target, flag.values) if value is None else value
        else:
            (value,) = flag.values
        layers.assign(layer, flag.name, value, flag.typed, text=True, once=False)
    return layer


def _grouped(path: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values of a list; those of a list of pairs, in pairs."""
    if path != "optimizer.decay_rules":
        return values
    return tuple(values[i : i + 2] for i in range(0, len(values), 2))


def parse(flags: Iterable[Flag], weaker: Layer) -> Config:
    """The checked config of the flags over the weaker layers.

    Raises:
      ConfigError: see `load_config`.
    """
    layer = to_layer(flags)
    whole = with_task_defaults(layer.over(weaker))
    rest = [path for path in whole.values if path not in layer.values]
    default = validate(Layer({path: whole.values[path] for path in rest}, {path: whole.origin[path] for path in rest}))
    import tyro

    page = io.StringIO()
    try:
        with contextlib.redirect_stderr(page), contextlib.redirect_stdout(page):
            config = tyro.cli(Config, args=_canonical(layer), default=default, registry=_registry())
    except SystemExit:
        validate(whole)  # one short message, where tyro prints a page
        raise ConfigError("the flags can't be read", page.getvalue().strip()) from None
    # tyro sets every field. What nobody said stays unset: a model may fill it in (its own limit as max_length).
    said = {path: functools.reduce(getattr, path.split("."), config) for path in whole.values}
    return rules.check(validate(Layer(said, whole.origin)))


def print_help(prog: str, default: Config) -> None:
    """Prints all fields by section, with the values they have without flags."""
    import tyro

    with contextlib.suppress(SystemExit):
        tyro.cli(Config, args=["--help"], prog=prog, default=default, registry=_registry(), description=_DESCRIPTION)


_DESCRIPTION = """CONFIG is a YAML file or the name of a recipe; flags change its fields.
Short form: --mesh fsdp=4,tensor=2 replaces a section. `jtrain config docs` lists the names of Hugging Face and
Lightning that are understood as well."""


def _canonical(layer: Layer) -> list[str]:
    """The layer as tyro's own flags."""
    argv: list[str] = []
    for path, value in layer.values.items():
        section, dot, leaf = path.rpartition(".")
        if isinstance(value, bool) and names.members(path) == (bool,):
            argv.append(f"--{section}{dot}{'' if value else 'no_'}{leaf}")
        else:
            argv += [f"--{path}", *_texts(value)]
    return argv


def _texts(value: Any) -> list[str]:
    if isinstance(value, list | tuple):
        return [text for item in value for text in _texts(item)]
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # `--seed 1e3`: a whole number, as in a file
    return [json.dumps(value) if isinstance(value, dict) else str(value)]


def _registry() -> Any:
    """How tyro reads a mapping: as one YAML value."""
    import tyro

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def mapping(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
        if get_origin(info.type) is not dict:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="{NAME: [AXIS]}",
            instance_from_str=lambda texts: parse_scalar(texts[0]),
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [json.dumps(value)],
        )

    return registry
