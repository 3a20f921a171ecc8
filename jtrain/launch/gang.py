"""The processes of one attempt: started, heard, and killed together. Each is on a leash (`jtrain/launch/leash.py`)."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from jtrain.errors import INTERRUPTED
from jtrain.progress import Progress, take

OnLine = Callable[["Member", str, bool], None]
"""(member, line without its end, whether it came on standard error)"""
LEASH_SECONDS = 10.0
"""How long a leash may take to kill its worker before it is killed itself."""
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Worker:
    """A process that is to be started.

    Attributes:
      host: where it runs, for messages.
      command: its leash, with the connection to another machine before it where there is one.
      environment: variables beside those of this process.
    """

    host: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class Member:
    """A worker that was started.

    Attributes:
      rank: its number.
      code: its exit code; negative: the signal that killed it; None: it runs.
      progress: where it said that it is.
      spoke: whether it has said so yet.
    """

    def __init__(self, rank: int, worker: Worker, now: float):
        self.rank, self.host = rank, worker.host
        self.code: int | None = None
        self.progress = Progress()
        self.spoke = False
        self._told_code: int | None = None
        self._heard = self._moved = now
        self._texts = {False: b"", True: b""}
        self.process = subprocess.Popen(
            list(worker.command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **worker.environment},
            start_new_session=True,  # a Ctrl-C in the terminal is the supervisor's alone
        )

    def silent_for(self, now: float) -> float:
        """Seconds since it last said anything."""
        return now - self._heard

    def stuck_for(self, now: float) -> float:
        """Seconds since it last got on."""
        return now - self._moved

    def hears(self, said: bytes, error: bool, now: float) -> list[str]:
        """Takes in what came on one of its streams; the lines that are whole now, without what it says of itself."""
        lines = (self._texts[error] + said).split(b"\n")
        rest = lines.pop()
        if not said:  # the stream has ended
            lines, rest = lines + ([rest] if rest else []), b""
        found, kept = [], b""
        for line in lines:
            text, said_of_itself = take((kept + line).decode(errors="replace"))
            kept = text.encode()  # of a line that was cut in two
            if said_of_itself is None:
                found.append(text)
                kept = b""
            elif isinstance(said_of_itself, Progress):
                self._note(said_of_itself, now)
            else:
                self._told_code = said_of_itself
        self._texts[error] = kept + rest
        self._heard = now
        return found

    def _note(self, progress: Progress, now: float) -> None:
        self.progress, self.spoke = progress, True
        self._moved = now - progress.seconds

    def ends(self, code: int) -> None:
        """Its process has ended with this code; what the leash told of the worker's counts."""
        code = code if self._told_code is None else self._told_code
        self.code = 128 - code if 128 < code < 128 + signal.NSIG and code != INTERRUPTED else code

    def send(self, number: signal.Signals) -> None:
        """Passes a signal on to the worker; a leash that is gone is no error."""
        with contextlib.suppress(OSError, ValueError):
            assert self.process.stdin is not None
            self.process.stdin.write(f"{number.name}\n".encode())
            self.process.stdin.flush()

    def let_go(self) -> None:
        """Lets the worker be killed."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()


class Gang:
    """Processes that live and die together. Use `with`, so that none is left behind.

    Args:
      workers: one for each rank.
      on_line: hears every line of output but those that say where a run is.
      clock: seconds that only rise.

    Raises:
      OSError: one can't be started; `filename2` is its host.
    """

    def __init__(self, workers: Sequence[Worker], on_line: OnLine, clock: Callable[[], float] = time.monotonic):
        self._on_line, self._clock = on_line, clock
        self._selector = selectors.DefaultSelector()
        self.members: list[Member] = []
        try:
            for rank, worker in enumerate(workers):
                self._start(rank, worker)
        except OSError as error:
            self.kill()
            raise OSError(error.errno, error.strerror, worker.command[0], None, worker.host) from error

    def _start(self, rank: int, worker: Worker) -> None:
        member = Member(rank, worker, self._clock())
        self.members.append(member)
        for stream, error in ((member.process.stdout, False), (member.process.stderr, True)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, (member, error))

    def poll(self, seconds: float) -> list[Member]:
        """Waits at most so long for output, passes it on, and returns the members that have ended since."""
        if self._selector.get_map():
            for key, _ in self._selector.select(seconds):
                self._read(key.fileobj, *key.data)  # type: ignore[arg-type]
        else:
            time.sleep(seconds)
        ended = []
        for member in self.alive:
            code = member.process.poll()
            if code is not None:
                self._drain(member)
                member.ends(code)
                ended.append(member)
        return ended

    @property
    def alive(self) -> list[Member]:
        """The members that run."""
        return [member for member in self.members if member.code is None]

    def send(self, number: signal.Signals) -> None:
        """Passes a signal on to all workers."""
        for member in self.alive:
            member.send(number)

    def kill(self) -> None:
        """Kills all of them, with everything that they started, and waits until they are gone."""
        for member in self.alive:
            member.let_go()
        deadline = self._clock() + LEASH_SECONDS
        while self.alive and self._clock() < deadline:
            self.poll(0.05)
        for member in self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(member.process.pid, signal.SIGKILL)
            member.process.wait()
        self.poll(0.0)

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for member in self.members:
            member.let_go()
        self._selector.close()

    def _read(self, stream: IO[bytes], member: Member, error: bool) -> bool:
        """Reads once; whether there may be more."""
        try:
            said = os.read(stream.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        for line in member.hears(said, error, self._clock()):
            self._on_line(member, line, error)
        if not said:
            self._selector.unregister(stream)
            stream.close()
        return bool(said)

    def _drain(self, member: Member) -> None:
        """The last words of a member that has ended; whoever else holds its streams is not waited for."""
        for key in list(self._selector.get_map().values()):
            if key.data[0] is member:
                while self._read(key.fileobj, *key.data):  # type: ignore[arg-type]
                    pass
                if not key.fileobj.closed:  # type: ignore[union-attr]
                    for line in member.hears(b"", key.data[1], self._clock()):
                        self._on_line(member, line, key.data[1])
                    self._selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
