"""`python -m jtrain.cli.drill_worker PLAN CONFIG [--flags]`: `jtrain train`, with a ledger of rows and planned faults.

PLAN is the path of a JSON file: `ledger`, a folder; and `strikes`, one for each start: which process (`rank`) sends
itself which `signal`, before which `update`, once which step is `durable`. It comes from within, so that it comes at
that update however fast the run is; to the run it makes no difference.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from jtrain import tasks
from jtrain.checkpoint.layout import checkpoints_root, finished_steps
from jtrain.cli import args as arguments
from jtrain.cli import main, train
from jtrain.observe.jsonlines import JsonLines, read_lines
from jtrain.progress import ATTEMPT
from jtrain.train.callbacks import Callback
from jtrain.train.row_ledger import RowLedger
from jtrain.train.trainer import Trainer

STRIKES_FILE = "strikes.jsonl"
"""In the ledger's folder: the strikes that were made, each with its `time`."""
DURABLE_SECONDS = 120.0
"""So long a strike waits for the step that shall be durable."""


class Strike(Callback):
    """Sends this process a signal before an update.

    Args:
      ledger: the folder of the ledger.
      plan: the strike.
    """

    def __init__(self, ledger: str, plan: dict[str, Any]):
        self._lines, self._plan = JsonLines(Path(ledger) / STRIKES_FILE), plan
        self._due = True

    def on_step_start(self, trainer: Trainer, step: int) -> None:
        if self._due and step >= self._plan["update"]:
            self._due = False
            self._wait_for_durable(trainer)
            self._lines.append(self._plan | {"attempt": int(os.environ[ATTEMPT]), "time": time.time()})
            os.kill(os.getpid(), signal.Signals[self._plan["signal"]])

    def _wait_for_durable(self, trainer: Trainer) -> None:
        root, deadline = checkpoints_root(trainer.config.run_dir), time.monotonic() + DURABLE_SECONDS
        while max(finished_steps(root), default=0) < self._plan["durable"] and time.monotonic() < deadline:
            time.sleep(0.02)


def run(args: list[str]) -> int:
    """Trains, and returns the exit code."""
    import jax

    plan = json.loads(Path(args[0]).read_text(encoding="utf-8"))

    def watched(trainer: Trainer) -> None:
        made = len(list(read_lines(Path(plan["ledger"]) / STRIKES_FILE)))
        for strike in plan["strikes"][made : made + 1]:
            if strike["rank"] == jax.process_index():
                trainer.callbacks.callbacks.append(Strike(plan["ledger"], strike))
        RowLedger(plan["ledger"]).attach(trainer)

    config = arguments.parse_config(args[1:], train.USAGE, optional=False)
    return train.start(config, functools.partial(tasks.run, watched=watched))


if __name__ == "__main__":
    sys.exit(main.main(run=run))
