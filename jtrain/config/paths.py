"""Paths in a config: relative to the file that names them, on flags to the working directory. Recipes by name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jtrain.config.names import nearest
from jtrain.errors import ConfigError

OUTPUTS = ("run_dir", "checkpoint.backup", "data.cache_dir", "compile_cache")
"""Fields that name what a run writes."""

_WORDS = {"data.tokenizer": ("bytes",), "compile_cache": ("auto",)}
_MODELS = ("model.path", "dpo.ref_model", "distill.teacher")
"""Fields that name a model, which may be one of the hub."""
_INPUTS = (
    "data.train",
    "data.eval",
    "data.tokenizer",
    "data.chat_template",
    "checkpoint.init_from",
    "model.lora.path",
    *_MODELS,
)
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")


def recipe_folder() -> Path:
    """The folder of the recipes: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def recipes() -> dict[str, Path]:
    """Name -> file of every recipe."""
    return {path.stem: path for path in sorted(recipe_folder().glob("*.yaml"))}


def find_config(source: str | os.PathLike[str]) -> Path:
    """The file of `source`: a path, or the bare name of a recipe.

    Raises:
      ConfigError: there is no such file or recipe.
    """
    text = os.fspath(source)
    if re.fullmatch(r"[\w.-]+", text) and not text.endswith((".yaml", ".yml")):
        if text in recipes():
            return recipes()[text]
        if not Path(text).is_file():
            meant = nearest(text, recipes())
            raise ConfigError(
                f"CONFIG: there is no recipe {text!r}" + (f"; did you mean {meant!r}?" if meant else ""),
                f"Recipes: {', '.join(recipes())}. Or write the path of a YAML file.",
            )
    path = Path(text).expanduser()
    if path.is_dir():
        raise ConfigError(f"CONFIG: {text} is a folder", f"Write a YAML file, such as {path / 'config.yaml'}.")
    if not path.is_file():
        known = path.name in {f"{name}{path.suffix}" for name in recipes()}
        remedy = (
            f"The recipe is called {path.stem!r}." if known else "Write the path of a YAML file or a recipe's name."
        )
        raise ConfigError(f"CONFIG: {text} does not exist", remedy)
    return path


def map_paths(path: str, value: Any, change: Callable[[str], str]) -> Any:
    """`value` of the field `path` with `change` applied to every local path in it."""
    if path not in OUTPUTS and path not in _INPUTS:
        return value
    if isinstance(value, list | tuple):
        return type(value)(map_paths(path, item, change) for item in value)
    if not isinstance(value, str) or not value or value in _WORDS.get(path, ()) or _is_number(value):
        return value
    if "://" in value or (value.startswith("hf:") and path in ("data.train", "data.eval")):
        return value
    if path == "data.chat_template" and not value.endswith(".jinja"):
        return value  # a name
    changed = change(value)
    if path in _MODELS and is_hub_name(value) and not os.path.exists(changed):
        return value
    return changed


def is_hub_name(value: str) -> bool:
    """Whether a text has the form of a model on the hub, `org/name[@revision]`; a folder may have it too."""
    return _HUB_NAME.fullmatch(value) is not None


def relative_to(folder: Path) -> Callable[[str], str]:
    """Makes a path absolute that is relative to `folder`."""
    return lambda value: os.path.normpath(os.path.join(folder.resolve(), os.path.expanduser(value)))


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
