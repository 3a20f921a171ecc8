"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere.

Only process 0 prints; errors and warnings of the others reach the console with their process's number.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from jtrain.redaction import redact_text

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def train_line(step: int, total: int, values: Mapping[str, Any]) -> str:
    """The line of a training step; figures that are unknown are left out.

    `step 120/300 | loss 2.3451 | lr 2.91e-04 | grad_norm 0.84 | 18.2k tok/s | mfu 41.3% | mem 61.0 GiB | data 0.4 ms`

    Args:
      step: updates applied so far.
      total: updates of the run.
      values: figures by their names in metrics.jsonl.
    """
    columns = (
        ("loss", lambda v: f"loss {v:.4f}"),
        ("learning_rate", lambda v: f"lr {v:.2e}"),
        ("grad_norm", lambda v: f"grad_norm {v:.2f}"),
        ("tokens_per_second", lambda v: f"{short(v)} tok/s"),
        ("mfu", lambda v: f"mfu {100 * v:.1f}%"),
        ("memory_gib", lambda v: f"mem {v:.1f} GiB"),
        ("data_wait_seconds", lambda v: f"data {1000 * v:.1f} ms"),
        ("skipped_steps", lambda v: f"skipped {v}" if v else None),
    )
    parts = [show(values[name]) for name, show in columns if values.get(name) is not None]
    return " | ".join([f"step {step}/{total}", *(part for part in parts if part)])


def eval_line(step: int, total: int, values: Mapping[str, Any]) -> str:
    """The line of an evaluation: `eval 100/300 | eval_loss 2.3451 | perplexity 10.43 | bits_per_byte 1.87`."""
    parts = [f"{name} {value:.4g}" if name != "eval_loss" else f"{name} {value:.4f}" for name, value in _known(values)]
    return " | ".join([f"eval {step}/{total}", *parts])


def short(number: float) -> str:
    """A number in three digits: 950, 18.2k, 1.25M, 3.10G."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            scaled = number / limit
            return f"{scaled:.2f}{unit}" if unit != "k" else f"{scaled:.1f}{unit}"
    return f"{number:.0f}"


def _known(values: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(name, value) for name, value in values.items() if isinstance(value, (int, float))]


class Console:
    """Prints a run.

    Args:
      total: optimizer steps of the run.
      process: number of this process; of the others than 0 only warnings and errors are printed.
      level: `debug | info | warning | error`: the least that is printed. Steps and evaluations are info.
      file: where to print; standard output by default. A terminal gets the bar.
    """

    def __init__(self, total: int, *, process: int = 0, level: str = "info", file: TextIO | None = None):
        self._file = sys.stdout if file is None else file
        self._total = total
        self._process = process
        self._level = LEVELS[level]
        self._lock = threading.RLock()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._handler = _Handler(self)
        self._rate = ""
        rich = RichConsole(file=self._file)
        if process == 0 and rich.is_terminal and self._level <= logging.INFO:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=rich,
            )
            self._task = self._progress.add_task("step", total=total, rate="")
            self._progress.start()
        logger = logging.getLogger("jtrain")
        logger.addHandler(self._handler)
        logger.setLevel(self._level)
        logger.propagate = False

    def advance(self, step: int) -> None:
        """Moves the bar; cheap enough for every step."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, rate=self._rate)

    def resume(self, step: int) -> None:
        """Steps up to `step` were made before: the time left is not judged by them."""
        if self._progress is not None and self._task is not None:
            self._progress.reset(self._task, completed=step)

    def train(self, step: int, values: Mapping[str, Any]) -> None:
        """Prints the line of a training step."""
        if values.get("tokens_per_second") is not None:
            self._rate = f"{short(values['tokens_per_second'])} tok/s"
        self.message(train_line(step, self._total, values))

    def evaluate(self, step: int, values: Mapping[str, Any]) -> None:
        """Prints the line of an evaluation."""
        self.message(eval_line(step, self._total, values))

    def message(self, text: str, level: str = "info") -> None:
        """Prints `text` without secrets, above the bar where there is one; `level` as in `logging.level`."""
        number = LEVELS[level]
        if number < self._level or (self._process != 0 and number < logging.WARNING):
            return
        text = redact_text(text)
        if number >= logging.WARNING:
            text = f"{level}: {text}"
        if self._process != 0:
            text = f"[process {self._process}] {text}"
        with self._lock:
            if self._progress is not None:
                # Text, not str: rich would read square brackets in a message as markup.
                self._progress.console.print(Text(text), soft_wrap=True)
            else:
                try:
                    print(text, file=self._file, flush=True)
                except BrokenPipeError:
                    raise
                except OSError:  # the disk that the output goes to is full: the run is worth more than its lines
                    pass

    def close(self) -> None:
        """Ends the bar and gives the loggers back. May be called twice."""
        logger = logging.getLogger("jtrain")
        logger.removeHandler(self._handler)
        logger.propagate = True
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Handler(logging.Handler):
    """Sends what jtrain's modules log through the console, so that a line never tears the bar."""

    def __init__(self, console: Console):
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        level = next(name for name, number in reversed(LEVELS.items()) if record.levelno >= number or name == "debug")
        self._console.message(record.getMessage(), level)
