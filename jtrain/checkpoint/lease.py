"""One run at a time in a run directory: a lease, with a token that fences off whoever has lost it.

The newest file below RUN/.lease names the holder; its number is the token, which only grows. A thread rewrites the file
every few seconds. Who is not heard of for `SECONDS` may be taken over by whoever makes the next file; who is dead, on
this machine, at once. So no lease has to be removed by hand. Clocks of two machines are never compared: who waits
measures with its own for how long the file stays the same.

A holder that was stopped or cut off for longer does not know that it was taken over. So before it makes a checkpoint
count it renews the lease and then looks for a newer token; who takes over makes its token and then looks whether the
old one was renewed. One of the two sees the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from etils import epath

from jtrain.checkpoint import peers
from jtrain.checkpoint.failures import Failure, describe, unpack
from jtrain.checkpoint.files import storage_errno, storage_error
from jtrain.checkpoint.lease_files import FOLDER, files_of
from jtrain.checkpoint.run_dir import read_run_id
from jtrain.errors import ConfigError, StorageError

log = logging.getLogger(__name__)
SECONDS = 60.0
"""Who was not heard of for so long may be taken over."""
_RENEWALS = 6  # in that time
_LENGTH = 512  # of a file: the same whatever is in it, so that it can be rewritten in place


class TakenOver(ConfigError):
    """Another run holds the directory now: this one may write nothing more."""


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who has, or had, a lease.

    Attributes:
      id: of this time of holding it.
      run_id: of the run directory when it was taken.
      host, pid, started: told to whoever finds the directory in use.
      machine: boot and pid namespace; where they are the same, `pid` and the clock mean the same.
      begun: when the process was started, in ticks of the machine; numbers of processes are used again.
      seconds: for how long it may be silent.
      renewed: `clock()` of its machine.
      count: renewals so far.
      released: given back.
    """

    id: str
    run_id: str
    host: str
    pid: int
    started: str
    machine: str
    begun: str
    seconds: float
    renewed: float
    count: int = 0
    released: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {self.started}"

    @property
    def here(self) -> bool:
        """Whether it is a process of this machine (and container)."""
        return self.machine == machine()

    @property
    def free(self) -> bool:
        """Whether the lease may be taken at once: given back, or its holder is dead or silent, on this machine."""
        if self.released or not self.here:
            return self.released
        return clock() - self.renewed > self.seconds or not _alive(self.pid, self.begun)


def holder_of(run_dir: epath.PathLike) -> Holder | None:
    """Who holds a run directory, as far as its files say; None: nobody. One on another machine may be dead."""
    files = files_of(run_dir)
    for token in reversed(files.tokens()):
        holder = _decode(files.read(token))
        return None if holder is None or holder.free else holder
    return None


