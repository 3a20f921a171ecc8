"""A teacher's numbers, computed once: memory-mapped arrays in the cache folder, and rows that bring them.

A table holds a line for every target of the rows in their order, none for other tokens: padding and prompts cost
nothing. It is found by a digest of the teacher, the rows and the settings; it is written beside and renamed when it is
whole.

Legend: R rows, T targets of all rows, n rows asked for, L tokens of a row, K tokens of the teacher that are known.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from jtrain import progress
from jtrain.checkpoint import files, peers
from jtrain.data.cache import cache_folder, locked, publish, storage, temporary
from jtrain.data.loader import DataLoader
from jtrain.data.rows import IGNORE, Batch, EvalRows, TrainRows
from jtrain.errors import CheckpointError, StorageError
from jtrain.train.program import Program

_CHUNK = 1024
"""Rows that are looked at together when targets are counted."""


class TeacherTable:
    """An opened table.

    Args:
      folder: where it lies.

    Attributes:
      rows: R.
      targets: T.

    Raises:
      OSError, ValueError: it is not there, or damaged.
    """

    def __init__(self, folder: Path):
        self._first = np.load(folder / "first.npy", mmap_mode="r", allow_pickle=False)
        if self._first.ndim != 1 or not self._first.size or self._first.dtype.kind != "i":
            raise ValueError(f"{folder} is damaged: first.npy")
        self._arrays = {
            path.stem: np.load(path, mmap_mode="r", allow_pickle=False) for path in sorted(folder.glob("teacher_*.npy"))
        }
        self.rows, self.targets = len(self._first) - 1, int(self._first[-1])
        if "teacher_logps" not in self._arrays or any(x.shape[:1] != (self.targets,) for x in self._arrays.values()):
            raise ValueError(f"{folder} is not whole")

    def of(self, places: np.ndarray, labels: np.ndarray) -> Batch:
        """The numbers of rows.

        Args:
          places: numbers of the rows in the order of the table [n]; those from R on are no rows.
          labels: of these rows [n, L].

        Returns:
          name -> [n, L, ...], at the places that predict a label; 0 elsewhere.
        """
        live = targets_of(labels)
        known = places < self.rows
        at = np.where(known, places, 0)
        first, counts = self._first[at], np.where(known, self._first[at + 1] - self._first[at], 0)
        assert (live.sum(1) == counts).all()  # the same rows, by their fingerprint
        lines = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        batch: Batch = {}
        for name, values in self._arrays.items():
            kind = np.int32 if name == "teacher_ids" else np.float32
            filled = np.zeros((*labels.shape, *values.shape[1:]), kind)
            filled[live] = values[lines]
            batch[name] = filled
        return batch


def targets_of(labels: np.ndarray) -> np.ndarray:
    """Which places predict a label: [n, L] booleans."""
    return np.pad(labels[:, 1:] != IGNORE, ((0, 0), (0, 1)))


class TeacherRows:
    """Rows with the numbers of a teacher, once these are known.

    Args:
      rows: a stream, or an evaluation's.

    Attributes:
      table: None: not known yet, rows are as they are.
      per_token: arrays [n, L, ...] of more than two dimensions.
    """

    per_token = ("teacher_logps", "teacher_ids")

    def __init__(self, rows: TrainRows | EvalRows):
        self.plain, self.fingerprint, self.buckets = rows, rows.fingerprint, rows.buckets
        self.table: TeacherTable | None = None

    def __len__(self) -> int:
        return len(self.plain)

    def __getattr__(self, name: str) -> Any:
        if name == "plain":  # not there yet: a copy that is being made
            raise AttributeError(name)
        return getattr(self.plain, name)

    def rows(self, indices: np.ndarray) -> Batch:
        batch = self.plain.rows(indices)
        return batch if self.table is None else batch | self.table.of(self.plain.places(indices), batch["labels"])


def table_name(*identity: object) -> str:
    """The name of the table of this teacher, these rows and settings."""
    return hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()


def table_folder(cache_dir: str | None, name: str) -> Path:
    """Where a table is kept between runs."""
    return cache_folder(cache_dir) / "teacher" / name


def open_table(folder: Path, rows: int) -> TeacherTable | None:
    """The table in a folder; None if there is none, or not a whole one of so many rows."""
    try:
        table = TeacherTable(folder)
    except (OSError, ValueError, EOFError):
        return None
    return table if table.rows == rows else None


def open_everywhere(folder: Path, rows: int) -> TeacherTable | None:
    """`open_table` where every process has the table, else None on all of them.

    Their folders may differ, and the pass that makes a table needs all of them.
    """
    table = open_table(folder, rows)
    return table if all(peers.exchange("teacher_table", table is not None)) else None


class KeptTable(TypedDict):
    """What RUN/teacher.json says of a table: its name, rows, settings and teacher, and the type it was computed in."""

    name: str
    rows: str
    settings: list[Any]
    teacher: str
    dtype: str


def read_kept(file: epath.Path) -> dict[str, KeptTable]:
    """The tables of a run, by split; none where the file is not there.

    Raises:
      CheckpointError: it is damaged.
    """
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        found = None
    kinds = {"name": str, "rows": str, "settings": list, "teacher": str, "dtype": str}
    if not isinstance(found, dict) or not all(
        isinstance(one, dict) and one.keys() == kinds.keys() and all(isinstance(one[k], kinds[k]) for k in kinds)
        for one in found.values()
    ):
        raise CheckpointError(
            f"{file} is damaged: it says which teacher this run has", "Put it back, or start a new run."
        )
    return found


def write_kept(file: epath.Path, kept: dict[str, KeptTable]) -> None:
    """Writes what `read_kept` reads.

    Raises:
      StorageError: it can't be written.
    """
    try:
        files.write_atomic(file, json.dumps(kept, indent=2).encode())
    except OSError as error:
        raise files.storage_error(file, error.errno or errno.EIO, "can't be written") from error


def make_table(
    folder: Path,
    rows: EvalRows,
    program: Program,
    score: Callable[[dict[str, jax.Array]], dict[str, jax.Array]],
    size: int,
    dtype: str,
) -> TeacherTable:
    """One pass of the teacher over rows in their order, written to `folder`.

    Every process takes part; one of those that share the folder writes.

    Args:
      folder: of the table.
      rows: in order.
      program: of the run.
      score: of a batch [1, b, ...]: name -> [1, b, L, ...].
      size: rows of a batch.
      dtype: type in which log-probabilities are kept.

    Raises:
      StorageError: the folder can't be written.
    """
    with storage(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    first = np.concatenate([[0], np.cumsum(_counts(rows))])
    lock = folder.with_name(f"{folder.name}.lock")
    with locked(lock, wait=False) as mine:
        made = temporary(folder)
        if mine:
            with storage(made):
                made.mkdir()
                np.save(made / "first.npy", first)
        try:
            with DataLoader(rows, global_batch_size=size, sharding=program.batch_sharding, prefetch=1) as loader:
                files: dict[str, Any] = {}
                for index in range(-(-len(rows) // size)):
                    found = {name: x[0] for name, x in score(loader[index]).items()}
                    host = multihost_utils.process_allgather(found, tiled=True)
                    progress.report()
                    numbers = np.arange(index * size, min((index + 1) * size, len(rows)))
                    if mine:
                        _write(made, files, host, targets_of(rows.rows(numbers)["labels"]), first[numbers[0]], dtype)
            if mine:
                with storage(made):
                    for file in files.values():
                        file.flush()
                publish(made, folder, lambda: open_table(folder, len(rows)) is not None)
        finally:
            if mine:
                shutil.rmtree(made, ignore_errors=True)
    with locked(lock):  # of another run that makes the same: it is waited for
        table = open_table(folder, len(rows))
    if table is None:
        raise StorageError(
            f"data.cache_dir: {folder} is not there, and another process was to write it",
            "Set data.cache_dir to a folder on a file system that has locks.",
        )
    return table


def _counts(rows: EvalRows) -> np.ndarray:
    """Targets of each row, int64 [R]."""
    parts = [np.arange(start, min(start + _CHUNK, len(rows))) for start in range(0, len(rows), _CHUNK)]
    return np.concatenate([targets_of(rows.rows(part)["labels"]).sum(1, dtype=np.int64) for part in parts])


def _write(
    made: Path, files: dict[str, Any], host: dict[str, np.ndarray], live: np.ndarray, start: int, dtype: str
) -> None:
    """Adds the lines of a batch's targets to the arrays of a table, which are made with the first batch."""
    with storage(made):
        for name, values in host.items():
            lines = values[: len(live)][live[:, : values.shape[1]]]
            if name not in files:
                total = int(np.load(made / "first.npy", mmap_mode="r")[-1])
                kind = np.dtype("int32" if name == "teacher_ids" else dtype if name == "teacher_logps" else "float32")
                shape = (total, *lines.shape[1:])
                files[name] = np.lib.format.open_memmap(made / f"{name}.npy", mode="w+", dtype=kind, shape=shape)
            files[name][start : start + len(lines)] = lines
