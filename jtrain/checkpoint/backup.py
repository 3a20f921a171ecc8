"""A second place for the checkpoints of a run: a copy of each durable step, made in the background, and brought back.

Process 0 copies, since the run directory is one that all processes share. The place is laid out as a run directory is
(`checkpoints/<step>/…`, the manifest as the last object; config.yaml, metrics and RUN/model beside it), so that every
verb that takes a run takes it too. What fails there is told of, counted and tried again at the next step; it never ends
the training.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from etils import epath

from jtrain import progress
from jtrain.checkpoint import files, layout, peers
from jtrain.checkpoint.failures import describe, unpack
from jtrain.checkpoint.layout import IDENTITY
from jtrain.checkpoint.manifest import DamagedCheckpoint, Manifest, read_manifest, write_manifest
from jtrain.checkpoint.retention import Mode, remove_step, surplus_steps
from jtrain.checkpoint.run_dir import RunDir
from jtrain.checkpoint.transfer import Abandoned, Transfer
from jtrain.errors import CheckpointError, ConfigError, JtrainError, StorageError

log = logging.getLogger(__name__)
OnEvent = Callable[..., None]

BESIDE = ("config.yaml", "metrics.jsonl", "events.jsonl", "model")
"""What is copied with each step from beside the checkpoints; brought back where the run directory has none of it."""
TURN_SECONDS = 5.0
CLOSE_SECONDS = 10.0
STALL_SECONDS = 120.0
"""Whoever waits for a copy that has not moved for so long gives up on it."""
_FETCH_TIMEOUT_SECONDS = 6 * 3600.0


@dataclasses.dataclass(frozen=True)
class Kept:
    """Which steps stay; as in `Checkpoints`."""

    limit: int | None = None
    keep_best: int = 1
    best_metric: str | None = None
    best_mode: Mode = "min"


class Backup:
    """The second place of one run. Every process makes one (`open_backup`) and calls it alike.

    Args:
      place: folder or URL.
      run_dir: the run directory.

    Attributes:
      run_id: of the run whose place it is; that of the run directory, too.
    """

    def __init__(self, place: epath.Path, run_dir: epath.Path):
        self.place, self.run_dir, self.run_id = place, run_dir, ""
        self._root, self._local = layout.checkpoints_root(place), layout.checkpoints_root(run_dir)
        self._kept = Kept()
        self._emit: OnEvent | None = None
        self._unsaid: list[tuple[str, dict[str, Any]]] = []
        self._check_lease: Callable[[], None] = lambda: None
        self._condition = threading.Condition()
        self._waiting: dict[int, Manifest] = {}
        self._copying: int | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._moved_at = time.monotonic()
        self._failures = 0
        self._gave_up = False
        self._swept = False
        self._base: int | None = None  # the step that this run went on from
        self._line: set[int] = set()  # steps that this run copied
        self._manifests: dict[int, Manifest] = {}

    # What is there

    def steps(self) -> list[int]:
        """Steps that are complete in the second place; process 0 looks for all."""
        return layout.finished_steps(self._root)

    # Copying

    def start(self, emit: OnEvent, kept: Kept | None = None, check_lease: Callable[[], None] = lambda: None) -> None:
        """Says who is told of what happens, what stays there, and what raises `ConfigError` once the run is fenced off.

        It may be called again; what was not said yet is said then.
        """
        self._emit, self._kept, self._check_lease = emit, kept or self._kept, check_lease
        for kind, fields in self._unsaid:
            self._tell(kind, **fields)
        self._unsaid.clear()

    def goes_on_from(self, step: int) -> None:
        """Takes note that the run was restored from `step`: later steps that it did not make are set aside."""
        with self._condition:
            self._base = step
            self._line = {own for own in self._line if own <= step}
        if peers.index() == 0:
            try:  # a run that was cut off between a save and its copy
                self.offer(read_manifest(self._local / str(step)))
            except (OSError, CheckpointError) as error:
                log.warning("step %s can't be copied to %s: %s", step, self.place, error)

    def offer(self, manifest: Manifest) -> None:
        """A step is durable: it is copied when its turn comes, the newest first. Returns at once. Process 0."""
        with self._condition:
            if self._over.is_set():
                return
            self._waiting[manifest.step] = manifest
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="checkpoint-backup", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def needs(self, step: int) -> bool:
        """Whether a step is being copied just now, and has to stay where it is."""
        return self._copying == step

    def wait(self, seconds: float | None) -> bool:
        """Waits for what is left to copy, for a moment; again and again.

        Args:
          seconds: that are left to wait in all; None: as many as it takes, while it moves.

        Returns:
          Whether there is nothing more to wait for.
        """
        with self._condition:
            self._condition.wait_for(lambda: not self._busy(), TURN_SECONDS if seconds is None else min(seconds, 1.0))
            if not self._busy():
                return True
            stuck = time.monotonic() - self._moved_at > STALL_SECONDS
            if stuck:
                log.warning("the copy to %s has not moved for %.0f s: given up", self.place, STALL_SECONDS)
            self._gave_up = stuck or (seconds is not None and seconds <= 0)
            return self._gave_up

    def close(self) -> None:
        """Gives up what is not copied in a few seconds; the local step stays, and the next start copies it."""
        with self._condition:
            if not self._gave_up:
                self._condition.wait_for(lambda: not self._busy(), CLOSE_SECONDS)
            left = sorted({*self._waiting} | ({self._copying} if self._copying is not None else set()))
            self._over.set()
            self._condition.notify_all()
        if left:
            log.warning("step %s is not copied to %s yet: the next start does it", left[-1], self.place)
        if self._thread is not None:
            self._thread.join(5.0)

    def _busy(self) -> bool:
        return not self._over.is_set() and (bool(self._waiting) or self._copying is not None)

    def _moved(self, count: int) -> None:
        self._moved_at = time.monotonic()

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._over.is_set())
                if self._over.is_set():
                    return
                step = max(self._waiting)
                manifest = self._waiting.pop(step)
                self._copying, self._moved_at = step, time.monotonic()
            try:
                self._copy(manifest)
                self._failures = 0
            except Abandoned:
                return
            except ConfigError as error:  # another run has the directory now: the place is its own, too
                log.warning("nothing more is copied to %s: %s", self.place, error.message)
                self._over.set()
                return
            except Exception as error:  # whatever a store raises; training goes on
                self._failures += 1
                text = error.message if isinstance(error, JtrainError) else f"{type(error).__name__}: {error}"
                log.warning("step %s was not copied to %s: %s", step, self.place, text)
                self._tell("backup_failed", step=step, to=str(self.place), reason=text, failures=self._failures)
            finally:
                with self._condition:
                    self._copying = None
                    self._condition.notify_all()

    def _tell(self, kind: str, **fields: Any) -> None:
        if self._emit is None:
            self._unsaid.append((kind, fields))
            return
        try:
            self._emit(kind, **fields)
        except Exception:  # events.jsonl can't be written
            log.exception("%s of %s", kind, self.place)

    def _copy(self, manifest: Manifest) -> None:
        self._check_lease()
        step, began = manifest.step, time.monotonic()
        source, target = self._local / str(step), self._root / str(step)
        if not source.exists():  # a newer one was durable before its turn came
            return
        self._sweep()
        self._set_aside()
        metrics = self._metrics()
        if step in metrics or step in self._surplus(metrics | {step: self._metric(manifest)}):
            return
        transfer = Transfer(source, target, self._over, self._moved)
        try:
            transfer.run(manifest.files)
            files.sync_tree(target)
            self._check_lease()
            write_manifest(target, manifest)
            self._line.add(step)
            self._manifests[step] = manifest
        except BaseException:
            if not self._over.is_set() and step not in self._line:
                self._try(files.remove_tree, target)
            raise
        self._copy_beside()
        self._retain()
        seconds = time.monotonic() - began
        fields = {"seconds": seconds, "bytes": manifest.size, "retries": transfer.retries}
        self._tell("backed_up", step=step, to=str(self.place), **fields)

    def _copy_beside(self) -> None:
        for name in BESIDE:
            self._try(_copy_over, self.run_dir / name, self.place / name)

    def _sweep(self) -> None:
        """Once: removes what a copy that was cut off left. `open_backup` has seen that the place is this run's."""
        if not self._swept:
            files.remove_tree(self._root / layout.TRASH)
            for folder in layout.unfinished_steps(self._root):
                files.remove_tree(folder)
            self._swept = True

    def _set_aside(self) -> None:
        """Steps of a line that the run went back from would be taken for the newest."""
        if self._base is None:
            return
        for step in self.steps():
            if step > self._base and step not in self._line:
                aside = layout.unused_path(self._root / layout.SUPERSEDED, str(step))
                files.move(self._root / str(step), aside)
                self._manifests.pop(step, None)

    def _retain(self) -> None:
        for step in self._surplus(self._metrics()):
            self._manifests.pop(step, None)
            remove_step(self._root, str(step))

    def _surplus(self, metrics: dict[int, float | None]) -> list[int]:
        return surplus_steps(metrics, self._kept.limit, self._kept.keep_best, self._kept.best_mode)

    def _metrics(self) -> dict[int, float | None]:
        metrics = {}
        for step in self.steps():
            try:
                self._manifests[step] = self._manifests.get(step) or read_manifest(self._root / str(step))
            except (CheckpointError, FileNotFoundError):
                continue  # damaged: neither counted nor removed
            metrics[step] = self._metric(self._manifests[step])
        return metrics

    def _metric(self, manifest: Manifest) -> float | None:
        return manifest.metrics.get(self._kept.best_metric) if self._kept.best_metric else None

    def _try(self, action: Callable[..., None], *paths: epath.Path) -> None:
        try:
            action(*paths)
        except Exception as error:
            log.warning("%s: %s: %s", self.place, type(error).__name__, error)

    # Bringing back

    def check_fresh(self) -> None:
        """Sees that nothing is there, for a run that is to begin anew.

        Raises:
          ConfigError: something is.
        """
        there = self.steps() if peers.index() == 0 else None
        if there := peers.exchange("backup_fresh", there)[0]:
            raise ConfigError(
                f"checkpoint.resume is never, but checkpoint.backup={str(self.place)!r} holds the steps {there}",
                "give another place, or write checkpoint.resume: auto",
            )

    def bring_back(self, wanted: int | None = None) -> int | None:
        """Fetches the newest step, or `wanted`, where the run directory has none that is as new.

        Returns:
          The step that is now in the run directory, verified; None: nothing had to be fetched.

        Raises:
          CheckpointError: the run directory has no step, and every one in the second place is damaged.
          StorageError: the run directory has no step, and the second place can't be read; or the disk is full.
        """
        here, candidates, failure = [], [], None
        if peers.index() == 0:
            here = layout.finished_steps(self._local)
            try:
                there = self.steps()
                candidates = [s for s in there if (s > max(here, default=-1) if wanted is None else s == wanted)]
            except Exception as error:
                failure = self._unreachable(error, bool(here))
        here, candidates, failure = peers.exchange("backup_candidates", [here, candidates, failure])[0]
        self._raise(failure)
        if wanted in here:
            return None
        damaged: DamagedCheckpoint | None = None
        for step in reversed(candidates):
            try:
                self.fetch(step, "the run directory holds " + (f"step {here[-1]}" if here else "no checkpoint"))
                return step
            except DamagedCheckpoint as error:
                log.error("%s: %s", self._root, error.message)
                damaged = damaged or error
        if damaged is not None and not here:
            raise CheckpointError(
                f"{self.run_dir} holds no checkpoint, and none of {candidates} in {self.place} is intact; the newest: "
                f"{damaged.message}",
                "bring one back from another copy, or start a new run in another run_dir without this backup",
            )
        return None

    def fetch(self, step: int, why: str, replaced: Callable[[], None] = lambda: None) -> None:
        """Copies a step into the run directory, each process a share of its files; it is there when it is whole.

        Args:
          step: complete in the second place.
          why: told with it.
          replaced: called by process 0 when the copy is whole, before it takes its place.

        Raises:
          DamagedCheckpoint: the copy is not what was saved; nothing has changed.
          StorageError: the disk is full, or the second place can't be read.
        """
        began, failure, manifest = time.monotonic(), None, None
        target = self._local / layout.FETCHED / str(step)
        try:
            manifest = read_manifest(self._root / str(step))
            if peers.index() == 0:
                files.remove_tree(target)
                target.mkdir(parents=True, exist_ok=True)
                free = files.free_bytes(target)
                if free is not None and free < manifest.size:
                    raise files.storage_error(self._local, errno.ENOSPC, f"step {step} can't be brought back")
            names = sorted(manifest.files)[peers.index() :: peers.count()]
            transfer = Transfer(self._root / str(step), target, self._over, lambda count: progress.report())
            transfer.run({name: manifest.files[name] for name in names})
        except Exception as error:
            failure = self._packed(error)
        answers = peers.exchange("backup_fetched", failure, _FETCH_TIMEOUT_SECONDS)
        failure = next((answer for answer in answers if answer is not None), None)
        if failure is None and peers.index() == 0 and manifest is not None:
            try:
                files.sync_tree(target)
                write_manifest(target, manifest)
                replaced()
                files.move(target, self._local / str(step))
                self._bring_beside()
            except Exception as error:
                failure = self._packed(error)
        if failure is not None and peers.index() == 0:
            files.remove_tree(self._local / layout.FETCHED)
        self._raise(peers.exchange("backup_placed", failure)[0])
        assert manifest is not None
        seconds = time.monotonic() - began
        log.warning(
            "step %s was brought back from %s (%.1f MiB, %.1f s): %s",
            step, self.place, manifest.size / 2**20, seconds, why,
        )  # fmt: skip
        fields = {"seconds": seconds, "bytes": manifest.size, "reason": why}
        self._tell("backup_restored", step=step, source=str(self.place), **fields)

    def _bring_beside(self) -> None:
        for name in BESIDE:
            if not (self.run_dir / name).exists():
                self._try(_copy_over, self.place / name, self.run_dir / name)

    def _packed(self, error: Exception) -> dict[str, Any]:
        """A failure for all processes; a store's own classes of errors are a matter of storage."""
        if isinstance(error, DamagedCheckpoint):
            return {"damaged": [error.step, error.file, error.reason]}
        if isinstance(error, CheckpointError):  # of a newer jtrain
            return {"checkpoint": [error.message, error.remedy]}
        if isinstance(error, OSError | JtrainError):
            return describe(error, self.place, "can't be read").pack()
        return describe(self._storage_error(error), self.place, "can't be read").pack()

    def _storage_error(self, error: Exception) -> StorageError:
        return StorageError(
            f"{self.place} can't be reached: {type(error).__name__}: {error}",
            "see that checkpoint.backup and its credentials are right, or leave it out",
        )

    def _unreachable(self, error: Exception, has_steps: bool) -> dict[str, Any] | None:
        if has_steps:
            log.warning("%s", self._storage_error(error).message)
            return None
        return describe(self._storage_error(error), self.place, "can't be listed").pack()

    def _raise(self, failure: dict[str, Any] | None) -> None:
        if failure is None:
            return
        if "damaged" in failure:
            raise DamagedCheckpoint(*failure["damaged"])
        if "checkpoint" in failure:
            raise CheckpointError(*failure["checkpoint"])
        found = unpack(failure)
        assert found is not None
        raise found.error()


