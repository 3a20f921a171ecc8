"""What a Hugging Face folder holds beside its weights, and a trained copy of it must hold again."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from jtrain.data.hub import COMPANIONS

GENERATION = "generation_config.json"
NAMES = COMPANIONS
"""Files that are carried on unchanged."""
EXTRA_TEMPLATES = "additional_chat_templates"
"""Folder whose `*.jinja` are carried on as well."""


@dataclasses.dataclass(frozen=True)
class Companions:
    """The small files of a Hugging Face folder.

    Attributes:
      config: config.json as it was read; empty for a model that was born here.
      files: name (relative to the folder) -> content, of everything in `NAMES` that is there.
    """

    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file's mapping (`generation_config.json`); empty where it is absent or no mapping."""
        try:
            value = json.loads(self.files.get(name, b"{}"))
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


_LOCAL = re.compile(r"(/|~|[A-Za-z]:[\\/]|\\\\|file:)")
_PLACES = ("name_or_path", "file", "path", "dir", "cache_dir")


def portable(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files as they may leave this machine: JSON settings that name a place on it hold its last name alone.

    transformers writes such settings (`name_or_path`, `tokenizer_file`, ...) and reads none of them.
    """
    return {name: _portable(data) if name.endswith("_config.json") else data for name, data in files.items()}


def _portable(data: bytes) -> bytes:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data
    short = shortened(value)
    return data if short == value else (json.dumps(short, indent=2, ensure_ascii=False) + "\n").encode()


def shortened(value: Any, key: str = "") -> Any:
    """A tree with the last name of every absolute path in place of it, where the key says that it is a path."""
    if isinstance(value, Mapping):
        return {name: shortened(item, str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [shortened(item, key) for item in value]
    if isinstance(value, str) and key.endswith(_PLACES) and _LOCAL.match(value):
        return re.split(r"[\\/]", value.rstrip("\\/"))[-1]
    return value
