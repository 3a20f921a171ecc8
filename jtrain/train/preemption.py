"""Preemption: SIGTERM asks the run to save and to leave. The handler sets a flag; the loop polls it between steps."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils

from jtrain.errors import Preempted
from jtrain.parallel.lost import several


class Preemption:
    """Context manager that catches SIGTERM, and tells all processes at the same step.

    With several processes `jax.distributed` holds the signal itself and agrees on a step over the coordinator; a
    process that never asks would ignore SIGTERM for good.
    """

    def __init__(self) -> None:
        self._flag = False
        self._previous: Any = None
        self._installed = False

    def __enter__(self) -> Preemption:
        # Only the main thread may install handlers: a Trainer in a thread of a notebook goes without.
        self._installed = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()
        if self._installed:
            self._previous = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, self._previous)

    def requested(self, step: int) -> bool:
        """Whether to stop after update `step`. Every process has to ask once a step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._flag

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._flag = True


@contextlib.contextmanager
def leaves_at_once() -> Iterator[None]:
    """While a run is put together SIGTERM ends it at once: there is nothing to save, and no step to wait for.

    Raises:
      Preempted: from wherever the program is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise Preempted("preempted before the first step, nothing to save", saved=False)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        if not several():  # else jax.distributed has taken the signal over meanwhile
            signal.signal(signal.SIGTERM, previous)
