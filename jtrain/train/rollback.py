"""Going back in a run: from a spike, or numbers that stay bad, to the newest checkpoint, and on behind the bad batches.

The recipe is PaLM's (Chowdhery et al. 2022, 5.1): the same parameters with other batches do not spike again. The run
goes back to a step r, at which p batches had been used, and leaves out the batches [p, e), with e behind the spike.

Batches are numbered by use, so that is all: whoever comes to batch p goes on with batch e, and the ones between count
as skipped. It needs no more than the list of such windows to go the same way again, from r or from any step before it.
The list stands in the checkpoints, and in events.jsonl for a run that dies before it saves again. A window that is lost
with a torn line costs nothing: the run comes to the same spike, and to the same window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jtrain.train.faults import Diverged
    from jtrain.train.session import Session
    from jtrain.train.trainer import Trainer

EVENT = "rollback"


@dataclasses.dataclass(frozen=True, order=True)
class Window:
    """Batches [first, end) that are left out; `step` is the one that the run went back to."""

    first: int
    end: int
    step: int


class Rollbacks:
    """The windows of a run.

    Args:
      windows: known from the run's events, as lists [first, end, step].
    """

    def __init__(self, windows: Iterable[Iterable[int]] = ()):
        self._windows: set[Window] = set()
        self.add(windows)

    def add(self, windows: Iterable[Iterable[int]]) -> None:
        """Takes note of windows that a checkpoint lists."""
        self._windows |= {Window(*window) for window in windows}

    @property
    def windows(self) -> list[list[int]]:
        """What a checkpoint lists."""
        return [[window.first, window.end, window.step] for window in sorted(self._windows)]

    def count(self, step: int) -> int:
        """How often the run went back to this very step."""
        return sum(window.step == step for window in self._windows)

    def beyond(self, batch: int) -> int:
        """The batch that is used where batch number `batch` is next: itself, unless a window begins there."""
        while inside := [window.end for window in self._windows if window.first == batch]:
            batch = max(inside)
        return batch


def windows_of(events: Iterable[Mapping[str, Any]]) -> list[list[int]]:
    """The windows that the lines of an events.jsonl tell of."""
    return [[event["first"], event["end"], event["step"]] for event in events if event["event"] == EVENT]


def go_back(trainer: Trainer, session: Session, error: Diverged) -> str | None:
    """Takes the run back to its newest checkpoint; it then goes on behind the batch of the error.

    Returns:
      None, or, with nothing done, why it can't go back: it may not, has nowhere to go, or has done so too often.
    """
    faults = trainer.config.faults
    steps = session.own_steps() if error.may_go_back and faults.max_rollbacks else []
    if not steps:
        return ""
    if (times := trainer.rollbacks.count(steps[-1])) >= faults.max_rollbacks:
        return f"; the run has gone back to step {steps[-1]} {times} times"
    trainer.restore(lambda abstract: session.go_back(abstract, steps))
    step, first = trainer.counters.step, trainer.counters.batches
    end = error.batch + 1 + faults.rollback_margin
    trainer.rollbacks.add([[first, end, step]])
    fields = {"step": step, "from_step": error.step, "first": first, "end": end, "reason": error.message}
    session.emit(EVENT, fields | error.figures)
    trainer.say(f"went back to step {step}; batches {first} to {end - 1} are left out: {error.message}")
    return None
