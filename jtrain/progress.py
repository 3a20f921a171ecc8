"""What a run says of itself to whoever watches it: its phase, its step, and the newest step that is durable.

`report` takes note of it, at hardly any cost, wherever the run gets on. A run that is supervised (`jtrain launch` sets
JTRAIN_SUPERVISED=1) also writes it on standard error, in lines that begin with a character that no other line has:

    <record separator>jtrain {"phase": "step", "step": 120, "durable": 100, "seconds": 0.4}

Such a line goes wherever standard error goes (a pipe, ssh, srun), and the supervisor takes it out of the stream. A
thread repeats it every few seconds: a process that is stopped, or a machine that is gone, falls silent; one that hangs
goes on to speak, and `seconds` (since it last got on) grows.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import NamedTuple

PULSE_SECONDS = 5.0
"""Distance of the lines by which a worker tells its supervisor that it is there."""
SUPERVISED, ATTEMPT, LAST_END = "JTRAIN_SUPERVISED", "JTRAIN_ATTEMPT", "JTRAIN_LAST_END"
"""What a supervisor tells a worker: that it listens, the number of the attempt, and how the one before ended (JSON)."""
MARK = "\x1ejtrain "
_PAUSE_SECONDS = 0.2
"""Updates come faster than anybody reads: a line of them waits so long for the one before."""
_FAST = ("step", "data_wait")


class Progress(NamedTuple):
    """Where a run is.

    Attributes:
      phase: one of `jtrain.config.ladder.PHASES`.
      step: updates applied; None: not known yet.
      durable: the newest step that survives a crash; None: there is none, or it is not known here.
      seconds: since it last got on.
    """

    phase: str = "init"
    step: int | None = None
    durable: int | None = None
    seconds: float = 0.0

    def line(self) -> str:
        """The line that says so."""
        return f"{MARK}{json.dumps(self._asdict())}\n"


def end_line(code: int) -> str:
    """The line that tells the exit code of a process; on its way back through ssh and its wrappers it may be lost."""
    return f'{MARK}{{"code": {code}}}\n'


def take(line: str) -> tuple[str, Progress | int | None]:
    """Takes such a line out of a line of output.

    Returns:
      The text before it, and what it says: where the run is, or the exit code of its process. None: it is no such line.
    """
    text, mark, said = line.partition(MARK)
    if not mark:
        return line, None
    try:
        found = json.loads(said)
        if "code" in found:
            return text, int(found["code"])
        return text, Progress(*(found[name] for name in Progress._fields))
    except (ValueError, KeyError, TypeError):  # cut off by a kill
        return text, None


class Reporter:
    """Where this process is, and the thread that repeats it.

    Args:
      descriptor: where lines go; None: nobody reads them.
    """

    def __init__(self, descriptor: int | None):
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._now = Progress()
        self._moved = time.monotonic()
        self._written = 0.0
        self._thread: threading.Thread | None = None

    def report(self, phase: str | None = None, *, step: int | None = None, durable: int | None = None) -> None:
        """Takes note that the run got on."""
        with self._lock:
            before, moved = self._now, time.monotonic()
            self._now = Progress(
                phase or before.phase,
                before.step if step is None else step,
                before.durable if durable is None else durable,
            )
            self._moved = moved
            if self._descriptor is None:
                return
            slow = self._now.phase not in _FAST and self._now.phase != before.phase
            if slow or durable is not None or moved - self._written >= _PAUSE_SECONDS:
                self._write()
            if self._thread is None:
                self._thread = threading.Thread(target=self._pulse, name="jtrain-progress", daemon=True)
                self._thread.start()

    def current(self) -> Progress:
        """Where the run is."""
        with self._lock:
            return self._current()

    def _current(self) -> Progress:
        return self._now._replace(seconds=round(time.monotonic() - self._moved, 3))

    def _write(self) -> None:
        assert self._descriptor is not None
        try:
            os.write(self._descriptor, self._current().line().encode())  # one call: it stays whole among other output
        except OSError:  # nobody reads any more
            self._descriptor = None
        self._written = time.monotonic()

    def _pulse(self) -> None:
        while True:
            time.sleep(PULSE_SECONDS)
            with self._lock:
                if self._descriptor is None:
                    return
                self._write()


_reporter = Reporter(2 if os.environ.get(SUPERVISED) == "1" else None)
report, current = _reporter.report, _reporter.current
