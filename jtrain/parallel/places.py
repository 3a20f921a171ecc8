"""Where each process of a run is: written to the store every few seconds, read when something hangs.

A process that is stopped, or whose machine is gone, writes no more: its beat stands still. One that is behind the
others has passed fewer places of the loop than they.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from jtrain.parallel.store import Store

_KEY = "jtrain/place"
_NAMED = 8
"""More processes than these are counted."""


@dataclass(frozen=True)
class Place:
    """Where a process is.

    Attributes:
      beat: counts what it has written.
      phase: of `jtrain.config.ladder`.
      step: updates whose figures it has read.
      passed: places of the loop that it has passed.
      seconds: since it got on.
      host: its machine's name.
      figures: what else process 0 wants to know.
    """

    beat: int
    phase: str
    step: int | None
    passed: int
    seconds: float
    host: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"in phase {self.phase}{step}, for {self.seconds:.0f} s"


class Places:
    """Writes this process's place, and reads those of all.

    Args:
      store: where.
      process: number of this process.
      count: number of processes.
      silence: a process whose beat stands still for so many seconds is silent.
      clock: seconds that only rise.
    """

    def __init__(
        self, store: Store, process: int, count: int, silence: float, clock: Callable[[], float] = time.monotonic
    ):
        self._store, self._process, self.count = store, process, count
        self._silence, self._clock = silence, clock
        self._beats = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._host = socket.gethostname()

    def write(self, phase: str, step: int | None, passed: int, seconds: float, figures: dict[str, Any]) -> None:
        """Writes where this process is."""
        self._beats += 1
        place = Place(self._beats, phase, step, passed, round(seconds, 1), self._host, figures)
        self._store.put(f"{_KEY}/{self._process}", json.dumps(asdict(place)), replace=True)

    def read(self) -> dict[int, Place]:
        """Process -> where it is, of those that have said so."""
        found = {int(process): Place(**json.loads(text)) for process, text in self._store.below(_KEY).items()}
        now = self._clock()
        for process, place in found.items():
            if process not in self._seen or self._seen[process][0] != place.beat:
                self._seen[process] = (place.beat, now)
        return found

    def silent(self, places: Mapping[int, Place]) -> list[int]:
        """Processes that have written nothing, or nothing new for too long, as far as `read` has seen."""
        now, missing = self._clock(), [process for process in range(self.count) if process not in places]
        still = [p for p, (_, since) in self._seen.items() if p != self._process and now - since > self._silence]
        return sorted(missing + still)

    def blame(self) -> str:
        """Which processes the others wait for, in words."""
        places = self.read()
        if self._process not in places:  # not even what it has written itself
            return "the coordinator (process 0) does not answer"
        silent = self.silent(places)
        if silent:
            return f"silent (stopped, or gone): {_names(silent, places, say_place=False)}"
        least = min(place.passed for place in places.values())
        behind = [process for process, place in places.items() if place.passed == least]
        if len(behind) < len(places):
            return f"behind the others: {_names(sorted(behind), places)}"
        phases = {place.phase for place in places.values()}
        if len(phases) == 1:
            return f"all {len(places)} processes wait alike"
        return "where they are: " + _names(sorted(places), places)


def _names(processes: list[int], places: Mapping[int, Place], *, say_place: bool = True) -> str:
    words = []
    for process in processes[:_NAMED]:
        place = places.get(process)
        host = f" ({place.host})" if place is not None and place.host else ""
        words.append(f"process {process}{host}" + (f" {place}" if place is not None and say_place else ""))
    more = len(processes) - _NAMED
    return "; ".join(words) + (f"; and {more} more" if more > 0 else "")
