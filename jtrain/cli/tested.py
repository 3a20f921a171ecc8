"""The versions that jtrain's tests were run with: a table that CI writes, and `jtrain doctor` compares with.

    python -m jtrain.cli.tested jtrain/cli/tested.json pyproject.toml

writes the row of the interpreter that runs it, after its tests have passed.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("tested.json")
BESIDE = ("jaxlib", "tensorstore", "ml-dtypes")
"""Packages of the table that come with the dependencies, and matter as much."""


class Tested(NamedTuple):
    """The table.

    Attributes:
      least: package -> the least version that jtrain asks for.
      rows: Python (`3.12`) -> package -> the version that was tested there.
    """

    least: Mapping[str, str]
    rows: Mapping[str, Mapping[str, str]]


def read(path: Path = TABLE) -> Tested:
    """The table."""
    content = json.loads(path.read_text())
    return Tested(content["least"], {row["python"]: row["packages"] for row in content["tested"]})


def python_version() -> str:
    """This interpreter's, without the patch: `3.12`."""
    return ".".join(platform.python_version_tuple()[:2])


def installed(names: Mapping[str, object]) -> dict[str, str]:
    """Package -> version, of those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def number(version: str) -> tuple[int, ...]:
    """`0.12.8rc1` as (0, 12, 8), to compare."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[a-z+-]", version)[0]))


def least_of(project: Path) -> dict[str, str]:
    """Package -> least version, of the dependencies of a pyproject.toml."""
    import tomllib

    lines = tomllib.loads(project.read_text())["project"]["dependencies"]
    found = (re.match(r"([\w-]+)(?:\[\w+\])?>=([\w.]+)", line) for line in lines)
    return dict(sorted((match[1], match[2]) for match in found if match))


def write(table: Path, project: Path) -> bool:
    """Puts this interpreter's row into the table; returns whether that changed it."""
    least = least_of(project)
    rows = dict(read(table).rows) if table.exists() else {}
    rows[python_version()] = dict(sorted(installed({**least, **dict.fromkeys(BESIDE)}).items()))
    ordered = sorted(rows.items(), key=lambda row: number(row[0]))
    content = {"least": least, "tested": [{"python": python, "packages": packages} for python, packages in ordered]}
    text = json.dumps(content, indent=2) + "\n"
    changed = not table.exists() or table.read_text() != text
    table.write_text(text)
    return changed


if __name__ == "__main__":
    table, project = map(Path, sys.argv[1:])
    print(f"{table}: {'changed: commit it' if write(table, project) else 'as it was'}")
