"""What a Hugging Face folder holds beside its weights, and a trained copy of it must hold again."""

from __future__ import annotations

import dataclasses
import json
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
