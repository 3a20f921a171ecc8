"""The runs of a rehearsal: `jtrain train CONFIG`, shortened, under the supervisor of `jtrain launch local`."""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jtrain.config import ladder, load_config
from jtrain.config.schema import Config
from jtrain.errors import ConfigError
from jtrain.launch.attempt import Limits, Outcome
from jtrain.launch.gang import Worker
from jtrain.launch.job import Job
from jtrain.launch.local import Local
from jtrain.launch.restarts import Restarts
from jtrain.launch.supervisor import Supervisor

MARK = "_JTRAIN_DRILL"
"""A variable that all processes of a rehearsal have: what is left of them is found by it."""
EVAL_BATCHES = 2
INFRA_RESTARTS = 3
"""In a row; a machine that is short of time may lose a process without our doing."""


@dataclass(frozen=True)
class Plan:
    """How a config is shortened.

    Attributes:
      source, flags: CONFIG and its flags, as they were typed.
      steps: updates, a multiple of four.
      processes: of a run.
    """

    source: str
    flags: tuple[str, ...]
    steps: int
    processes: int = 1

    @property
    def save_steps(self) -> int:
        """Distance of saves and of evaluations."""
        return self.steps // 4

    def shortened(self, run_dir: Path, *more: str) -> list[str]:
        """All flags of a run in `run_dir`; `more` wins."""
        every = str(self.save_steps)
        own = {
            "run_dir": str(run_dir),
            "max_steps": str(self.steps),
            "fast_dev_run": "false",
            "deterministic": "true",  # bits are compared
            "checkpoint.save_steps": every,
            "checkpoint.save_minutes": "null",
            "checkpoint.save_total_limit": "3",
            "checkpoint.resume": "auto",
            "eval.eval_steps": every,
            "eval.max_batches": str(EVAL_BATCHES),
            "eval.early_stopping_patience": "0",
            "eval.num_samples": "0",
            "logging.log_every_n_steps": "1",
            "checkpoint.backup": "null",  # those copies are the real run's
        } | self._lengths()
        lists = ["--eval.metrics=[]", "--eval.sample_prompts=[]", "--logging.trackers=[]"]
        return [*self.flags, *(word for name, value in own.items() for word in (f"--{name}", value)), *lists, *more]

    def _lengths(self) -> dict[str, str]:
        """Lengths of the schedule that are no shares of the run, and may be longer than the rehearsal."""
        schedule = load_config(self.source, self.flags).schedule
        lengths = {name: getattr(schedule, name) for name in ("warmup_steps", "decay_steps")}
        return {
            f"schedule.{name}": str(min(length, self.save_steps) if isinstance(length, int) else self.save_steps)
            for name, length in lengths.items()
            if isinstance(length, int) or (isinstance(length, str) and not length.endswith("%"))
        }


@dataclass(frozen=True)
class _Job(Job):
    """A run of the rehearsal: what its processes do is in the plan."""

    plan: str = ""

    def command(self, python: str, *more: str, source: str | None = None) -> list[str]:
        return [python, "-m", "jtrain.cli.drill_worker", self.plan, source or self.source, *self.flags, *more]


class _Here(Local):
    """This machine; it remembers how each attempt ended."""

    def __init__(self, job: Job, processes: int, mark: str):
        super().__init__(job, processes, processes)
        self._mark = mark
        self.outcomes: list[Outcome] = []

    def workers(self, environment: dict[str, str], stopping: Callable[[], int] = lambda: 0) -> Sequence[Worker]:
        return super().workers(environment | {MARK: self._mark}, stopping)

    def ended(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


@dataclass
class Ran:
    """A run that has ended.

    Attributes:
      code: its exit code.
      outcomes: of its attempts.
      began, seconds: when, in seconds since the epoch, and how long.
      run_dir, ledger, log: where it lies, the rows it read, and what it printed.
    """

    run_dir: Path
    ledger: Path
    log: Path
    code: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    began: float = 0.0
    seconds: float = 0.0

    @property
    def error(self) -> str:
        """Its first error, for a message."""
        first = self.outcomes[-1].first if self.outcomes else None
        return f"exit {self.code}" + ("" if first is None else f": {first}")


def run(
    plan: Plan, folder: Path, name: str, *more: str, strikes: Sequence[dict[str, Any]] = (), run_dir: Path | None = None
) -> Ran:
    """Runs the shortened config to its end, and starts it again after each strike.

    Args:
      plan: what is run.
      folder: of the rehearsal.
      name: of this run: its directory, its ledger and its log.
      *more: further flags.
      strikes: see `jtrain.cli.drill_worker`.
      run_dir: another run's directory, to go on there.

    Raises:
      ConfigError: the flags don't fit.
    """
    ran = Ran(run_dir or folder / name, folder / f"{name}.rows", folder / f"{name}.log")
    ran.ledger.mkdir()
    script = folder / f"{name}.json"
    script.write_text(json.dumps({"ledger": str(ran.ledger), "strikes": list(strikes)}), encoding="utf-8")
    flags = plan.shortened(ran.run_dir, *more)
    job = _Job(plan.source, tuple(flags), load_config(plan.source, flags), str(script))
    platform = _Here(job, plan.processes, str(folder))
    restarts = Restarts(0, INFRA_RESTARTS, seed=job.config.seed)
    ran.began, began = time.time(), time.monotonic()
    with (
        ran.log.open("w", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        ran.code = Supervisor(platform, restarts, Limits(ladder.outer_limits(job.config.faults))).run()
    ran.seconds, ran.outcomes = time.monotonic() - began, platform.outcomes
    return ran


def processes_of(plan: Plan, run_dir: Path) -> int:
    """Two processes where this machine and the config allow it, else one.

    Raises:
      ConfigError: not even one.
    """
    flags = plan.shortened(run_dir)
    job = Job(plan.source, tuple(flags), load_config(plan.source, flags))
    if not _is_tpu(job.config):
        with contextlib.suppress(ConfigError):
            Local(job, 2, 2)
            return 2
    Local(job, 1, 1)
    return 1


def left_processes(folder: Path) -> list[str]:
    """Processes of the rehearsal that are still there: number and name; none where there is no /proc."""
    needle, found = f"{MARK}={folder}\0".encode(), []
    for path in glob.glob("/proc/[0-9]*/environ"):
        process = Path(path).parent
        with contextlib.suppress(OSError):
            if needle in Path(path).read_bytes() and process.name != str(os.getpid()):
                found.append(f"{process.name} ({(process / 'comm').read_text().strip()})")
    return found


def left_files(run_dir: Path) -> list[str]:
    """Files of saves that were cut off, and of steps on their way out."""
    inside = ("_trash", "_fetched", "_saving.*")
    patterns = ["**/*.tmp", "**/*orbax-checkpoint-tmp*", *(f"checkpoints/{folder}/*" for folder in inside)]
    return [str(path.relative_to(run_dir)) for pattern in patterns for path in run_dir.glob(pattern)]


def _is_tpu(config: Config) -> bool:
    """Whether the run would be on TPU chips, which one process of a machine holds."""
    here = glob.glob("/dev/accel*") or importlib.util.find_spec("libtpu") is not None
    return config.accelerator == "tpu" or (config.accelerator == "auto" and bool(here))
