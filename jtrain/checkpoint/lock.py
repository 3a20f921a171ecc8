"""One run at a time in a run directory.

The lock is the kernel's (`flock`) on RUN/.lock: whoever dies, by whatever signal, loses it at once, so no lock ever
has to be removed by hand. The file says who holds it. A run directory that is a URL is locked for this machine only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import hashlib
import json
import logging
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from etils import epath

from jtrain.checkpoint import peers
from jtrain.checkpoint.failures import Failure, describe, unpack
from jtrain.checkpoint.files import is_local, storage_error
from jtrain.errors import ConfigError, StorageError

log = logging.getLogger(__name__)
_held: set[int] = set()


def _forget_in_child() -> None:
    # A forked worker that outlives its parent must not keep the run locked.
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class RunLock:
    """Holds a run directory; `with RunLock(run_dir): ...`. With several processes, process 0 holds it for all.

    Args:
      run_dir: an existing folder, or a URL.
      run_id: told to whoever finds the directory in use.
    """

    def __init__(self, run_dir: epath.PathLike, run_id: str = ""):
        self._run_dir = epath.Path(run_dir)
        self._run_id = run_id
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Takes the lock.

        Raises:
          ConfigError: another run is alive in that directory; names its host, process and start.
          StorageError: the lock file can't be written.
        """
        failure: Failure | None = None
        if peers.index() == 0 and self._descriptor is None:
            try:
                self._take(_lock_path(self._run_dir))
            except (ConfigError, StorageError) as error:
                failure = describe(error, self._run_dir, "can't lock")
        failure = unpack(peers.exchange("lock", None if failure is None else failure.pack())[0])
        if failure is not None:
            raise failure.error()

    def release(self) -> None:
        """Gives the lock back; the file stays."""
        if self._descriptor is not None:
            _held.discard(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise storage_error(str(path), error.errno or errno.EIO, "can't write the lock") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            owner = _owner(path)
            raise ConfigError(
                f"run_dir={str(self._run_dir)!r} is in use by process {owner['pid']} on {owner['host']}, "
                f"started {owner['started']}",
                "wait until it ends or stop it; or give another run_dir",
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
                os.close(descriptor)
                raise storage_error(str(path), error.errno or errno.EIO, "can't lock") from error
            log.warning("%s: this file system has no locks; nothing keeps a second run out of %s", path, self._run_dir)
        self._descriptor = descriptor
        _held.add(descriptor)
        owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
            "run_id": self._run_id,
        }
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(owner).encode(), 0)
        except OSError as error:
            self.release()
            raise storage_error(str(path), error.errno or errno.EIO, "can't write the lock") from error


def _lock_path(run_dir: epath.Path) -> Path:
    if is_local(run_dir):
        return Path(run_dir) / ".lock"
    folder = Path(tempfile.gettempdir()) / f"jtrain-locks-{getpass.getuser()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / hashlib.sha256(os.fspath(run_dir).encode()).hexdigest()[:32]


def _owner(path: Path) -> dict[str, Any]:
    owner = {"host": "this host", "pid": "unknown", "started": "a moment ago"}
    for _ in range(10):  # the owner locks first and writes its name a moment later
        with contextlib.suppress(OSError, ValueError):
            return owner | json.loads(path.read_text())
        time.sleep(0.02)
    return owner
