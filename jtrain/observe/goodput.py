"""Goodput: where the wall time of a run went, over all of its starts.

Every second of a process is in exactly one bucket: the innermost phase that it is in. Between two starts of a run that
did not end in order, time is `idle`. So the buckets sum to the time since the run first began, by construction.

| bucket | |
|---|---|
| `step` | updates, with the log lines and callbacks between them: the work that the run is for |
| `init` | from the start of the program: imports, devices, data, the model, the first state |
| `compile` | of the step, and of the evaluation's |
| `restore` | a checkpoint verified and read |
| `data_wait` | an update waited for its batch |
| `save_stall` | the device waited for a save: copies to the host, the save before, the last one at the end |
| `eval` | evaluations |
| `lost_work` | updates that had been made before: after a crash, or a way back in the run |
| `idle` | between two starts; with what a process that was killed did after its last line |

Measured on the host alone: nothing here waits for a device or for another process.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jtrain import progress

BUCKETS = ("step", "init", "compile", "restore", "data_wait", "save_stall", "eval", "lost_work", "idle")
EVENT = "goodput"
_PAUSE_SECONDS = 1.0
_program_began: float | None = None


def program_begins() -> None:
    """Says that this process does nothing but one run: the time since its start is part of it."""
    global _program_began
    _program_began = time.monotonic() - _age_of_process()


@dataclasses.dataclass(frozen=True)
class Past:
    """What the earlier starts of a run left in events.jsonl.

    Attributes:
      seconds: bucket -> seconds.
      step: the furthest update that is known to have been made.
      ended: when the last of them was last heard of, in seconds since the epoch; None: the clock stands still, since
        there was none, or it ended in order.
    """

    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    step: int = 0
    ended: float | None = None


def read_past(events: Iterable[Mapping[str, Any]]) -> Past:
    """The past of a run from the lines of its events.jsonl, in order."""
    past = Past()
    for event in events:
        if event["event"] == EVENT:
            past = Past(event["seconds"], event["furthest"], event["time"])
        elif event["event"] == "end" and "error" not in event:
            past = dataclasses.replace(past, ended=None)
        elif past.ended is None:  # the first line of a start; what follows the last account is idle, whatever it was
            past = dataclasses.replace(past, ended=event["time"])
    return past


class Goodput:
    """The ledger of one start of a run.

    Use: `open(past)`; `with goodput("eval"): ...` around a phase, within the others; `stepped(step)` when the figures
    of an update are read. For the thread of the loop alone.

    Args:
      clock: seconds that only rise; for what passes within the process.
      wall: seconds since the epoch; for what passes between processes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time):
        global _program_began
        self._clock, self._wall = clock, wall
        self._began = self._mark = clock()
        if _program_began is not None and clock is time.monotonic:  # the first run of this program
            self._began = self._mark = _program_began
        _program_began = None
        self._phases = ["init"]
        self._written: float | None = None
        self._opened = False
        self._clear()

    def _clear(self) -> None:
        self._seconds = dict.fromkeys(BUCKETS, 0.0)
        self._since_step = 0.0  # of `step`, since the last update
        self.furthest = 0

    def open(self, past: Past) -> None:
        """Goes on with the account of earlier starts; the time between counts as idle.

        A second call is a second start in this process, which begins now.
        """
        self._charge()
        if self._opened:
            self._began = self._mark
            self._clear()
        self._opened = True
        for bucket, seconds in past.seconds.items():
            self._seconds[bucket] = self._seconds.get(bucket, 0.0) + seconds
        self.furthest = max(self.furthest, past.step)
        if past.ended is not None:
            began = self._wall() - (self._clock() - self._began)
            self._seconds["idle"] += max(0.0, began - past.ended)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """A phase, one of `BUCKETS`; the phase around it rests meanwhile."""
        self._charge()
        self._phases.append(phase)
        progress.report(phase)
        try:
            yield
        finally:
            self._charge()
            self._phases.pop()
            progress.report(self._phases[-1])

    def stepped(self, step: int) -> None:
        """Takes note that update `step` is done; one that had been made before was lost work."""
        self._charge()
        if step <= self.furthest:
            self._seconds["step"] -= self._since_step
            self._seconds["lost_work"] += self._since_step
        self.furthest = max(self.furthest, step)
        self._since_step = 0.0
        progress.report(step=step)

    @property
    def seconds(self) -> dict[str, float]:
        """Bucket -> seconds, of all starts so far."""
        self._charge()
        return dict(self._seconds)

    @property
    def wall_seconds(self) -> float:
        """The sum of all buckets."""
        return sum(self.seconds.values())

    @property
    def ratio(self) -> float:
        """The share of the wall time that went into updates which count."""
        total = self.wall_seconds
        return self._seconds["step"] / total if total else 0.0

    def due(self) -> bool:
        """Whether a line is worth writing: the last one is not of this moment."""
        return self._written is None or self._clock() - self._written >= _PAUSE_SECONDS

    def record(self) -> dict[str, Any]:
        """The fields of a `goodput` event: `goodput`, `wall_seconds`, `seconds` by bucket, `furthest` update."""
        self._written = self._clock()
        seconds = {bucket: round(value, 3) for bucket, value in self.seconds.items()}
        return {
            "goodput": round(self.ratio, 4),
            "wall_seconds": round(self.wall_seconds, 3),
            "seconds": seconds,
            "furthest": self.furthest,
        }

    def line(self) -> str:
        """`goodput 93.1 %: step 310.2 s, compile 12.0 s, ...`: the largest first, without what is nothing."""
        ratio, seconds = self.ratio, self._seconds
        parts = sorted(((value, bucket) for bucket, value in seconds.items() if value >= 0.05), reverse=True)
        listed = ", ".join(f"{bucket.replace('_', ' ')} {_duration(value)}" for value, bucket in parts)
        return f"goodput {100 * ratio:.1f} %" + (f": {listed}" if listed else "")

    def _charge(self) -> None:
        now = self._clock()
        passed, self._mark = now - self._mark, now
        self._seconds[self._phases[-1]] += passed
        if self._phases[-1] == "step":
            self._since_step += passed


def _duration(seconds: float) -> str:
    """12.3 s, 4 min 05 s, 3 h 07 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _age_of_process() -> float:
    """Seconds since this process began; 0 where the system does not tell."""
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])  # field 22 of proc(5): starttime
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
    return max(0.0, age)
