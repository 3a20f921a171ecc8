"""From files, environment, flags and Python to one checked, frozen `Config`. Flag > environment > file > default."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jtrain.config import layers, names, paths, rules
from jtrain.config.layers import Layer
from jtrain.config.schema import Config
from jtrain.config.task_defaults import with_task_defaults
from jtrain.config.validate import validate
from jtrain.config.yaml_file import read_yaml
from jtrain.errors import ConfigError

logger = logging.getLogger(__name__)

Source = str | os.PathLike[str] | Mapping[str, Any] | Config | None


def load_config(
    source: Source = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    env: Mapping[str, str] | None = None,
) -> Config:
    """The config of a run: checked, with aliases and short forms resolved.

    Args:
      source: a YAML file, the bare name of a recipe, a mapping of the same shape, a Config, or None for defaults.
      overrides: flags as on the command line (`["--mesh.fsdp", "4"]`, also `["mesh.fsdp=4"]`), or a mapping.
      env: the environment; `os.environ` by default. It does not reach a Config, which has been through all this.

    Raises:
      ConfigError: a name, value or combination that is not allowed; the message names it, its place and the remedy.
    """
    weaker = from_source(source)
    if not isinstance(source, Config):
        weaker = from_environment(env).over(weaker)
    if isinstance(overrides, Mapping):
        return build(layers.from_mapping(overrides, str).over(weaker))
    if not overrides:
        return build(weaker)
    from jtrain.config import flags

    positional, given = flags.split(overrides)
    if positional:
        raise ConfigError(f"{positional[0]!r} is not a flag", "Write --name value, or name=value.")
    return flags.parse(given, weaker)


def from_source(source: Source) -> Layer:
    """The layer of a file, a recipe, a mapping or a config."""
    if source is None:
        return Layer()
    if isinstance(source, Config):
        return layers.from_config(source)
    if isinstance(source, Mapping):
        return layers.from_mapping(source, str)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"config: a {type(source).__name__}", "Give a Config, a YAML file, a recipe's name or a dict."
        )
    return from_file(paths.find_config(source))


def from_file(file: Path) -> Layer:
    """The layer of a YAML file. Its paths are relative to it; what a recipe writes goes to the working directory."""
    name = str(file)
    try:
        data, lines = read_yaml(file.read_bytes().decode("utf-8"), name)
    except OSError as error:
        raise ConfigError(f"{name}: can't be read: {error.strerror}", "Check the file's permissions.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 (byte {error.start})", "Save the file as UTF-8 text.") from None
    if data is None:
        return Layer()
    if not isinstance(data, dict):
        raise ConfigError(f"{name}: a {type(data).__name__}, not a mapping", "Write lines such as `max_steps: 300`.")
    written = {".".join(names.plain(part) for part in path.split(".")): line for path, line in lines.items()}

    def place(path: str) -> str:
        line = next((written[p] for p in (path, path.partition(".")[0]) if p in written), None)
        return f"{name} line {line}: {path}" if line else f"{name}: {path}"

    layer = layers.from_mapping(data, place)
    is_recipe = file.resolve().parent == paths.recipe_folder()
    for path, value in layer.values.items():
        folder = Path.cwd() if is_recipe and path in paths.OUTPUTS else file.parent
        layer.values[path] = paths.map_paths(path, value, paths.relative_to(folder))
    return layer


def from_environment(env: Mapping[str, str] | None) -> Layer:
    """The layer of the variables that begin with `JTRAIN_`."""
    return layers.from_environment(os.environ if env is None else env, logger.warning)


def build(layer: Layer) -> Config:
    """The config of a layer: every field is checked by itself, then against the others."""
    return rules.check(validate(with_task_defaults(layer)))
