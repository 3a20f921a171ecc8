"""The run directory: made, tested for writing, and given an identity before anything costly begins."""

from __future__ import annotations

import dataclasses
import errno
import json
import time
import uuid
from typing import Any

from etils import epath

from jtrain.checkpoint import peers
from jtrain.checkpoint.failures import describe, unpack
from jtrain.checkpoint.files import remove_tree, storage_errno, storage_error, write_atomic
from jtrain.checkpoint.layout import check_name, run_path
from jtrain.errors import ConfigError, StorageError

_IDENTITY = ".run.json"


@dataclasses.dataclass(frozen=True)
class RunDir:
    """A run directory that can be written.

    Attributes:
      path: absolute, or a URL.
      run_id: made with the directory; the same after every resume.
      new: whether this call made it a run directory.
    """

    path: epath.Path
    run_id: str
    new: bool


def open_run_dir(path: epath.PathLike) -> RunDir:
    """Makes the directory (and its parents), tries a write, and reads or writes the run's identity.

    With several processes all of them call it, and it has to be a directory that they share.

    Raises:
      StorageError: it can't be made or written; names the path.
      ConfigError: the path is a file, or holds what Orbax takes as a pattern.
    """
    folder = run_path(path)
    check_name(folder)
    answer: dict[str, Any] | None = None
    if peers.index() == 0:
        try:
            run_id, new = _open(folder)
            answer = {"run_id": run_id, "new": new, "failure": None}
        except (ConfigError, StorageError) as error:
            answer = {"failure": describe(error, folder, "run_dir can't be opened").pack()}
    answer = peers.exchange("run_dir", answer)[0]
    assert answer is not None  # process 0 always has one
    failure = unpack(answer["failure"])
    if failure is not None:
        raise failure.error()
    return RunDir(path=folder, run_id=answer["run_id"], new=answer["new"])


def read_run_id(path: epath.PathLike) -> str | None:
    """The identity that stands in a run directory; None: there is none, or no directory.

    Raises:
      OSError: it can't be read.
    """
    try:
        return str(json.loads((epath.Path(path) / _IDENTITY).read_text())["run_id"])
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError):
        return None


def _open(folder: epath.Path) -> tuple[str, bool]:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run_dir={str(folder)!r} is a file", "give the name of a folder; it is made when absent")
    identity = folder / _IDENTITY
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{uuid.uuid4().hex[:8]}"
        try:
            probe.write_bytes(b"probe")  # an empty file can still be made on a full disk
        finally:
            remove_tree(probe)
        if identity.exists():
            return str(json.loads(identity.read_text())["run_id"]), False
        run_id = uuid.uuid4().hex
        made = {"run_id": run_id, "made": time.strftime("%Y-%m-%d %H:%M:%S")}
        write_atomic(identity, json.dumps(made).encode())
        return run_id, True
    except (OSError, RuntimeError) as error:
        raise storage_error(folder, storage_errno(error) or errno.EIO, "run_dir can't be written") from error
    except (ValueError, KeyError) as error:
        raise StorageError(f"{identity} is damaged", "delete that file; the checkpoints do not need it") from error