def open_backup(place: epath.PathLike | None, run: RunDir) -> Backup | None:
    """The second place of a run; None where it has none. Every process calls it, before anything is restored.

    Raises:
      ConfigError: it is the run directory or lies in it, or holds another run's checkpoints.
      StorageError: it can't be reached, and the run directory holds no checkpoint.
    """
    if place is None:
        return None
    backup = Backup(layout.run_path(place), run.path)
    failure, run_id = None, run.run_id
    if peers.index() == 0:
        has_steps = bool(layout.finished_steps(layout.checkpoints_root(run.path)))
        try:
            run_id = _identify(backup.place, run, has_steps)
        except ConfigError as error:
            failure = describe(error, backup.place, "can't be opened").pack()
        except Exception as error:
            failure = backup._unreachable(error, has_steps)
    failure, backup.run_id = peers.exchange("backup_identity", [failure, run_id])[0]
    backup._raise(failure)
    return backup


def _identify(place: epath.Path, run: RunDir, has_steps: bool) -> str:
    """Sees that the place is this run's, and marks it. A run directory that is new takes its identity from there.

    Returns:
      The identity.
    """
    identity = place / IDENTITY
    if os.fspath(place) == os.fspath(run.path) or run.path in place.parents or place in run.path.parents:
        raise ConfigError(
            f"checkpoint.backup={str(place)!r} and run_dir={str(run.path)!r} lie in each other",
            "give a place that outlives the run directory",
        )
    if not identity.exists():
        if layout.any_step(layout.checkpoints_root(place)):
            raise ConfigError(
                f"checkpoint.backup={str(place)!r} holds checkpoints that are no copies of a run",
                "give another place, which need not exist",
            )
        if files.is_local(place):
            files.make_folder(place)
        files.write_atomic(identity, (run.path / IDENTITY).read_bytes())
        return run.run_id
    known = str(json.loads(identity.read_text())["run_id"])
    if known == run.run_id:
        return known
    if has_steps:
        raise ConfigError(
            f"checkpoint.backup={str(place)!r} holds the copies of another run ({known[:8]}, this one is "
            f"{run.run_id[:8]})",
            "give a place of its own to each run",
        )
    files.write_atomic(run.path / IDENTITY, identity.read_bytes())
    return known


def _copy_over(source: epath.Path, target: epath.Path) -> None:
    """A file, or the files of a folder; absent is fine. A file is replaced whole."""
    if source.is_dir():
        if files.is_local(target):
            target.mkdir(parents=True, exist_ok=True)
        for name in files.walk(source):
            _copy_over(source / name, target / name)
    elif source.exists():
        if files.is_local(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(target, source.read_bytes())
