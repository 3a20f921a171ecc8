"""Whether a run that has ended is started again, when, and when it is enough. Numbers in, a decision out.

| exit code | | then |
|---|---|---|
| 0 | done | end |
| 10, 11 | preempted | again; counts for nothing |
| 12, 13, 14, a signal, 255 of ssh | a machine, a hang, a full disk | again; `max_infra_restarts` in a row |
| 15, 64, 65, 66, 130 | numbers, config, data, checkpoint, Ctrl-C | end: it would end the same way |
| others | an error of the run | again; `max_restarts` in all |

"In a row" means without a new durable step between. The same error at the same durable step for the third time is a
crash loop, whoever's it is: the end, with exit code 70.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from jtrain.errors import INTERRUPTED, Exit

CRASH_LOOP = 3
"""So many equal ends in a row are enough."""
FIRST_DELAY_SECONDS = 1.0
LAST_DELAY_SECONDS = 300.0
UNREACHABLE = 255
"""Exit code of an ssh that has lost its connection."""


class Kind(Enum):
    """What an exit code means for the next start."""

    DONE = "done"
    PREEMPTED = "a preemption"
    INFRA = "a lost machine, a hang or storage"
    FINAL = "what a restart does not mend"
    OWN = "an error of the run"


def kind_of(code: int) -> Kind:
    """The kind of an exit code; negative: the signal that killed the process."""
    if code == Exit.DONE:
        return Kind.DONE
    if code in (Exit.PREEMPTED_SAVED, Exit.PREEMPTED_NOT_SAVED):
        return Kind.PREEMPTED
    if code < 0 or code in (Exit.PEER_LOST, Exit.HUNG, Exit.STORAGE, UNREACHABLE):
        return Kind.INFRA
    if code in (Exit.NUMBERS, Exit.CONFIG, Exit.DATA, Exit.CHECKPOINT, INTERRUPTED):
        return Kind.FINAL
    return Kind.OWN


@dataclass(frozen=True)
class End:
    """How an attempt ended.

    Attributes:
      code: its exit code; negative: a signal.
      reason: its first error, or another word for why.
      durable: the newest step that survived; None: none is known.
      unreachable: no process of the run came up, or the machine can't be reached: no error of the run could repeat.
    """

    code: int
    reason: str
    durable: int | None = None
    unreachable: bool = False

    @property
    def exit_code(self) -> int:
        """As a program may return it."""
        return int(Exit.PEER_LOST) if self.code < 0 or self.code == UNREACHABLE else self.code


@dataclass(frozen=True)
class Decision:
    """What comes next.

    Attributes:
      again: whether the run is started again.
      code: the exit code, if not.
      delay: seconds until then, if so.
      why: in words.
    """

    again: bool
    code: int
    delay: float
    why: str


class Restarts:
    """The budgets of one supervisor.

    Args:
      max_own: restarts after errors of the run, in all.
      max_infra: restarts in a row after the others, without a new durable step between.
      seed: of the jitter.
      first_delay, last_delay: seconds; the delay doubles with every end without a new durable step.
    """

    def __init__(
        self,
        max_own: int,
        max_infra: int,
        *,
        seed: int = 0,
        first_delay: float = FIRST_DELAY_SECONDS,
        last_delay: float = LAST_DELAY_SECONDS,
    ):
        self._max_own, self._max_infra = max_own, max_infra
        self._jitter: Callable[[], float] = random.Random(seed).random
        self._first_delay, self._last_delay = first_delay, last_delay
        self._own = self._infra = self._in_a_row = 0
        self._durable: int | None = None
        self._loop: list[tuple[int | None, str]] = []

    def decide(self, end: End) -> Decision:
        """What follows an end; call it once for each."""
        kind = kind_of(end.code)
        if kind is Kind.DONE:
            return Decision(False, end.exit_code, 0.0, "done")
        if kind is Kind.FINAL:
            return Decision(False, end.exit_code, 0.0, "it would end the same way again")
        if end.durable is not None and (self._durable is None or end.durable > self._durable):
            self._durable, self._infra, self._in_a_row = end.durable, 0, 0
        self._in_a_row += 1
        if kind is Kind.PREEMPTED:
            return Decision(True, end.exit_code, self._delay(), "preempted, which counts for nothing")
        if not end.unreachable:
            self._loop = [*self._loop, (end.durable, _signature(end.reason))][-CRASH_LOOP:]
            if len(self._loop) == CRASH_LOOP and len(set(self._loop)) == 1:
                where = "before any step was durable" if end.durable is None else f"from step {end.durable} on"
                return Decision(False, int(Exit.BUG), 0.0, f"crash loop: {CRASH_LOOP} times the same error {where}")
        if kind is Kind.INFRA:
            self._infra += 1
            count, limit, field = self._infra, self._max_infra, "max_infra_restarts"
            unit = "in a row without a new durable step"
        else:
            self._own += 1
            count, limit, field, unit = self._own, self._max_own, "max_restarts", "after errors of the run"
        if count > limit:
            return Decision(False, end.exit_code, 0.0, f"faults.{field}: {limit} is used up")
        return Decision(True, end.exit_code, self._delay(), f"restart {count} of {limit} {unit}")

    def _delay(self) -> float:
        delay = min(self._last_delay, self._first_delay * 2.0 ** (self._in_a_row - 1))
        return delay * (0.5 + self._jitter())


def _signature(reason: str) -> str:
    """An error without what differs from time to time: numbers, addresses, paths."""
    return re.sub(r"0x[0-9a-f]+|\d+|(?<=[\s'\"=])/\S+", "#", reason.lower())
