"""Trackers: other places that a run's figures go to, beside metrics.jsonl.

Each has a thread of its own. One that fails, or does not keep up, is dropped with a warning, and its end is not waited
for longer than `CLOSE_SECONDS`: a full disk, or a server that is away or hangs, never ends or delays training here.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from etils import epath

log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""How long the end of the run waits for what a tracker has not written yet."""
WAITING_CALLS = 1000
"""A tracker that is further behind is dropped."""


class Tracker(Protocol):
    """What a tracker does."""

    def log(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Records the figures of a step; `split` is `train` or `eval`."""
        ...

    def log_text(self, step: int, name: str, text: str) -> None:
        """Records a text of a step, such as a sample of what the model writes."""
        ...

    def close(self) -> None:
        """Flushes and closes."""
        ...


class TensorBoard:
    """Scalars in TensorBoard's event files, tagged `train/loss`, `eval/eval_loss`, …, and texts; needs no TensorFlow.

    Args:
      folder: where the event files go (`RUN/tb`).
    """

    def __init__(self, folder: str | os.PathLike[str]):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._metadata, self._tensor = SummaryMetadata, TensorProto
        self._writer = EventFileWriter(os.fspath(folder), flush_secs=30)

    def log(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        scalars = [
            self._summary.Value(tag=f"{split}/{name}", simple_value=float(value))
            for name, value in values.items()
            if isinstance(value, (int, float)) and math.isfinite(value)
        ]
        if scalars:
            self._add(step, scalars)

    def log_text(self, step: int, name: str, text: str) -> None:
        metadata = self._metadata(plugin_data=self._metadata.PluginData(plugin_name="text"))
        tensor = self._tensor(dtype="DT_STRING", string_val=[text.encode("utf-8", "replace")])
        self._add(step, [self._summary.Value(tag=name, metadata=metadata, tensor=tensor)])

    def _add(self, step: int, values: list[Any]) -> None:
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


TRACKERS: dict[str, Callable[[epath.Path], Tracker]] = {"tensorboard": lambda run_dir: TensorBoard(run_dir / "tb")}
"""Name in `logging.trackers` -> how it is opened, given the run directory."""


class _Thread:
    """A tracker on a thread of its own."""

    def __init__(self, name: str, tracker: Tracker):
        self.works = True
        self._name, self._tracker = name, tracker
        self._calls: queue.Queue[tuple[Callable[..., object], tuple[Any, ...]] | None] = queue.Queue(WAITING_CALLS)
        self._thread = threading.Thread(target=self._run, name=f"jtrain-{name}", daemon=True)
        self._thread.start()

    def log(self, *args: Any) -> None:
        self._later(self._tracker.log, args)

    def log_text(self, *args: Any) -> None:
        self._later(self._tracker.log_text, args)

    def close(self) -> None:
        if not self.works:
            return
        with contextlib.suppress(queue.Full):
            self._calls.put_nowait(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("tracker %s has not ended in %g s; what it had not written is lost", self._name, CLOSE_SECONDS)

    def _later(self, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        if not self.works:
            return
        try:
            self._calls.put_nowait((call, args))
        except queue.Full:
            self._drop(f"it is {WAITING_CALLS} lines behind")

    def _run(self) -> None:
        try:
            while self.works and (item := self._calls.get()) is not None:
                call, args = item
                call(*args)
            self._tracker.close()
        except Exception as error:
            self._drop(f"{type(error).__name__}: {error}")

    def _drop(self, reason: str) -> None:
        self.works = False
        log.warning("tracker %s failed and is left out from here on: %s", self._name, reason)


class Trackers:
    """Several trackers as one; each is on its own.

    Args:
      names: names of `TRACKERS`.
      run_dir: the run's directory.
    """

    def __init__(self, names: Sequence[str], run_dir: str | os.PathLike[str]):
        self._open: dict[str, _Thread] = {}
        for name in names:
            try:
                self._open[name] = _Thread(name, TRACKERS[name](epath.Path(run_dir)))
            except Exception as error:
                log.warning("tracker %s can't be opened and is left out: %s: %s", name, type(error).__name__, error)

    @property
    def names(self) -> tuple[str, ...]:
        """The trackers that still work."""
        return tuple(name for name, tracker in self._open.items() if tracker.works)

    def log(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        for tracker in self._open.values():
            tracker.log(step, split, dict(values))

    def log_text(self, step: int, name: str, text: str) -> None:
        for tracker in self._open.values():
            tracker.log_text(step, name, text)

    def close(self) -> None:
        for tracker in self._open.values():
            tracker.close()
        self._open.clear()
