"""Preemption: what a run that is asked to leave does, and by when it is gone. The threads are in `guard.py`.

Signals, a STOP file, a notice of the platform and another process of the run all end in `ask`. Before the training
begins there is nothing to save: the run leaves from wherever it is. Then the processes agree on a place (`Agreement`),
the loop saves there and raises `Preempted`. Two things end it at once, and leave what is durable as it is: the grace is
over, or a signal comes again.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from enum import Enum

from jtrain.config.schema import FaultsConfig
from jtrain.errors import Exit
from jtrain.parallel.agreement import Agreement

STOP_FILE = "STOP"
"""A file of this name in the run directory asks the run to leave, and keeps it from starting until it is removed."""
AGAIN_SECONDS = 1.0
"""Signals that come sooner after the first are the same wish: job systems send it to a process and to its group."""
SETUP_SECONDS = 5.0
"""How long the program may take to unwind while nothing has been trained."""


class Stage(Enum):
    """How far a run is, and the exit code with which it leaves when it has to at once."""

    SETUP = Exit.PREEMPTED_NOT_SAVED, "nothing was trained yet"
    FIT = Exit.PREEMPTED_NOT_SAVED, "not saved"
    SAVED = Exit.PREEMPTED_SAVED, "saved"
    OVER = Exit.DONE, "done"

    @property
    def code(self) -> Exit:
        return self.value[0]


class Preemption:
    """One run's.

    Args:
      faults: the config's section.
      leave: `leave(code, text)` ends the process at once.
      unwind: raises `Preempted` in the main thread.
      durable: the newest durable step, for messages.
      clock: seconds that only rise.
    """

    def __init__(
        self,
        faults: FaultsConfig,
        *,
        leave: Callable[[Exit, str], None],
        unwind: Callable[[], None] = lambda: None,
        durable: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._grace, self._leave, self._unwind = faults.preemption_grace_seconds, leave, unwind
        self._durable, self._clock = durable, clock
        self._first_signal: float | None = None
        self._deadline: float | None = None
        self.stage = Stage.SETUP
        self.agreement = Agreement()
        self.reason = ""
        self.asked_at = 0.0
        self.words: collections.deque[str] = collections.deque()

    def begin(self, agreement: Agreement) -> None:
        """The training begins: from here on there is something to save."""
        self.agreement, self.stage = agreement, Stage.FIT
        if self.reason:
            agreement.ask(self.reason)

    def signal(self, name: str) -> None:
        """Takes a signal."""
        now = self._clock()
        if self._first_signal is None:
            self._first_signal = now
            self.ask(name, unwind=False)  # the handler does it
        elif now - self._first_signal > AGAIN_SECONDS:
            self._go(f"{name} came again")

    def ask(self, reason: str, *, unwind: bool = True) -> None:
        """The run shall leave; the first reason stands."""
        if self.reason:
            return
        self.reason, self.asked_at = reason, self._clock()
        if self.stage is Stage.SETUP:
            self._deadline = self.asked_at + min(SETUP_SECONDS, self._grace)
            if unwind:
                self._unwind()
            return
        self._deadline = self.asked_at + self._grace
        if self.stage is Stage.FIT:
            self.words.append(f"preempted by {reason}: the run saves and leaves, within {self._grace:g} s")
        self.agreement.ask(reason)

    def seconds_left(self, margin: float) -> float | None:
        """Until `margin` before the grace is over; None: nobody has asked."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock() - margin)

    def tick(self) -> None:
        """Looks at the clock; again and again."""
        if self._deadline is not None and self._clock() > self._deadline:
            self._deadline = None
            self._go(f"not gone within {self._clock() - self.asked_at:.0f} s")

    def _go(self, why: str) -> None:
        durable = self._durable()
        kept = "no step is durable" if durable is None else f"step {durable} is durable"
        self._leave(self.stage.code, f"preempted by {self.reason}, {self.stage.value[1]}: {why}; {kept}")
