"""metrics.jsonl and events.jsonl: what a run did, in a form that programs read.

The names of the figures do not change: `loss`, `learning_rate`, `grad_norm`, `tokens`, … on train lines; `eval_loss`,
`perplexity`, … on eval lines. A figure that is unknown or not finite is null.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from etils import epath

from jtrain.observe.jsonlines import JsonLines, read_lines

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "events.jsonl"


class MetricsLog:
    """Writer of `metrics.jsonl`: one line for each (step, split).

    Args:
      run_dir: the run's directory, which must exist.

    Raises:
      StorageError: the file can't be written.
    """

    def __init__(self, run_dir: str | os.PathLike[str]):
        self._lines = JsonLines(epath.Path(run_dir) / METRICS_FILE)

    def log(self, step: int, split: str, values: Mapping[str, Any]) -> None:
        """Appends a line.

        Args:
          step: updates applied so far.
          split: `train` or `eval`.
          values: name -> number or None.
        """
        own = {"step": step, "split": split, "time": time.time()}
        self._lines.append({**own, **values, **own})  # a task's figure of the same name gives way

    def close(self) -> None:
        self._lines.close()


class Events:
    """Writer of `events.jsonl`: start, resume, save, durable, corrupt, preempted, skipped_step, …, end.

    Safe to call from any thread: the checkpoint writer reports from its own.
    """

    def __init__(self, run_dir: str | os.PathLike[str]):
        self._lines = JsonLines(epath.Path(run_dir) / EVENTS_FILE)

    def emit(self, event: str, **fields: Any) -> None:
        """Appends `{"event": event, "time": seconds since the epoch, **fields}`."""
        self._lines.append({"event": event, "time": time.time(), **fields})

    def close(self) -> None:
        self._lines.close()


def read_metrics(run_dir: str | os.PathLike[str], split: str | None = None) -> list[dict[str, Any]]:
    """The lines of a run's metrics in the order of (step, split).

    After a resume or a rollback steps repeat; the last line of a step counts.

    Args:
      run_dir: the run's directory.
      split: only this split's lines.
    """
    last: dict[tuple[int, str], dict[str, Any]] = {}
    for line in read_lines(epath.Path(run_dir) / METRICS_FILE):
        if split is None or line["split"] == split:
            last[line["step"], line["split"]] = line
    return [last[key] for key in sorted(last, key=lambda key: (key[0], key[1] != "train", key[1]))]


def read_events(run_dir: str | os.PathLike[str], event: str | None = None) -> list[dict[str, Any]]:
    """The events of a run, in the order in which they were written; only those named `event`, if given."""
    lines = read_lines(epath.Path(run_dir) / EVENTS_FILE)
    return [line for line in lines if event is None or line["event"] == event]
