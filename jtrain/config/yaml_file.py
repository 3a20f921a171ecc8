"""YAML that is data only: no tags, no duplicate keys, and limits on size, depth and aliases.

Scalars follow the core schema of YAML 1.2, so that `3e-4` and `1e9` are numbers and `no` is a word.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from jtrain.errors import ConfigError

MAX_BYTES = 1_000_000
MAX_DEPTH = 32
MAX_NODES = 20_000
MAX_ALIASES = 64

_CORE = "tag:yaml.org,2002:"
_RESOLVERS = (
    ("null", re.compile(r"|~|null|Null|NULL"), [*"~nN", ""]),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), [*"tTfF"]),
    ("int", re.compile(r"[-+]?\d+|0x[0-9a-fA-F]+"), [*"-+0123456789"]),
    (
        "float",
        re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
        [*"-+.0123456789"],
    ),
)


def _core_schema(cls: type) -> type:
    """Replaces the YAML 1.1 resolvers of a loader or dumper by those of the core schema."""
    cls.yaml_implicit_resolvers = {}  # type: ignore[attr-defined]
    for name, pattern, first in _RESOLVERS:
        cls.add_implicit_resolver(_CORE + name, re.compile(f"(?:{pattern.pattern})\\Z"), first)  # type: ignore[attr-defined]
    return cls


@_core_schema
class _Loader(yaml.SafeLoader):
    """Composes nodes; objects are built here and never by PyYAML's constructors."""


@_core_schema
class _Dumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)

    def represent_tuple(self, data: tuple[Any, ...]) -> yaml.Node:
        return self.represent_sequence(_CORE + "seq", data, flow_style=all(not isinstance(x, dict) for x in data))


_Dumper.add_representer(tuple, _Dumper.represent_tuple)

Lines = dict[str, int]
"""Dotted path of a key -> its line in the file, from 1."""


def read_yaml(text: str, name: str) -> tuple[Any, Lines]:
    """The value of a YAML document, and the lines of its keys.

    Args:
      text: the document.
      name: what messages call it.

    Raises:
      ConfigError: not YAML, tags, duplicate keys, or over a limit.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{name}: {len(text):,} characters", f"A config has at most {MAX_BYTES:,}.")
    try:
        _check_limits(text, name)
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name} line {mark.line + 1}" if mark else name
        raise ConfigError(f"{where}: not YAML: {getattr(error, 'problem', None) or error}", _hint(text, mark)) from None
    if node is not None and _size(node, {}) > MAX_NODES:
        raise ConfigError(
            f"{name}: aliases stand for more than {MAX_NODES:,} values", "A config is a small, flat file."
        )
    lines: Lines = {}
    return (None if node is None else _build(node, name, "", lines)), lines


def parse_scalar(text: str) -> Any:
    """The value that YAML gives to `text` as a flow value; text that is not YAML stays as it is."""
    try:
        return read_yaml(text, "value")[0]
    except ConfigError:
        return text


def dump_yaml(value: Any) -> str:
    """`value` as YAML that `read_yaml` reads back to the same value; keys keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _check_limits(text: str, name: str) -> None:
    """Counts on the event stream, which needs no recursion: composing a hostile document would."""
    depth = nodes = aliases = 0
    for event in _events(text):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        nodes += isinstance(event, yaml.NodeEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        for figure, limit, what in (
            (depth, MAX_DEPTH, "nested levels"),
            (nodes, MAX_NODES, "values"),
            (aliases, MAX_ALIASES, "aliases"),
        ):
            if figure > limit:
                line = event.start_mark.line + 1 if event.start_mark else 0  # pyyaml's own events all have one
                raise ConfigError(f"{name} line {line}: more than {limit:,} {what}", "A config is a small, flat file.")


def _events(text: str) -> Iterator[yaml.Event]:
    """The events: of libyaml where PyYAML has it, many times faster; behind what it refuses, those of PyYAML itself."""
    if not yaml.__with_libyaml__:
        yield from yaml.parse(text, Loader=_Loader)
        return
    count = 0
    try:
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            count += 1
            yield event
    except yaml.YAMLError:
        yield from itertools.islice(yaml.parse(text, Loader=_Loader), count, None)


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Values that a node stands for when its aliases are written out: a few can stand for billions."""
    if id(node) not in known:
        known[id(node)] = 1
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = itertools.chain.from_iterable(inner) if isinstance(node, yaml.MappingNode) else inner
        known[id(node)] += sum(_size(part, known) for part in parts)
    return known[id(node)]


def _build(node: yaml.Node, name: str, path: str, lines: Lines, depth: int = 0) -> Any:
    line = node.start_mark.line + 1
    if depth > MAX_DEPTH:
        raise ConfigError(f"{name} line {line}: an alias that contains itself", "Write the value out.")
    if isinstance(node, yaml.MappingNode) and node.tag == _CORE + "map":
        built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key_line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{name} line {key_line}: a key that is not a word", "Write `key: value`.")
            key = key_node.value
            here = f"{path}.{key}" if path else key
            if key in built:
                raise ConfigError(
                    f"{name} line {key_line}: `{here}` stands twice (first on line {lines[here]})", "Keep one of them."
                )
            lines[here] = key_line
            built[key] = _build(value_node, name, here, lines, depth + 1)
        return built
    if isinstance(node, yaml.SequenceNode) and node.tag == _CORE + "seq":
        return [_build(item, name, f"{path}[]", lines, depth + 1) for item in node.value]
    if isinstance(node, yaml.ScalarNode):
        if node.tag == _CORE + "str":
            return node.value
        if node.tag in _SCALARS:
            try:
                return _SCALARS[node.tag](node.value)
            except (ValueError, KeyError):
                raise ConfigError(f"{name} line {line}: `{path}`: {node.value!r} does not fit its tag") from None
    raise ConfigError(
        f"{name} line {line}: tag `{node.tag.replace(_CORE, '!!')}` at `{path or 'the top'}`",
        "A config holds plain values: write the value without a tag.",
    )


def _float(text: str) -> float:
    special = {"inf": math.inf, "-inf": -math.inf, "+inf": math.inf, "nan": math.nan}
    plain = text.lower().replace(".inf", "inf").replace(".nan", "nan")
    return special[plain] if plain in special else float(text)


_SCALARS = {
    _CORE + "null": lambda text: None,
    _CORE + "bool": lambda text: {"true": True, "false": False}[text.lower()],
    _CORE + "int": lambda text: int(text, 16 if text.lower().startswith("0x") else 10),
    _CORE + "float": _float,
}


def _hint(text: str, mark: Any) -> str | None:
    if mark is None:
        return None
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in line[: len(line) - len(line.lstrip())]:
        return "Indent with spaces, not tabs."
    return f"The line is: {line.strip()[:80]}" if line.strip() else None


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *sections, leaf = path.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[leaf] = value
    return tree
