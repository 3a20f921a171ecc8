"""The files of a lease: one for each token, RUN/.lease/<token>. Who makes the next one has the lease.

Only what every file system and every object store can do is asked of them: to make a file that is not there yet
(`O_EXCL`; a conditional put), and to show at once what was written.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Protocol

from etils import epath

FOLDER = ".lease"


class LeaseFiles(Protocol):
    """What a lease needs of a place."""

    def tokens(self) -> list[int]:
        """All that are there, in order."""
        ...

    def read(self, token: int) -> bytes | None:
        """Its content; None: it is not there."""
        ...

    def create(self, token: int, data: bytes) -> bool:
        """Makes it; False: somebody else has."""
        ...

    def rewrite(self, token: int, data: bytes) -> None:
        """Replaces its content by one of the same length; raises FileNotFoundError when it is gone."""
        ...

    def remove(self, token: int) -> None:
        """Removes it; absent is fine."""
        ...


def files_of(run_dir: epath.PathLike) -> LeaseFiles:
    """Those of a run directory, which exists."""
    text = os.fspath(run_dir)
    return InStore(f"{text.rstrip('/')}/{FOLDER}") if "://" in text else InFolder(Path(text) / FOLDER)


class InFolder:
    """In a folder of this machine, or of a network file system."""

    def __init__(self, folder: Path):
        self._folder = folder

    def tokens(self) -> list[int]:
        try:
            return sorted(int(name) for name in os.listdir(self._folder) if name.isdigit())
        except FileNotFoundError:
            return []

    def read(self, token: int) -> bytes | None:
        try:
            return self._path(token).read_bytes()  # NFS looks for changes whenever a file is opened
        except FileNotFoundError:
            return None

    def create(self, token: int, data: bytes) -> bool:
        self._folder.mkdir(exist_ok=True)  # no parents: a run directory that is gone stays gone
        try:
            descriptor = os.open(self._path(token), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, data)
        except OSError:
            self.remove(token)
            raise
        finally:
            os.close(descriptor)
        return True

    def rewrite(self, token: int, data: bytes) -> None:
        # In place and not by a rename, so that a full disk does not end a lease.
        descriptor = os.open(self._path(token), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, data, 0)
        finally:
            os.close(descriptor)

    def remove(self, token: int) -> None:
        self._path(token).unlink(missing_ok=True)

    def _path(self, token: int) -> Path:
        return self._folder / f"{token:08d}"


class InStore:
    """In an object store, through fsspec."""

    def __init__(self, url: str):
        import fsspec

        self._fs: Any
        self._fs, self._root = fsspec.core.url_to_fs(url)

    def tokens(self) -> list[int]:
        self._fs.invalidate_cache()  # stores keep listings
        try:
            names = [path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []
        return sorted(int(name) for name in names if name.isdigit())

    def read(self, token: int) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(self._path(token)))
        except FileNotFoundError:
            return None

    def create(self, token: int, data: bytes) -> bool:
        try:
            self._fs.pipe_file(self._path(token), data, mode="create")
        except Exception:
            # Each store has an error of its own for an object that is there already.
            found = self.read(token)
            if found is None:
                raise
            return found == data  # ours: a retry of the first attempt, which had come through
        return True

    def rewrite(self, token: int, data: bytes) -> None:
        self._fs.pipe_file(self._path(token), data)

    def remove(self, token: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(token))

    def _path(self, token: int) -> str:
        return f"{self._root}/{token:08d}"
