"""Files of a checkpoint copied from one place to another; what is read is hashed on the way and compared.

A place may be an object store, which fails now and then: a file is tried again a few times, with growing pauses. The
threads are daemons, so that a store that never answers can't keep the program from ending.
"""

from __future__ import annotations

import collections
import errno
import os
import threading
from collections.abc import Callable, Mapping

import xxhash
from etils import epath

from jtrain.checkpoint.files import is_local
from jtrain.checkpoint.manifest import DamagedCheckpoint, FileRecord, check_inside

ATTEMPTS = 4
FIRST_PAUSE_SECONDS = 0.5
"""Before the second attempt; each later pause is four times as long."""
THREADS = 8
_CHUNK = 8 << 20


class Abandoned(Exception):
    """Nobody waits for the copy any more."""


class Transfer:
    """One copy of many files.

    Args:
      source: folder of the step.
      target: where its files go, under the same names.
      over: set when the copy is to be given up.
      moved: told the bytes of each piece that was written.

    Attributes:
      retries: attempts beyond the first, over all files.
    """

    def __init__(
        self,
        source: epath.Path,
        target: epath.Path,
        over: threading.Event,
        moved: Callable[[int], None] = lambda count: None,
    ):
        self._source, self._target, self._over, self._moved = source, target, over, moved
        self.retries = 0

    def run(self, records: Mapping[str, FileRecord]) -> None:
        """Copies files, the largest first.

        Args:
          records: name relative to the folder -> size and hash that it must have.

        Raises:
          DamagedCheckpoint: a file of the source is missing, or not what its record says, however often it is read.
          Abandoned: `over` was set.
          Exception: what a store or a disk raises, after the last attempt.
        """
        for name in records:
            check_inside(self._source, name)
        left = collections.deque(sorted(records, key=lambda name: -records[name][0]))
        failures: list[Exception] = []

        def work() -> None:
            while not failures and not self._over.is_set():
                try:
                    name = left.popleft()
                except IndexError:
                    return
                try:
                    self._with_retries(name, records[name])
                except Exception as error:
                    failures.append(error)

        threads = [threading.Thread(target=work, name="checkpoint-copy", daemon=True) for _ in range(THREADS)]
        for thread in threads[: len(records)]:
            thread.start()
        for thread in threads[: len(records)]:
            while thread.is_alive() and not self._over.is_set():
                thread.join(0.05)
        if self._over.is_set():
            raise Abandoned
        if failures:
            raise failures[0]

    def _with_retries(self, name: str, record: FileRecord) -> None:
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._copy(name, record)
                return
            except Abandoned:
                raise
            except Exception as error:
                gone = isinstance(error, FileNotFoundError) and not (self._source / name).exists()
                if gone:
                    raise DamagedCheckpoint(self._source.name, name, "missing") from error
                if attempt == ATTEMPTS:
                    raise
            self.retries += 1
            if self._over.wait(pause):
                raise Abandoned
            pause *= 4

    def _copy(self, name: str, record: FileRecord) -> None:
        target, digest, size = self._target / name, xxhash.xxh3_128(), 0
        if is_local(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        with (self._source / name).open("rb") as reader, target.open("wb") as writer:
            while block := reader.read(_CHUNK):
                if self._over.is_set():
                    raise Abandoned
                writer.write(block)
                digest.update(block)
                size += len(block)
                self._moved(len(block))
            if is_local(target):
                writer.flush()
                os.fsync(writer.fileno())
        if size != record[0]:
            raise DamagedCheckpoint(self._source.name, name, f"{size} bytes instead of {record[0]}")
        if digest.hexdigest() != record[1]:
            raise DamagedCheckpoint(self._source.name, name, "hash differs")
        written = target.stat().length
        if written != size:
            raise OSError(errno.EIO, f"{written} of {size} bytes arrived", os.fspath(target))
