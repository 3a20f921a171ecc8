"""The records that a run left out (`data.on_bad_record: skip`), listed in its directory."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etils import epath

log = logging.getLogger("jtrain.data")

NAME = "quarantine.jsonl"
"""In the folder of a token cache, and in a run directory."""


def write_quarantine(run_dir: str | os.PathLike[str], *rows: Any) -> int:
    """Writes `quarantine.jsonl` into a run directory: a line for each record that training and evaluation left out.

    A line has `file`, `index` (from 0, blank lines counted), `digest` (of the record's bytes), `reason`, `remedy` and
    the beginning of the `content`. Without any there is no file.

    Args:
      run_dir: where the run's files are.
      rows: rows of any kind; those that come from no cache have nothing to list.

    Returns:
      How many there are.
    """
    lines = [
        line for path in dict.fromkeys(_listed(rows)) for line in path.read_text(encoding="utf-8").split("\n") if line
    ]
    target = epath.Path(run_dir) / NAME
    try:
        if lines:
            target.write_text("".join(f"{line}\n" for line in lines))
        else:
            target.unlink(missing_ok=True)
    except OSError as error:  # a list that can't be written ends no run
        log.warning("%s can't be written: %s", target, error.strerror or error)
    return len(lines)


def read_quarantine(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of `quarantine.jsonl` in a run directory or a token cache; none where there is no file."""
    path = epath.Path(folder) / NAME
    return [json.loads(line) for line in path.read_text().split("\n") if line] if path.exists() else []


def _listed(rows: tuple[Any, ...]) -> Iterator[Path]:
    for one in rows:
        for source in getattr(getattr(one, "plain", one), "sources", ()):
            store = getattr(source, "store", None)
            if store is not None and store.path is not None and store.bad_records:
                yield store.path / NAME
