"""The thread beside a run that may be late: it talks to the other processes, to the run directory, to the console."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from etils import epath

from jtrain import progress
from jtrain.config import ladder
from jtrain.config.schema import Config
from jtrain.observe.growth import Growth, Trend
from jtrain.observe.host_memory import host_memory
from jtrain.observe.memory import device_memory
from jtrain.observe.stragglers import Pace, Stragglers
from jtrain.parallel import lost
from jtrain.parallel.places import Place, Places
from jtrain.train.preemption import STOP_FILE, Stage

if TYPE_CHECKING:
    from jtrain.train.guard import Guard

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
PAUSE_SECONDS = 10.0
"""Distance of the words that a process leaves about where it is."""
_STOP_SECONDS = 1.0
_STOP_URL_SECONDS = 10.0


class Beside:
    """What that thread does.

    Args:
      config: the run's.
      guard: whose thread it is.

    Attributes:
      places: of the processes; None: this one is alone, or they have not met.
      pause: seconds between two words of a process.
      emit: writes an event; None: the run directory is not open.
    """

    def __init__(self, config: Config, guard: Guard):
        self._guard = guard
        least = min(ladder.limits(config.faults).values())
        self.pause = min(PAUSE_SECONDS, least / 10)
        self.places: Places | None = None
        self.emit: Callable[[str, dict[str, Any]], None] | None = None
        self._stop_file = epath.Path(config.run_dir) / STOP_FILE
        self._stop_pause = _STOP_URL_SECONDS if "://" in config.run_dir else _STOP_SECONDS
        self._looked = self._wrote = time.monotonic()
        self._wake, self._over = threading.Event(), False
        self._pace: Pace | None = None
        self._sampled = -1
        self._growths: list[tuple[Growth, Callable[[], tuple[int, int] | None]]] = []
        self._trend: dict[str, Any] = {}
        self._trends: dict[int, dict[str, Any]] = {}
        self._stragglers = Stragglers()

    def open(self, emit: Callable[[str, dict[str, Any]], None], max_steps: int) -> None:
        """The run directory is open."""
        self.emit = emit
        self._growths = [(Growth("host", max_steps), host_memory), (Growth("device", max_steps), device_memory)]

    def logged(self, step: int, seconds: float, busy: float, stolen: float) -> None:
        """Figures of a log line; for the thread of the loop, which goes on at once."""
        self._pace = Pace(step, seconds, busy, stolen)

    def wake(self) -> None:
        """There is something to do."""
        self._wake.set()

    def stop(self) -> None:
        """Ends the thread."""
        self._over = True
        self._wake.set()

    def run(self) -> None:
        """The thread."""
        state = lost.distributed.global_state
        while not self._over:
            pause = LOOK_SECONDS + (state.num_processes or 1) / 1000  # the coordinator answers all of them
            held = self._guard.preemption.reason and not self._guard.preemption.agreement.settled
            self._wake.wait(0.02 if held else pause)
            self._wake.clear()
            try:
                self._turn()
            except Exception:  # a full disk, a bug: what it does is never worth the run
                log.exception("beside the run")

    def tell(self, event: str, fields: dict[str, Any]) -> None:
        """Writes an event, where that is possible."""
        if (emit := self.emit) is not None:
            with contextlib.suppress(Exception):
                emit(event, fields)

    def blame(self, seconds: float = 3.0) -> str:
        """Which processes this one waits for, in words; it takes no longer than that to find out."""
        places, found = self.places, [""]
        if places is None:
            return ""

        def ask() -> None:
            found[0] = places.blame()

        thread = threading.Thread(target=ask, name="jtrain-blame", daemon=True)
        thread.start()
        thread.join(seconds)
        return found[0] or "the coordinator (process 0) does not answer"

    def _turn(self) -> None:
        preemption = self._guard.preemption
        while preemption.words or self._guard.words:
            level, text = ("warning", preemption.words.popleft()) if preemption.words else self._guard.words.popleft()
            getattr(log, level)("%s", text)
        preemption.agreement.turn(lambda reason: preemption.ask(f"{reason} of another process"))
        now = time.monotonic()
        if now - self._looked >= self._stop_pause and not preemption.reason and lost.process_id() == 0:
            self._looked = now
            if preemption.stage is Stage.FIT and self._stop_file.exists():
                preemption.ask(f"{self._stop_file}")
                self._wake.set()
        self._sample()
        if self.places is not None and now - self._wrote >= self.pause:
            self._wrote = now
            self._write()
            if self._guard.watchdog.suspicious:
                self.places.read()
            if lost.process_id() == 0:
                self._judge(self.places.read())

    def _sample(self) -> None:
        """Looks at the memory, once for each log line."""
        pace = self._pace
        if pace is None or pace.step == self._sampled:
            return
        self._sampled = pace.step
        for growth, memory in self._growths:
            if (found := memory()) is not None and (trend := growth.sample(pace.step, *found)) is not None:
                self._grows(trend)

    def _grows(self, trend: Trend) -> None:
        log.warning("%s", trend)
        self._trend = dataclasses.asdict(trend)
        if lost.process_id() == 0:
            self.tell("memory_growth", {"process": 0} | self._trend)

    def _write(self) -> None:
        assert self.places is not None
        now = progress.current()
        figures: dict[str, Any] = {}
        if self._pace is not None:
            figures["pace"] = dataclasses.asdict(self._pace)
        if self._trend:
            figures["growth"] = self._trend
        self.places.write(now.phase, now.step, self._guard.passed, now.seconds, figures)

    def _judge(self, places: dict[int, Place]) -> None:
        """For process 0: tells of slow processes, and writes the events of all."""
        assert self.places is not None
        for process, place in places.items():
            trend = place.figures.get("growth")
            if process and trend is not None and self._trends.get(process) != trend:
                self._trends[process] = trend
                self.tell("memory_growth", {"process": process} | trend)
        paces = {process: Pace(**place.figures["pace"]) for process, place in places.items() if "pace" in place.figures}
        if len(paces) < self.places.count:
            return
        for straggler in self._stragglers.judge(paces):
            host = places[straggler.process].host
            log.warning("%s (%s)", straggler, host)
            self.tell("straggler", {"host": host} | dataclasses.asdict(straggler))
