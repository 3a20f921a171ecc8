"""A config as text: YAML, JSON schema and the reference page. Secrets are masked."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Mapping
from typing import Any

from jtrain.config import names, paths
from jtrain.config.schema import Config
from jtrain.config.yaml_file import dump_yaml
from jtrain.redaction import redact


def to_dict(config: Config | Mapping[str, Any], *, masked: bool = True) -> dict[str, Any]:
    """The config as JSON values, in the order of the schema."""
    tree = config.model_dump(mode="json") if isinstance(config, Config) else dict(config)
    return redact(tree, prose=False) if masked else tree


def to_yaml(config: Config, *, masked: bool = True) -> str:
    """The resolved config as YAML that reads back to the same config from any folder: its paths are absolute."""
    tree = to_dict(config, masked=masked)
    for path in names.fields():
        *sections, leaf = path.split(".")
        branch = functools.reduce(operator.getitem, sections, tree)
        branch[leaf] = paths.map_paths(path, branch[leaf], os.path.abspath)
    return dump_yaml(tree)


def json_schema() -> dict[str, Any]:
    """JSON schema of a config file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}


def reference() -> str:
    """The reference page: every field with its type, default and meaning, and the table of aliases (Markdown)."""
    lines = [
        "# Config reference",
        "",
        "Made by `jtrain config docs`. Precedence: flag > environment (`JTRAIN_MESH__FSDP=4`) > file > default.",
        "`--mesh.fsdp 4` changes one field; `--mesh fsdp=4,tensor=2` replaces the section.",
        "A length is a number of steps (`100`), a ratio of the run (`0.05`), `5%`, `2 epochs` or `1e9 tokens`.",
        "",
        "## Top level",
        *_table([path for path in names.fields() if "." not in path]),
    ]
    for section in names.sections():
        lines += ["", f"## {section}", *_table([path for path in names.fields() if path.rpartition(".")[0] == section])]
    lines += ["", "## Other names", "", "| name | from | is | |", "|---|---|---|---|"]
    lines += [f"| `{a.name}` | {a.origin} | `{a.target}` | {a.note} |" for a in names.ALIASES.values()]
    return "\n".join(lines) + "\n"


def _table(fields: list[str]) -> list[str]:
    rows = ["", "| field | takes | default | |", "|---|---|---|---|"]
    for path in fields:
        info = names.fields()[path]
        default = dump_yaml(info.default).removesuffix("...\n").strip().replace("|", "\\|").replace("\n", " ")
        default = "" if info.default is None else f"`{default}`"
        meaning = " ".join((info.description or "").split())
        rows.append(f"| `{path}` | {names.expected(path)} | {default} | {meaning} |")
    return rows
