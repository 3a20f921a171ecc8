"""What verbs share: CONFIG and its flags, and help pages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from jtrain.config import flags, layers, load
from jtrain.config.schema import Config
from jtrain.errors import ConfigError


def wants_help(args: Sequence[str]) -> bool:
    """Whether the arguments ask for the help page."""
    return "--help" in args or "-h" in args


def parse_config(args: Sequence[str], usage: str, *, optional: bool, defaults: dict[str, Any] | None = None) -> Config:
    """The config of `[CONFIG] [--flags]`.

    Args:
      args: the arguments of the verb.
      usage: how the verb is called, for messages.
      optional: whether CONFIG may be left out.
      defaults: fields that the verb sets, under CONFIG.

    Raises:
      ConfigError: CONFIG is missing, or see `load_config`.
    """
    given, weaker, _ = settings(args, usage, optional=optional, defaults=defaults)
    return flags.parse(given, weaker) if given else load.build(weaker)


def settings(
    args: Sequence[str], usage: str, *, optional: bool, defaults: dict[str, Any] | None = None
) -> tuple[list[flags.Flag], layers.Layer, str | None]:
    """The flags, the layer of everything weaker, and CONFIG if it is given; the arguments are `parse_config`'s."""
    positional, given = flags.split(args)
    if len(positional) > 1:
        raise ConfigError(f"{positional[1]!r} is one argument too many", f"usage: {usage}")
    if not positional and not optional:
        from jtrain.config.paths import recipes

        raise ConfigError("CONFIG is missing", f"usage: {usage}\n  Recipes: {', '.join(recipes())}.")
    file = positional[0] if positional else None
    weaker = load.from_source(file).over(layers.from_mapping(defaults or {}, str))
    return given, load.from_environment(os.environ).over(weaker), file


def start_devices(accelerator: str | None = None) -> None:
    """Brings up the devices for a verb that runs a model without a run's config.

    Raises:
      ConfigError: there is no such device.
    """
    from jtrain.parallel import processes

    processes.start(load.load_config({"accelerator": accelerator} if accelerator else None))


def print_help(args: Sequence[str], usage: str, task: str = "pretrain") -> None:
    """Prints the help page of a verb that takes a config: all fields by section, with the values they have.

    Those are CONFIG's if it is given, else the defaults of the task.
    """
    positional, _ = flags.split([arg for arg in args if arg not in ("--help", "-h")])
    source = load.from_source(positional[0] if positional else None)
    default = load.build(source.over(layers.from_mapping({"task": task}, str))) if source.values else _plain(task)
    flags.print_help(usage.partition(" [--flags]")[0], default)


def _plain(task: str) -> Config:
    return Config() if task == "pretrain" else load.load_config({"task": task}, env={})
