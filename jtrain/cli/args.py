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
    positional, given = flags.split(args)
    if len(positional) > 1:
        raise ConfigError(f"{positional[1]!r} is one argument too many", f"usage: {usage}")
    if not positional and not optional:
        from jtrain.config.paths import recipes

        raise ConfigError("CONFIG is missing", f"usage: {usage}\n  Recipes: {', '.join(recipes())}.")
    source = load.from_source(positional[0] if positional else None)
    weaker = source.over(layers.from_mapping(defaults or {}, str))
    weaker = load.from_environment(os.environ).over(weaker)
    return flags.parse(given, weaker) if given else load.build(weaker)


def start_devices(accelerator: str | None = None) -> None:
    """Brings up the devices for a verb that runs a model without a run's config.

    Raises:
      ConfigError: there is no such device.
    """
    from jtrain.parallel import processes

    processes.start(load.load_config({"accelerator": accelerator} if accelerator else None))


def print_help(args: Sequence[str], usage: str) -> None:
    """Prints the help page of a verb that takes a config: all fields by section, with CONFIG's values if given."""
    positional, _ = flags.split([arg for arg in args if arg not in ("--help", "-h")])
    default = load.build(load.from_source(positional[0])) if positional else Config()
    flags.print_help(usage.partition(" [--flags]")[0], default)
