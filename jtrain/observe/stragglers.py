"""Slow processes of a run: those for which all the others wait in every step.

All processes finish an update at the same time, whoever is slow: that time tells nothing. What tells is what a process
does by itself. `busy` are the seconds of an update in which its loop was not waiting for the device (data, callbacks,
logging): they run beside the device, and cost as soon as they last as long as the update. `stolen` are those in which
it could not run at all: stopped, without a core, held by a collector of garbage. A chip that is slow by itself shows in
neither: its host waits like all the others.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

BOUND = 0.8
"""A loop that is busy for this share of the update holds the device up."""
SHARE = 0.25
"""A process is slow when it costs this share of the update more than the others."""
LEAST_SECONDS = 0.02
"""Less than this of an update is noise."""
ROUNDS = 3
"""So often in a row."""


@dataclass(frozen=True)
class Pace:
    """The figures of one process, means over the updates since the log line before.

    Attributes:
      step: of the log line.
      seconds: of an update.
      busy: seconds of it in which the loop did not wait for the device.
      stolen: seconds of it in which the process could not run.
    """

    step: int
    seconds: float
    busy: float
    stolen: float


@dataclass(frozen=True)
class Straggler:
    """A slow process.

    Attributes:
      process: its number.
      step: of its figures.
      seconds: of an update.
      own: seconds of it that are this process's own doing.
      others: the same of the others, their median.
      kind: `busy` or `stolen`.
    """

    process: int
    step: int
    seconds: float
    own: float
    others: float
    kind: str

    def __str__(self) -> str:
        what = "does other things than computing" if self.kind == "busy" else "can't run"
        return (
            f"process {self.process} is slow: for {1000 * self.own:.0f} of the {1000 * self.seconds:.0f} ms of an "
            f"update it {what}, the others for {1000 * self.others:.0f} ms (step {self.step})"
        )


def slow(paces: Mapping[int, Pace]) -> list[Straggler]:
    """Processes that hold the others up, judged by one set of figures."""
    found = []
    for process, pace in paces.items():
        others = [other for number, other in paces.items() if number != process]
        if not others or pace.seconds <= 0:
            continue
        for kind, least in (("stolen", 0.0), ("busy", BOUND * pace.seconds)):
            own = getattr(pace, kind)
            median = statistics.median_low(getattr(other, kind) for other in others)
            if own >= least and own - median > max(SHARE * pace.seconds, LEAST_SECONDS):
                found.append(Straggler(process, pace.step, pace.seconds, own, median, kind))
                break
    return found


class Stragglers:
    """Tells of a process that is slow several times in a row, once until it is not."""

    def __init__(self) -> None:
        self._rounds: dict[int, int] = {}
        self._seen: dict[int, int] = {}

    def judge(self, paces: Mapping[int, Pace]) -> list[Straggler]:
        """Processes to be told of now; rounds in which nothing is new count for nothing."""
        steps = {process: pace.step for process, pace in paces.items()}
        if not steps or any(self._seen.get(process) == step for process, step in steps.items()):
            return []
        self._seen = steps
        found = {straggler.process: straggler for straggler in slow(paces)}
        self._rounds = {process: self._rounds.get(process, 0) + 1 for process in found}
        return [found[process] for process, rounds in self._rounds.items() if rounds == ROUNDS]
