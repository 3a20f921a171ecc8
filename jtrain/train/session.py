"""A run's directory while it is open: lease, logs, trackers, checkpoints, and what may change on resume."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import time
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

import jtrain
from jtrain import progress
from jtrain.checkpoint import peers
from jtrain.checkpoint.backup import Backup, open_backup
from jtrain.checkpoint.checkpoints import Checkpoints
from jtrain.checkpoint.lease import RunLease
from jtrain.checkpoint.manifest import DamagedCheckpoint
from jtrain.checkpoint.run_dir import open_run_dir
from jtrain.config.differences import Difference, differences, may_be_filled_in
from jtrain.config.export import to_dict, to_yaml
from jtrain.config.schema import Config
from jtrain.errors import CheckpointError, ConfigError, PeerLostError
from jtrain.observe.console import Console
from jtrain.observe.goodput import Past, read_past
from jtrain.observe.metrics import Events, MetricsLog, read_events
from jtrain.observe.trackers import Trackers
from jtrain.parallel.processes import agree, is_main
from jtrain.train.preemption import STOP_FILE
from jtrain.train.rollback import EVENT as ROLLBACK
from jtrain.train.rollback import windows_of
from jtrain.train.timetable import Timetable

log = logging.getLogger(__name__)

_OPTIONAL = ("across", "numbers")
"""Parts of the state that a config may ask for, or no longer, in the middle of a run."""


class Session:
    """Everything of a run that lies on disk or on the screen. Files are written by process 0 alone.

    Args:
      config: the run's.
      timetable: when things are due.

    Attributes:
      past: what earlier starts of the run did with their time; known to process 0.
      rollbacks: batches that earlier starts left out when they went back, as `jtrain.train.rollback` lists them.
      ended: the step at which the run was last complete; None: it never was.
    """

    def __init__(self, config: Config, timetable: Timetable):
        self.config, self.timetable = config, timetable
        self.dry = bool(config.fast_dev_run)
        self.last_save_step: int | None = None
        self.past = Past()
        self.rollbacks: list[list[int]] = []
        self.ended: int | None = None
        self._last_save = time.monotonic()
        self.checkpoints: Checkpoints | None = None
        self._lease: RunLease | None = None
        self._metrics: MetricsLog | None = None
        self._events: Events | None = None
        self._trackers: Trackers | None = None
        self.console = Console(timetable.max_steps, process=jax.process_index(), level=config.logging.level)
        if self.dry:
            return
        try:
            self._open(config)
        except BaseException:
            self.close()
            raise

    def _open(self, config: Config) -> None:
        run = open_run_dir(config.run_dir)
        _check_stop(run.path)
        backup = open_backup(config.checkpoint.backup, run)
        self._lease = RunLease(run.path, run.run_id if backup is None else backup.run_id)
        self._lease.acquire()
        _bring_back(config, backup)
        if is_main():  # the events first: opening the checkpoints may have something to tell
            self._events = Events(run.path)
            events = read_events(run.path)
            self.past, self.rollbacks = read_past(events), windows_of(events)
            ends = [line["step"] for line in events if line["event"] == "end" and "error" not in line]
            self.ended = ends[-1] if ends else None
            if last := os.environ.get(progress.LAST_END):
                self.emit("restart", {"attempt": int(os.environ[progress.ATTEMPT]), "last": json.loads(last)})
            self._metrics = MetricsLog(run.path)
            self._trackers = Trackers(config.logging.trackers, run.path)
        self.rollbacks, self.ended = peers.exchange("history", [self.rollbacks, self.ended])[0]
        section = config.checkpoint
        self.checkpoints = Checkpoints(
            run.path,
            save_total_limit=section.save_total_limit,
            keep_best=section.keep_best,
            best_metric=section.best,
            best_mode=section.best_mode,
            async_save=section.async_save,
            on_event=self.emit,
            lease=self._lease,
            backup=backup,
        )
        _check_fresh(config, self.checkpoints)

    def due(self, step: int) -> bool:
        """Whether anything that needs the state waits for update `step`."""
        return self.timetable.due(step) or self._time_to_save(step)

    def saves(self, step: int) -> bool:
        """Whether a save is due after update `step`."""
        return self.timetable.saves(step) or self._time_to_save(step)

    def _time_to_save(self, step: int) -> bool:
        """`checkpoint.save_minutes`, looked at at log points: process 0's clock decides for all."""
        seconds = self.timetable.save_seconds
        if seconds is None or not self.timetable.logs(step):
            return False
        return bool(agree(time.monotonic() - self._last_save >= seconds))

    def saved(self, step: int) -> None:
        """Takes note that a save of `step` began (or that `step` was restored)."""
        self._last_save, self.last_save_step = time.monotonic(), step

    def write_config(self) -> None:
        """Writes config.yaml, once it is known that this run may go on in this directory."""
        if not self.dry and is_main():
            (epath.Path(self.config.run_dir) / "config.yaml").write_text(to_yaml(self.config))

    def resumes(self) -> bool:
        """Whether `checkpoint.resume` asks for a checkpoint; all processes answer alike."""
        wanted = self.config.checkpoint.resume
        if self.checkpoints is None or wanted == "never":
            return False
        return wanted != "auto" or self.checkpoints.durable_step is not None

    def restore(self, abstract: Any, fingerprint: str | None = None) -> tuple[Any, dict[str, Any]]:
        """The state and JSON that `checkpoint.resume` asks for, where it `resumes`.

        Args:
          abstract: the state's shapes and places.
          fingerprint: of the training rows; None: not known.

        Returns:
          The state and the JSON. Parts of `across` and `numbers` that the checkpoint has not, or not of this shape, are
          still shapes.

        Raises:
          ConfigError: the checkpoint is another run's (its config differs where it must not).
          CheckpointError: no such step, or none is intact.
        """
        assert self.checkpoints is not None
        wanted = self.config.checkpoint.resume
        step = None if wanted == "auto" else int(wanted)
        for candidate in reversed(self.checkpoints.steps()) if step is None else [step]:
            with contextlib.suppress(DamagedCheckpoint):  # restore deals with it
                self._check_resume(self.checkpoints.read_meta(candidate), fingerprint)
                break
        state, meta, step = self.checkpoints.restore(abstract, step, optional=_OPTIONAL)
        self.saved(step)
        self.emit("resume", {"step": step})
        self.console.resume(step)
        self.console.message(f"resumed from step {step} of {self.config.run_dir}")
        return state, meta

    def own_steps(self) -> list[int]:
        """Durable steps that the run may go back to, in order; the same on all processes."""
        return [] if self.checkpoints is None else self.checkpoints.own_steps()

    def go_back(self, abstract: Any, steps: list[int]) -> tuple[Any, dict[str, Any]]:
        """The state and JSON of the newest intact one of these steps; see `restore`."""
        assert self.checkpoints is not None
        state, meta, step = self.checkpoints.restore(abstract, among=steps, optional=_OPTIONAL)
        self.saved(step)
        self.console.resume(step)
        return state, meta

    def _check_resume(self, meta: dict[str, Any], fingerprint: str | None) -> None:
        for difference in resumable(meta, self.config, fingerprint):
            self.console.message(f"changed on resume: {difference}")

    def emit(self, event: str, fields: dict[str, Any] | None = None) -> None:
        """Writes a line of events.jsonl; a supervisor hears of the newest durable step."""
        if event in ("durable", "resume", ROLLBACK):
            step = (fields or {})["step"]
            progress.report(durable=step, step=None if event == "durable" else step)
        if self._events is not None and not self._taken_over:
            self._events.emit(event, **(fields or {}))

    def log(self, step: int, split: str, values: dict[str, Any]) -> None:
        """Writes figures to metrics.jsonl, to the trackers and to the console."""
        if self._metrics is not None and not self._taken_over:
            self._metrics.log(step, split, values)
        if self._trackers is not None and not self._taken_over:
            self._trackers.log(step, split, values)
        (self.console.train if split == "train" else self.console.evaluate)(step, values)

    def sample(self, step: int, number: int, fields: dict[str, str]) -> None:
        """Writes what a model answered to events.jsonl, to the trackers and to the console.

        Args:
          step: of the model.
          number: of the prompt.
          fields: prompt, completion and reference.
        """
        lines = [f"{name}: {text}" for name, text in fields.items()]
        self.emit("sample", {"step": step, "number": number, **fields})
        if self._trackers is not None and not self._taken_over:
            self._trackers.log_text(step, f"samples/{number}", "\n\n".join(lines))
        self.console.message("\n".join([f"--- sample {number}, step {step}", *lines, "---"]))

    def wait(self) -> None:
        """Waits until the last save is durable."""
        if self.checkpoints is not None:
            self.checkpoints.wait()

    def wait_for_backup(self, seconds_left: Callable[[], float | None]) -> None:
        """Waits for the copy of the last step; `seconds_left` says for how long, None: as long as it moves."""
        if self.checkpoints is not None:
            self.checkpoints.wait_for_backup(seconds_left)

    def close(self) -> None:
        """Ends everything; a save that is under way is finished first."""
        try:
            if self.checkpoints is not None and not self._taken_over:
                self.checkpoints.close()
        finally:
            for part in (*(() if self._taken_over else (self._trackers, self._metrics, self._events)), self.console):
                if part is not None:
                    part.close()
            if self._lease is not None:
                self._lease.release()

    @property
    def _taken_over(self) -> bool:
        """Whether the directory is another run's by now: nothing more is written to it."""
        return self._lease is not None and self._lease.lost

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, PeerLostError):
            self.checkpoints = None  # a save that is under way can't end without the peer
        self.close()


