"""A folder that gets its name when it is whole: written beside it, then renamed; nothing is left behind otherwise."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etils import epath

from jtrain.checkpoint import peers
from jtrain.checkpoint.files import free_bytes, storage_errno, sync_tree
from jtrain.errors import ConfigError, JtrainError, StorageError


@contextlib.contextmanager
def staged(target: str | os.PathLike[str], size: int) -> Iterator[Path]:
    """A new folder beside `target`, which becomes `target` at the end of the block, or vanishes with an error.

    With several processes all of them enter it; process 0 makes, renames and removes.

    Args:
      target: a folder that does not exist, or is empty.
      size: bytes that will be written.

    Raises:
      ConfigError: the target is a file, or holds something.
      StorageError: there is no room, the disk gets full, or can't be written.
    """
    final = Path(os.path.abspath(os.path.expanduser(os.fspath(target))))
    main = peers.index() == 0
    folder = _agreed(final, size, main)
    try:
        yield folder
        if main:
            sync_tree(epath.Path(folder))
            if final.is_dir():
                final.rmdir()
            os.rename(folder, final)
        peers.exchange("staged", None)
    except JtrainError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # the array store raises no OSError
        number = storage_errno(error)
        if number is None:
            raise
        raise _storage_error(final, number, "can't be written") from error
    finally:
        if main:
            shutil.rmtree(folder, ignore_errors=True)


def check_target(target: Path) -> None:
    """Sees that a folder may be written under that name.

    Raises:
      ConfigError: it is a file, or holds something.
    """
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target} is a file", "give the name of a folder that does not exist")
    if target.is_dir() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty", "give another folder, or remove that one first")


def _made(target: Path, size: int) -> Path:
    check_target(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        mask = os.umask(0)
        os.umask(mask)
        folder.chmod(0o777 & ~mask)  # mkdtemp makes it private
    except OSError as error:
        raise _storage_error(target, error.errno or errno.EIO, "can't be made") from error
    free = free_bytes(epath.Path(target.parent))
    if free is not None and free < size:
        folder.rmdir()
        raise StorageError(
            f"{target}: the weights need {size:,} bytes, {free:,} are free", "free space there, or give another folder"
        )
    return folder


def _agreed(target: Path, size: int, main: bool) -> Path:
    """Process 0's folder on every process; its error on every process."""
    answer: Any = None
    if main:
        try:
            answer = {"path": str(_made(target, size))}
        except (ConfigError, StorageError) as error:
            answer = {"config": isinstance(error, ConfigError), "message": error.message, "remedy": error.remedy}
    answer = peers.exchange("staging", answer)[0]
    if "path" not in answer:
        raise (ConfigError if answer["config"] else StorageError)(answer["message"], answer["remedy"])
    return Path(answer["path"])


def _storage_error(path: Path, number: int, doing: str) -> StorageError:
    full = number in (errno.ENOSPC, errno.EDQUOT)
    return StorageError(
        f"{path}: {doing}: {os.strerror(number)}",
        "free space there, or give another folder" if full else "give a folder that this user can write to",
    )
