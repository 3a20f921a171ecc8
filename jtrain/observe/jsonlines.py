"""Append-only JSON lines that survive a crash up to the last line: the file behind metrics and events."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from jtrain.errors import StorageError
from jtrain.redaction import redact

log = logging.getLogger(__name__)
REMOTE_FLUSH_SECONDS = 30.0
"""An object store can't append: there the whole file is written again, at most this often, and at the close."""

_MOST_WAITING = 100_000


class JsonLines:
    """A file of JSON objects, one a line.

    On a POSIX file system each line is one `write` to a file opened for appending, so a crash loses at most the line
    being written. A torn last line that such a crash left is cut at the start.

    Once the file is open nothing that the disk or the store does ends the run: lines wait until they can be written.

    Args:
      path: a path or a URL; its folder must exist.

    Raises:
      StorageError: the file can't be opened.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = epath.Path(path)
        self._lock = threading.Lock()
        self._remote: list[str] | None = None
        self._file: int | None = None
        self._waiting: deque[str] = deque(maxlen=_MOST_WAITING)
        self._told = False
        self._flushed = time.monotonic()
        try:
            if "://" in os.fspath(self.path):
                self._remote = _whole_lines(self.path.read_text()) if self.path.exists() else []
            else:
                _cut_torn_line(Path(self.path))
                self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one line. NaN and infinity become null, numpy and JAX scalars numbers, secrets `***`."""
        line = json.dumps(redact(_plain(record)), allow_nan=False) + "\n"
        with self._lock:
            if self._file is not None:
                self._waiting.append(line)
                self._guarded(self._write_waiting)
            elif self._remote is not None:
                self._remote.append(line)
                if time.monotonic() - self._flushed >= REMOTE_FLUSH_SECONDS:
                    self._guarded(self._write_remote)

    def flush(self) -> None:
        """Makes the lines so far durable, where that can be done."""
        with self._lock:
            if self._file is not None:
                self._guarded(self._write_waiting)
                self._guarded(os.fsync, self._file)
            elif self._remote is not None:
                self._guarded(self._write_remote)

    def close(self) -> None:
        """Flushes and closes; a line appended after this is dropped. May be called twice."""
        if self._file is None and self._remote is None:
            return
        self.flush()
        with self._lock:
            if self._waiting:
                log.warning("%s: %d lines could not be written and are lost", self.path, len(self._waiting))
            if self._file is not None:
                os.close(self._file)
            self._file = self._remote = None

    def _guarded(self, write: Callable[..., object], *arguments: Any) -> None:
        try:
            write(*arguments)
            self._told = False
        except Exception as error:  # stores have errors of their own
            if not self._told:
                log.warning("%s can't be written: %s; the run goes on, and its lines wait", self.path, error)
            self._told = True

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        assert self._file is not None
        before = os.fstat(self._file).st_size
        try:
            data = memoryview("".join(self._waiting).encode())
            while data:
                data = data[os.write(self._file, data) :]
            self._waiting.clear()
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, before)  # half a line
            raise

    def _write_remote(self) -> None:
        self._flushed = time.monotonic()
        self.path.write_text("".join(self._remote or ()))


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file, in order; a torn last line is left out, a missing file is empty."""
    file = epath.Path(path)
    if file.exists():
        for line in _whole_lines(file.read_text()):
            yield json.loads(line)


def _whole_lines(text: str) -> list[str]:
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _cut_torn_line(path: Path) -> None:
    """Truncates a file to the end of its last whole line, reading only as far back as that line."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        keep = end
        while keep:
            start = max(0, keep - 4096)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep != end:
            file.truncate(keep)


def _plain(value: Any) -> Any:
    """`value` with JSON's own types alone."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "__array__"):
        return _plain(np.asarray(value).tolist())
    return str(value)


def _cannot_write(path: epath.Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path} can't be written: {error.strerror or error}", "Free space there, or set another run_dir."
    )
