"""The watchdog: a phase that lasts too long without getting on ends the run, with the stacks of all threads.

The limits are those of `jtrain.config.ladder`, from the first second of the program to its last. It decides; the thread
that asks it again and again is in `guard.py`. When even that thread can't run, since something holds the interpreter's
lock, a timer of faulthandler (C code, without that lock) writes the stacks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jtrain import progress
from jtrain.progress import SUPERVISED, Progress

DATA_SECONDS = 30.0
"""A wait for data that lasts longer is worth a warning."""
BACKSTOP_SECONDS = 30.0
"""So long after the limit faulthandler writes the stacks by itself."""
STACKS = "stacks"
"""Folder of the run directory: `process-<n>.txt` of those that hung."""
_REARM_SECONDS = 5.0
_PAUSED_SECONDS = 5.0
_DEBUGGERS = ("pdb", "bdb", "pydevd", "IPython.core.debugger", "debugpy")


@dataclass(frozen=True)
class Hang:
    """A phase that has lasted too long."""

    phase: str
    step: int | None
    seconds: float
    limit: float

    def __str__(self) -> str:
        step = "" if self.step is None else f", after step {self.step}"
        return f"no progress for {self.seconds:.0f} s in phase {self.phase}{step} (its limit is {self.limit:g} s)"


class Watchdog:
    """Compares where the run is with the limits.

    Args:
      limits: phase -> seconds.
      say: for warnings.
      current: where the run is.
      clock: seconds that only rise.
      busy: seconds that this process has computed.
    """

    def __init__(
        self,
        limits: dict[str, float],
        say: Callable[[str], None] = lambda text: None,
        *,
        current: Callable[[], Progress] = progress.current,
        clock: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] = time.process_time,
    ):
        self._limits, self._say, self._current = limits, say, current
        self._clock, self._busy = clock, busy
        self._worked = busy()
        self._last: float | None = None
        self._armed: float | None = None
        self._paused = 0.0
        self._before = 0.0
        self._warned: float | None = None
        self.suspicious = False

    def tick(self) -> Hang | None:
        """Looks once; a few times a second. What hangs is told once, until the run gets on."""
        now, place, worked = self._clock(), self._current(), self._busy()
        gap, self._last = 0.0 if self._last is None else now - self._last, now
        worked, self._worked = worked - self._worked, worked
        if place.seconds < self._before or self._before == 0.0:  # it got on
            if self._warned is not None:
                self._say(f"the data is there again, after {self._before:.0f} s")
            self._paused, self._warned = 0.0, None
        if gap > _PAUSED_SECONDS and worked < gap / 10:  # it was stopped, or its machine asleep: nobody hung meanwhile
            self._paused += gap
        self._before = place.seconds
        seconds = max(0.0, place.seconds - self._paused)
        limit = self._limits.get(place.phase, float("inf"))
        self.suspicious = seconds > limit / 2
        if place.phase == "data_wait" and seconds > min(DATA_SECONDS, limit / 2) and self._warned is None:
            self._warned = now
            step = "the first update" if place.step is None else f"update {place.step + 1}"
            self._say(f"{step} has waited {seconds:.0f} s for its batch; the limit is {limit:g} s")
        if seconds <= limit:
            self._arm(now, limit - seconds)
            return None
        self._paused = place.seconds  # again after as long, if nobody ends the program
        return Hang(place.phase, place.step, seconds, limit)

    def _arm(self, now: float, left: float) -> None:
        if left == float("inf") or (self._armed is not None and now - self._armed < _REARM_SECONDS):
            return
        self._armed = now
        # A supervisor ends it by itself; and somebody at a terminal may have stopped it for a while.
        ends = os.environ.get(SUPERVISED) != "1" and not _interactive()
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            faulthandler.dump_traceback_later(left + BACKSTOP_SECONDS, exit=ends, file=2)

    def close(self) -> None:
        """Takes the timer away."""
        if self._armed is not None:
            faulthandler.cancel_dump_traceback_later()


def write_stacks(run_dir: str, process: int, why: str) -> str | None:
    """Writes the stacks of all threads to standard error and into the run directory.

    Returns:
      The file; None: it can't be written.
    """
    with contextlib.suppress(OSError, ValueError):
        faulthandler.dump_traceback(file=2)
    if "://" in run_dir:
        return None
    path = Path(run_dir) / STACKS / f"process-{process}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {why}\n")
            file.flush()
            faulthandler.dump_traceback(file=file)
            file.write("\n")
    except OSError:
        return None
    return str(path)


def may_end() -> bool:
    """Whether a program that hangs may be ended: nobody sits at its prompt or in its debugger."""
    if hasattr(sys, "ps1"):
        return False
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_globals.get("__name__") in _DEBUGGERS:
            return False
        frame = frame.f_back
    return True


def _interactive() -> bool:
    """Whether somebody may have stopped the program for a while (Ctrl-Z)."""
    with contextlib.suppress(ValueError, AttributeError):
        return hasattr(sys, "ps1") or sys.stdin.isatty()
    return False