class RunLease:
    """Holds a run directory; `with RunLease(run_dir, run_id): ...`. With several processes, process 0 holds it for all.

    Args:
      run_dir: an existing folder, or a URL.
      run_id: of `open_run_dir`.
      seconds: for how long it may be silent before it may be taken over; `SECONDS` where it is not given.

    Attributes:
      run_dir: as it was given.
      token: greater than that of all who held the directory before, and the same on every process; 0 while not held.
    """

    def __init__(self, run_dir: epath.PathLike, run_id: str = "", *, seconds: float | None = None):
        self.run_dir, self._run_id = os.fspath(run_dir), run_id
        self._seconds = SECONDS if seconds is None else seconds
        self.token = 0
        self._files: Any = None
        self._own: Holder | None = None
        self._lost: TakenOver | None = None
        self._mutex = threading.Lock()
        self._over = threading.Event()

    def acquire(self) -> None:
        """Takes the lease. Where a holder on another machine may be dead this waits until that is known.

        Raises:
          ConfigError: another run is alive in that directory; names its host, process and start.
          StorageError: the lease can't be written.
        """
        answer: dict[str, Any] = {"token": self.token, "failure": None}
        if peers.index() == 0 and self._own is None:
            failure: Failure | None = None
            try:
                self._take()
            except Exception as error:
                failure = describe(error, f"{self.run_dir}/{FOLDER}", "can't write the lease")
            answer = {"token": self.token, "failure": None if failure is None else failure.pack()}
        answer = peers.exchange("lease", answer)[0]
        failure = unpack(answer["failure"])
        if failure is not None:
            raise failure.error()
        self.token = answer["token"]

    def release(self) -> None:
        """Gives the lease back."""
        self._over.set()
        if self._own is not None and self._mutex.acquire(timeout=5.0):  # the thread may hang with the disk
            try:
                if self._lost is None:
                    with contextlib.suppress(Exception):  # then it expires
                        self._files.rewrite(self.token, _encode(dataclasses.replace(self._own, released=True)))
                self._own = None
            finally:
                self._mutex.release()
        self.token = 0

    @property
    def lost(self) -> bool:
        """Whether another run has taken over. The disk is asked only where the last renewal is too long ago."""
        if self._lost is None and self._own is not None and clock() - self._own.renewed > self._own.seconds:
            with contextlib.suppress(Exception):
                self._renew(patience=5.0)
        return self._lost is not None

    def check(self) -> None:
        """Renews the lease, and sees that nobody has taken over: before anything is written that counts.

        Raises:
          TakenOver: somebody has.
          OSError, StorageError: nobody can tell.
        """
        if self._own is None and self._lost is None:  # another process holds it for this one
            return
        try:
            self._renew()
        except (OSError, StorageError):
            raise
        except Exception as error:
            raise storage_error(self.run_dir, storage_errno(error) or errno.EIO, "can't read the lease") from error
        if self._lost is not None:
            raise self.error()

    def error(self) -> TakenOver:
        """What a run that was taken over ends with."""
        assert self._lost is not None
        return self._lost

    def __enter__(self) -> RunLease:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    # Taking it

    def _take(self) -> None:
        self._files = files_of(self.run_dir)
        self._over, self._lost = threading.Event(), None
        while True:
            tokens = self._files.tokens()
            before = self._wait_for(tokens[-1]) if tokens else None
            token = tokens[-1] + 1 if tokens else 1
            own = _own(self._run_id, self._seconds)
            data = _encode(own)
            made = self._files.create(token, data) and self._files.read(token) == data  # some stores know no conditions
            if made and self._files.tokens()[-1] == token:
                break
            if made:
                self._files.remove(token)
        after = self._files.read(tokens[-1]) if before else None
        if after not in (before, None):  # it was heard of, in the last moment
            self._files.remove(token)
            raise self._in_use(_decode(after))
        for old in tokens:
            with contextlib.suppress(OSError):
                self._files.remove(old)
        self.token, self._own = token, own
        threading.Thread(target=self._keep, args=(self._over,), name="jtrain-lease", daemon=True).start()

    def _wait_for(self, token: int) -> bytes | None:
        """The file of `token`, once its holder is gone for certain.

        Raises:
          ConfigError: it is there.
        """
        first = data = self._files.read(token)
        since, told = clock(), False
        while data is not None:
            holder = _decode(data)  # None: it is being written
            if holder is not None and holder.free:
                return data
            if data != first or (holder is not None and holder.here):
                raise self._in_use(holder)
            seconds = self._seconds if holder is None else holder.seconds
            if clock() - since > seconds:
                log.warning("%s: %s was not heard of for %.0f s: taken over", self.run_dir, holder, seconds)
                return data
            if holder is not None and not told:
                told = True
                log.warning("%s: waiting up to %.0f s for a word of %s", self.run_dir, seconds, holder)
            time.sleep(min(1.0, seconds / 50) if holder is not None else 0.02)
            data = self._files.read(token)
        return data

    def _in_use(self, holder: Holder | None) -> ConfigError:
        return ConfigError(
            f"run_dir={self.run_dir!r} is in use by {holder or 'another process'}",
            "wait until it ends or stop it; or give another run_dir",
        )

    # Holding it

    def _keep(self, over: threading.Event) -> None:
        """The thread that renews it."""
        told = False
        while not over.wait(self._seconds / _RENEWALS):
            try:
                self._renew()
                told = False
            except Exception as error:
                if not told and not over.is_set():
                    log.warning("%s: the lease can't be renewed: %s", self.run_dir, error)
                told = True
            if self._lost is not None:
                log.error("%s", self._lost.message)
                return

    def _renew(self, patience: float = -1) -> None:
        if not self._mutex.acquire(timeout=patience):  # the thread hangs with the disk
            return
        try:
            if self._own is None or self._lost is not None:
                return
            if self._is_newest():
                renewed = dataclasses.replace(self._own, renewed=clock(), count=self._own.count + 1)
                self._files.rewrite(self.token, _encode(renewed))
                if self._is_newest():
                    self._own = renewed
        finally:
            self._mutex.release()

    def _is_newest(self) -> bool:
        """Whether no other holder has come; otherwise the lease is lost."""
        assert self._own is not None
        for token in reversed(self._files.tokens()):
            holder = _decode(self._files.read(token))
            if holder is not None and holder.id == self._own.id:
                return True
            if token < self.token:
                break
            self._lost = TakenOver(
                f"run_dir={self.run_dir!r} was taken over by {holder or 'another process'}, because this run was "
                f"not heard of for {self._own.seconds:.0f} s; it writes nothing more",
                "leave it to that run; give this one another run_dir",
            )
            return False
        # Somebody has removed it.
        if not self._run_id or read_run_id(self.run_dir) != self._run_id:
            raise storage_error(self.run_dir, errno.ENOENT, "the run directory was removed under the run")
        return bool(self._files.create(self.token, _encode(self._own)))


def clock() -> float:
    """Seconds since this machine was started, the same for all its processes; it goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def machine() -> str:
    """This boot of this machine, and the namespace of its process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _own(run_id: str, seconds: float) -> Holder:
    return Holder(
        id=uuid.uuid4().hex,
        run_id=run_id,
        host=socket.gethostname(),
        pid=os.getpid(),
        started=time.strftime("%Y-%m-%d %H:%M:%S"),
        machine=machine(),
        begun=_begun(os.getpid()) or "",
        seconds=seconds,
        renewed=clock(),
    )


def _begun(pid: int) -> str | None:
    """When a process was started, in ticks; None: it has ended, or nobody can tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _alive(pid: int, begun: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return not begun or _begun(pid) == begun


def _encode(holder: Holder) -> bytes:
    data = json.dumps(dataclasses.asdict(holder)).encode()
    return data.ljust(-(-len(data) // _LENGTH) * _LENGTH)


def _decode(data: bytes | None) -> Holder | None:
    """None: half written, or nothing of ours."""
    with contextlib.suppress(ValueError, TypeError):
        return Holder(**json.loads(data or b""))
    return None
