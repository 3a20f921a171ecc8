"""Arguments of verbs that take no config: positional words and a few options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jtrain.config.names import nearest
from jtrain.errors import ConfigError

Kinds = Mapping[str, type]


def parse(
    args: Sequence[str], usage: str, words: Sequence[str], options: Kinds, *, optional: int = 0
) -> tuple[list[str], dict[str, Any]]:
    """Splits the arguments of a verb.

    Args:
      args: the arguments after the verb.
      usage: how it is called, for messages.
      words: names of the positional arguments, for messages.
      options: name without dashes -> str, int, float, list (texts: the option may come several times), tuple (the
        same, and every text up to the next option belongs to it), or bool (a switch, which takes no value).
      optional: how many of the last words may be left out.

    Returns:
      The positional arguments, and option -> value for those that are given.

    Raises:
      ConfigError: an option that there is not, a value that is none, too many or too few words.
    """
    found: list[str] = []
    values: dict[str, Any] = {}
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--"):
            found.append(arg)
            continue
        written, equals, text = arg[2:].partition("=")
        name = written.replace("_", "-")
        if name not in options:
            meant = nearest(name, options)
            raise ConfigError(f"--{written}: there is no such option", f"Did you mean --{meant}?" if meant else usage)
        kind = options[name]
        if kind is bool:
            if equals:
                raise ConfigError(f"--{name} takes no value", f"usage: {usage}")
            values[name] = True
            continue
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"--{name} has no value", f"usage: {usage}")
            text = rest.pop(0)
        if kind in (list, tuple):
            values.setdefault(name, []).append(text)
            while kind is tuple and rest and not rest[0].startswith("--"):
                values[name].append(rest.pop(0))
            continue
        try:
            values[name] = kind(text)
        except ValueError:
            word = {int: "a whole number", float: "a number"}.get(kind, "a value")
            raise ConfigError(f"--{name}: {text!r} is not {word}", f"usage: {usage}") from None
    if len(found) > len(words):
        raise ConfigError(f"{found[len(words)]!r} is one argument too many", f"usage: {usage}")
    if len(found) < len(words) - optional:
        raise ConfigError(f"{words[len(found)]} is missing", f"usage: {usage}")
    return found, values
