"""Files that outlive a crash: atomic writes, fsync, moves, and what a failing disk is called.

Every path is an `etils.epath.Path`, so that `gs://…` works as well as a folder. fsync and atomic renames exist only on
local (POSIX) file systems; an object store makes a single object visible at once, and that is all that is relied on.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from jtrain.errors import StorageError

MANIFEST = "manifest.json"
"""The last file of a step."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_CANNOT_HEAL = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
_TEXTS = {
    # TensorStore raises ValueError and RuntimeError with the operating system's text, never an OSError.
    errno.ENOSPC: ("no space left on device", "resource_exhausted", "disk quota exceeded"),
    errno.EROFS: ("read-only file system",),
    errno.EACCES: ("permission denied", "permission_denied"),
    errno.EIO: ("input/output error", "stale file handle"),
}

_STORE_PACKAGES = ("gcsfs", "s3fs", "botocore", "aiobotocore", "aiohttp")
"""They have error classes of their own."""


def is_local(path: epath.Path) -> bool:
    """Whether the path lies in a file system of this machine (also a mounted one)."""
    return "://" not in os.fspath(path)


def write_atomic(path: epath.Path, data: bytes) -> None:
    """Writes a file that is either absent (or the old one) or whole, also after a loss of power."""
    if not is_local(path):
        path.write_bytes(data)
        return
    temporary = Path(f"{os.fspath(path)}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: epath.Path | Path) -> None:
    """fsync of one file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: epath.Path) -> None:
    """fsync of every file and folder below `folder`, of itself and of its parent. Nothing on an object store.

    Orbax syncs the array files; its metadata, JSON and the folders after the renames are left to this.
    """
    if not is_local(folder):
        return
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(root, name))
        sync(Path(root))
    sync(folder.parent)


def walk(folder: epath.Path) -> Iterator[str]:
    """Names of all files below `folder`, relative to it, in order."""
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            yield from (f"{entry.name}/{name}" for name in walk(entry))
        else:
            yield entry.name


def move(source: epath.Path, target: epath.Path) -> None:
    """Moves a folder: one atomic rename on a local file system; a store copies its objects and then removes them."""
    if not is_local(source):
        _move_objects(source, target)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)
    sync(source.parent)
    sync(target.parent)


def _move_objects(source: epath.Path, target: epath.Path) -> None:
    import fsspec

    store, folder = fsspec.core.url_to_fs(os.fspath(source))
    # What a kill leaves is a step that counts here, or one that counts in neither place.
    names = sorted(store.find(folder), key=lambda name: name == f"{folder}/{MANIFEST}")
    for name in names:
        store.cp_file(name, store._strip_protocol(os.fspath(target)) + name.removeprefix(folder))
    for name in reversed(names):
        store.rm_file(name)


def remove_tree(path: epath.Path) -> None:
    """Removes a file or folder; absent is fine."""
    if is_local(path):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.lexists(path):  # a read-only disk would say that it is read-only, and not that it is absent
            Path(path).unlink(missing_ok=True)
    elif path.exists():
        path.rmtree() if path.is_dir() else path.unlink()


def free_bytes(path: epath.Path) -> int | None:
    """Bytes that can still be written below `path`; None where nobody can tell."""
    return shutil.disk_usage(path).free if is_local(path) else None


def storage_errno(error: BaseException | None) -> int | None:
    """The errno that stands behind an exception or its causes; None when it is no matter of storage."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
            return error.errno
        if type(error).__module__.partition(".")[0] in _STORE_PACKAGES:
            return errno.EIO
        text = str(error).lower()
        for number, phrases in _TEXTS.items():
            if any(phrase in text for phrase in phrases):
                return number
        error = error.__cause__ or error.__context__
    return None


def cannot_heal(number: int) -> bool:
    """Whether trying again is useless (a read-only disk), unlike a full disk that someone may clear."""
    return number in _CANNOT_HEAL


def make_folder(path: epath.Path) -> None:
    """Makes a folder and its parents where they are missing.

    Raises:
      StorageError: it can't be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(path, error.errno or errno.EIO, "can't be made") from error


def storage_error(path: epath.Path | str, number: int, doing: str) -> StorageError:
    """A StorageError that names the path, the operating system's reason and what to do."""
    if number in _FULL:
        remedy = "free space there, lower checkpoint.save_total_limit, or give another run_dir"
    elif number in _CANNOT_HEAL:
        remedy = "make it writable for this user, or give another run_dir"
    else:
        remedy = "see that the disk is healthy and mounted, or give another run_dir"
    return StorageError(f"{path}: {doing}: {os.strerror(number)}", remedy)
