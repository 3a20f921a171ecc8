"""Trackers: other places that a run's figures go to, beside metrics.jsonl.

A tracker that fails is dropped with a warning: a full disk or a server that is away never ends training here.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from etils import epath

log = logging.getLogger(__name__)


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


class Trackers:
    """Several trackers as one; each is on its own.

    Args:
      names: names of `TRACKERS`.
      run_dir: the run's directory.
    """

    def __init__(self, names: Sequence[str], run_dir: str | os.PathLike[str]):
        self._open: dict[str, Tracker] = {}
        for name in names:
            self._guarded(name, self._add, name, epath.Path(run_dir))

    @property
    def names(self) -> tuple[str, ...]:
        """The trackers that still work."""
        return tuple(self._open)

    def log(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        for name, tracker in list(self._open.items()):
            self._guarded(name, tracker.log, step, split, values)

    def log_text(self, step: int, name: str, text: str) -> None:
        for tracker_name, tracker in list(self._open.items()):
            self._guarded(tracker_name, tracker.log_text, step, name, text)

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            self._guarded(name, tracker.close)
        self._open.clear()

    def _add(self, name: str, run_dir: epath.Path) -> None:
        self._open[name] = TRACKERS[name](run_dir)

    def _guarded(self, name: str, call: Callable[..., object], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            self._open.pop(name, None)
            log.warning("tracker %s failed and is left out from here on: %s: %s", name, type(error).__name__, error)