def check_run_dir(config: Config) -> None:
    """Sees, before data is read and a model is built, that the run may go on in its directory.

    What the trainer is to fill in is not looked at: `Session.restore` compares all of it.

    Raises:
      StorageError: it can't be written.
      ConfigError: it is in use, another run's, or holds checkpoints under `checkpoint.resume: never`.
    """
    if config.fast_dev_run:
        return
    run = open_run_dir(config.run_dir)
    _check_stop(run.path)
    backup = open_backup(config.checkpoint.backup, run)
    with RunLease(run.path, run.run_id if backup is None else backup.run_id):
        _bring_back(config, backup)
        checkpoints = Checkpoints(run.path, read_only=True)
        _check_fresh(config, checkpoints)
        for step in reversed(checkpoints.steps()):
            with contextlib.suppress(CheckpointError):  # restore deals with it
                resumable(checkpoints.read_meta(step), config, None, raw=True)
                return


def _check_stop(run_dir: epath.Path) -> None:
    path = run_dir / STOP_FILE
    if peers.exchange("stop_file", path.exists() if peers.index() == 0 else None)[0]:
        raise ConfigError(f"{path} is there: the run was asked to stop", "remove it to go on")


def _bring_back(config: Config, backup: Backup | None) -> None:
    """Fetches the checkpoint that the run goes on from, where only the second place has it."""
    wanted = config.checkpoint.resume
    if backup is None:
        return
    if wanted == "never":
        backup.check_fresh()
    elif backup.bring_back(None if wanted == "auto" else int(wanted)) is not None and is_main():
        with contextlib.closing(Events(backup.run_dir)) as events:
            backup.start(events.emit)


def _check_fresh(config: Config, checkpoints: Checkpoints) -> None:
    if config.checkpoint.resume == "never" and checkpoints.steps():
        raise ConfigError(
            f"checkpoint.resume is never, but run_dir={config.run_dir!r} holds checkpoints",
            "give another run_dir, or write checkpoint.resume: auto",
        )


def resumable(meta: dict[str, Any], config: Config, fingerprint: str | None, *, raw: bool = False) -> list[Difference]:
    """What differs between a checkpoint and the run that goes on from it, all of it harmless.

    Args:
      meta: the checkpoint's JSON.
      config: the run's.
      fingerprint: of the training rows; None: not known.
      raw: whether no trainer has seen the config yet: what it fills in may differ.

    Raises:
      ConfigError: a difference that would make it another run.
    """
    if "config" not in meta:
        raise ConfigError(
            f"run_dir={config.run_dir!r} is what jtrain import made, and no run",
            f"give another run_dir; to begin with its weights, write model.path: {config.run_dir}",
        )
    harmless, refused = differences(meta["config"], config)
    if raw:
        refused = [difference for difference in refused if not may_be_filled_in(difference)]
    before = meta.get("data")
    if not refused and before is not None and fingerprint is not None and before != fingerprint:
        refused = [Difference("fingerprint of the training data", before, fingerprint)]
    platform = random_platform()
    for name, value in meta["random"].items():
        now = platform.get(name)
        if now != value:
            raise ConfigError(
                f"the checkpoint's random numbers were drawn with {name}={value!r}, now it is {now!r}",
                "set it as it was, or start a new run with --checkpoint.init_from",
            )
    if (version := meta.get("versions", {}).get("jax", jax.__version__)) != jax.__version__:
        harmless.append(Difference("the version of jax", version, jax.__version__))
    if refused:
        lines = "\n".join(f"  {difference}" for difference in refused)
        raise ConfigError(
            f"run_dir={config.run_dir!r} belongs to a run with another config:\n{lines}",
            "give another run_dir; or start a new run from its parameters with --checkpoint.init_from",
        )
    return harmless


def random_platform() -> dict[str, Any]:
    """What decides the bits of a draw, beside the key."""
    return {
        "prng": jax.config.jax_default_prng_impl,
        "threefry_partitionable": jax.config.jax_threefry_partitionable,
    }


@dataclasses.dataclass
class Counters:
    """Counts since the start of the run, as Python integers; they live in the checkpoint's JSON.

    Attributes:
      step: optimizer updates applied.
      skipped: batches that no update was made of.
      tokens: tokens without padding, of all batches used.
      examples: rows of all batches used.
      skips_in_a_row: steps skipped since the last update.
      owes_evaluation: a preemption came before the evaluation that was due after `step`.
    """

    step: int = 0
    skipped: int = 0
    tokens: int = 0
    examples: int = 0
    skips_in_a_row: int = 0
    owes_evaluation: bool = False

    @property
    def batches(self) -> int:
        """Batches used so far: the number of the next one."""
        return self.step + self.skipped

    def meta(self, config: Config, callbacks: dict[str, Any], fingerprint: str | None) -> dict[str, Any]:
        """The JSON beside the arrays of a checkpoint."""
        return {
            "counters": dataclasses.asdict(self),
            "callbacks": callbacks,
            "config": to_dict(config),
            "random": random_platform(),
            "data": fingerprint,
            "versions": {"jtrain": jtrain.__version__, "jax": jax.__version__},
        }
