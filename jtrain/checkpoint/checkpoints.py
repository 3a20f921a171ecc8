"""Checkpoints of a run: asynchronous saves that count only when they are durable, and restores that are verified.

A save goes through four hands. `save()` copies the arrays to the host and returns. Orbax' thread writes them into a
folder aside. The finisher (a thread here) waits for that, syncs, hashes every file, writes the manifest and renames the
folder, and only with that the step exists. Then retention removes what is surplus, by rename and then delete.
"""

from __future__ import annotations

import errno
import json
import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from jtrain import progress
from jtrain.checkpoint import arrays, files, layout, peers
from jtrain.checkpoint.backup import Backup, Kept
from jtrain.checkpoint.failures import Failure, describe, unpack
from jtrain.checkpoint.finish import Save, finish
from jtrain.checkpoint.lease import RunLease
from jtrain.checkpoint.manifest import DamagedCheckpoint, Manifest, check_files, read_manifest
from jtrain.checkpoint.retention import Mode, best_steps, remove_step, surplus_steps
from jtrain.checkpoint.run_dir import read_run_id
from jtrain.errors import CheckpointError, ConfigError, StorageError

log = logging.getLogger(__name__)
OnEvent = Callable[[str, dict[str, Any]], None]
_ORBAX_TIMEOUT_SECONDS = 600


class Checkpoints:
    """The checkpoints below RUN/checkpoints. Every process of the run makes one and calls it alike.

    `close()` it (or use `with`) before the program ends: an interpreter that shuts down starts no more threads, and a
    save that is still on its way would be lost.

    Args:
      run_dir: folder or URL; made if it is not there; with several processes one that all of them see.
      save_total_limit: checkpoints kept; None: all. The newest and the best always stay.
      keep_best: how many of the best stay.
      best_metric: name in `metrics` that decides what is best; None: no best is kept.
      best_mode: whether small or large is good.
      async_save: False: `save` returns when the step is durable.
      on_event: called on process 0 with a kind (save, durable, save_failed, corrupt, superseded) and its fields;
        `durable` and `save_failed` come from a background thread.
      max_save_failures: failed saves in a row that are retried at the next save; one more ends the run.
      read_only: leaves everything as it is: nothing is swept or moved away, and `save` is refused.
      lease: what the run holds its directory with. Without it nothing keeps a second run from saving here.
      backup: the second place of the run: `open_backup`.

    Raises:
      StorageError: the folder can't be made, or what a killed run left there can't be cleared.
      ConfigError: its path holds what Orbax takes as a pattern.
    """

    def __init__(
        self,
        run_dir: epath.PathLike,
        *,
        save_total_limit: int | None = 3,
        keep_best: int = 1,
        best_metric: str | None = None,
        best_mode: Mode = "min",
        async_save: bool = True,
        on_event: OnEvent | None = None,
        max_save_failures: int = 3,
        read_only: bool = False,
        lease: RunLease | None = None,
        backup: Backup | None = None,
    ):
        self.run_dir = layout.run_path(run_dir)
        self.root = layout.checkpoints_root(self.run_dir)
        self._limit, self._keep_best, self._best_mode = save_total_limit, keep_best, best_mode
        self._best_metric = best_metric
        self._async_save = async_save
        self._on_event = on_event
        self._max_save_failures = max_save_failures
        self._read_only = read_only
        self._lease = lease
        self._backup = None if read_only else backup
        if self._backup is not None:
            kept = Kept(save_total_limit, keep_best, best_metric, best_mode)
            self._backup.start(self._emit, kept, self._check_lease)
        self._run_id = read_run_id(self.run_dir) if lease is not None else None
        self._orbax: ocp.AsyncCheckpointer | None = None
        self._current: Save | None = None
        self._topic = ""
        self._failures = 0
        self._last_failure: Failure | None = None
        self._own: set[int] = set()  # steps of this run's line: saved or restored here
        self._manifests: dict[int, Manifest] = {}
        if not read_only:
            layout.check_name(self.run_dir)
        if not read_only and peers.index() == 0:
            files.make_folder(self.run_dir)
            try:
                self._sweep()
            except OSError as error:
                raise files.storage_error(self.root, error.errno or errno.EIO, "can't be cleared") from error
        found = peers.exchange("checkpoint_steps", layout.finished_steps(self.root) if peers.index() == 0 else None)[0]
        self._durable_step: int | None = found[-1] if found else None

    @property
    def durable_step(self) -> int | None:
        """The newest step that survives a crash, or None."""
        return self._durable_step

    def steps(self) -> list[int]:
        """Steps with a manifest, in order."""
        return layout.finished_steps(self.root)

    def own_steps(self) -> list[int]:
        """Steps of this run's line, in order: saved or restored here, or older. Waits for a save that is under way."""
        self._settle(block=True)
        found = peers.exchange("own_steps", layout.finished_steps(self.root) if peers.index() == 0 else None)[0]
        oldest = min(self._own, default=0)
        return [step for step in found if step in self._own or step < oldest]

    def best_steps(self) -> list[int]:
        """The steps that are kept as the best, best first."""
        return best_steps(self._metrics(), self._keep_best, self._best_mode)

    def verify(self, step: int) -> None:
        """Compares every file of a step with its manifest.

        Raises:
          CheckpointError: there is no such step, or (DamagedCheckpoint) it names step, file and reason.
        """
        folder = self._folder(step)
        check_files(folder, read_manifest(folder))

    def read_meta(self, step: int) -> dict[str, Any]:
        """The JSON that was saved beside the arrays.

        Raises:
          CheckpointError: there is no such step, or that file is damaged.
        """
        folder = self._folder(step)
        check_files(folder, read_manifest(folder), [layout.META])
        return json.loads((folder / layout.META).read_text())

    # Saving

    def check_room(self, state: Any) -> None:
        """Sees, before the first update, that a checkpoint can be written; warns when there is no room for all kept.

        Args:
          state: the arrays that will be saved, or their shapes.

        Raises:
          StorageError: the folder can't be written, or not even one fits.
        """
        failure: Failure | None = None
        if peers.index() == 0:
            try:
                probe = layout.saving_path(self.root, 0, self._token).parent
                if probe != self.root:
                    probe.mkdir(parents=True, exist_ok=True)
                    files.remove_tree(probe)
                size = arrays.size_bytes(arrays.flatten(state).values())
                self._check_room(size, "a checkpoint")
                kept, free = self._limit, files.free_bytes(self.run_dir)
                more = 0 if kept is None else kept + 1 - len(self.steps())
                if free is not None and free < more * size:
                    log.warning(
                        "%s: the %s checkpoints that are kept, and one that is being written, need %s bytes more, %s "
                        "are free", self.root, kept, f"{more * size:,}", f"{free:,}",
                    )  # fmt: skip
            except (OSError, StorageError) as error:
                failure = describe(error, self.root, "can't be written")
        failure = unpack(peers.exchange("checkpoint_room", None if failure is None else failure.pack())[0])
        if failure is not None:
            raise failure.error()

    def save(self, step: int, state: Any, meta: dict[str, Any], metrics: dict[str, float] | None = None) -> bool:
        """Begins a save; returns when the arrays are copied, so that `state` may be donated.

        It first waits for the save before it. A step that this run has saved or restored already is not saved again.

        Args:
          step: updates applied.
          state: pytree of arrays.
          meta: what JSON can hold.
          metrics: evaluation metrics of this step, for `best_metric`.

        Returns:
          Whether a save was begun.

        Raises:
          StorageError: the disk can't be written at all, or saves failed too often in a row.
          PeerLostError: another process did not answer.
          TakenOver: another run holds the directory.
        """
        if self._read_only:
            raise RuntimeError("these checkpoints were opened read-only")
        self._settle(block=True)
        if step in self._own and step in layout.finished_steps(self.root):
            return False
        flat = arrays.flatten(state)
        folder, target = layout.saving_path(self.root, step, self._token), self.root / str(step)
        save = Save(step, folder, target, arrays.records(flat), dict(metrics or {}))
        self._topic = save.topic
        meta = json.loads(json.dumps(meta))  # a copy: it is written later
        self._prepare(save, arrays.size_bytes(flat.values()))
        if save.failure is None:
            try:
                self._checkpointer().save(
                    save.folder,
                    args=ocp.args.Composite(state=ocp.args.PyTreeSave(arrays.nest(flat)), meta=ocp.args.JsonSave(meta)),
                )
            except Exception as error:  # counted and told of; training goes on
                save.failure = describe(error, save.folder, "can't save")
        self._emit("save", step=step, blocking_seconds=time.monotonic() - save.started)
        save.thread = threading.Thread(target=self._finish, args=(save,), name=f"checkpoint-{step}")
        self._current = save
        save.thread.start()
        if not self._async_save:
            self._settle(block=True)
        return True

    def poll(self) -> None:
        """Tells of failures in the background; costs nothing. The loop calls it at every step.

        Raises:
          StorageError, PeerLostError, TakenOver: as `save`.
        """
        self._settle(block=False)

    def wait(self) -> None:
        """Waits until the last save is durable.

        Raises:
          StorageError: it failed, even if for the first time.
          PeerLostError: another process did not answer.
        """
        self._settle(block=True, tolerate=False)

    def wait_for_backup(self, seconds_left: Callable[[], float | None] = lambda: None) -> None:
        """Waits until the second place has what it is to have, or can't get it. On all processes alike.

        Args:
          seconds_left: how long it may still take; None: as long as the copy moves. Process 0's counts.
        """
        done = self._backup is None
        while not done:
            assert self._backup is not None
            done = bool(peers.exchange("backup_done", peers.index() == 0 and self._backup.wait(seconds_left()))[0])
            progress.report()

    def close(self) -> None:
        """Waits until the last save is durable, and a few seconds for its copy; ends the threads."""
        try:
            self.wait()
        finally:
            if self._backup is not None:
                self._backup.close()
                self._retain_after_copies()
            if self._orbax is not None:
                try:
                    self._orbax.close()
                except Exception as error:  # of a save that has been judged without it
                    log.warning("%s: Orbax ended with %s: %s", self.root, type(error).__name__, error)
                self._orbax = None
            if not self._read_only and peers.index() == 0:
                # Writers of a save that failed may have come back to it after it was cleared away.
                own = layout.saving_path(self.root, 0, self._token).parent
                if own != self.root:
                    files.remove_tree(own)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Restoring

    def restore(
        self,
        abstract_state: Any,
        step: int | None = None,
        *,
        among: Collection[int] | None = None,
        optional: Collection[str] = (),
    ) -> tuple[Any, dict[str, Any], int]:
        """Reads a verified checkpoint onto the given shardings, whatever mesh wrote it.

        Without `step` it takes the newest intact one; damaged ones that are newer are moved to _quarantine. When none
        is intact nothing is moved, so that a second start can't begin anew unnoticed.

        Args:
          abstract_state: pytree of `jax.ShapeDtypeStruct` with shardings; free the state that it replaces first.
          step: this step and no other.
          among: only these steps.
          optional: parts of the state whose arrays may be missing in the checkpoint, be there in vain, or have another
            shape: those stay as they are given, shapes.

        Returns:
          The state, the JSON saved with it, and its step.

        Raises:
          CheckpointError: there is none, none is intact, or paths, shapes or dtypes differ (lists them).
        """
        self._settle(block=True)
        wanted = arrays.flatten(abstract_state)
        here, there = self._candidates() if peers.index() == 0 else ([], [])
        here, there = peers.exchange("restore_candidates", [here, there])[0]
        candidates = sorted({*here, *there})
        if step is not None:
            among = [step]
        if among is not None:
            candidates = [candidate for candidate in candidates if candidate in among]
        if not candidates:
            what = "no finished checkpoint" if step is None else f"no finished checkpoint of step {step}"
            raise CheckpointError(f"{self.root} holds {what}", f"steps there: {self.steps() or 'none'}")
        damaged: list[DamagedCheckpoint] = []  # here, and to be put in quarantine
        found: list[DamagedCheckpoint] = []  # anywhere
        for candidate in reversed(candidates):
            damage = self._damage(candidate) if candidate in here else None
            if candidate in here and damage is None:
                return self._read(candidate, abstract_state, wanted, damaged, optional)
            if damage is not None:
                log.error("%s", damage.message)
                found.append(damage)
            if candidate in there:
                copy = self._bring_back(candidate, damage)
                if copy is None:
                    return self._read(candidate, abstract_state, wanted, damaged, optional)
                found.append(copy)
            if damage is not None:
                damaged.append(damage)
        if step is not None:
            raise found[0]
        raise CheckpointError(
            f"{self.root}: none of the checkpoints {candidates} is intact; the newest: {found[0].message}",
            "bring one back from a copy, or start a new run in another run_dir",
        )

    def supersede(self, after: int) -> None:
        """Moves steps beyond `after` that are not of this run's line to _superseded, for a run that went back."""
        if peers.index() != 0:
            return
        ahead = [s for s in layout.finished_steps(self.root) if s > after and s not in self._own]
        for step in ahead:
            files.move(self.root / str(step), layout.unused_path(self.root / layout.SUPERSEDED, str(step)))
            self._manifests.pop(step, None)
        if ahead:
            log.warning("checkpoints %s lie ahead of this run's line: moved to %s", ahead, layout.SUPERSEDED)
            self._emit("superseded", steps=ahead)

    def _read(
        self,
        step: int,
        abstract_state: Any,
        wanted: dict[str, Any],
        damaged: list[DamagedCheckpoint],
        optional: Collection[str],
    ) -> tuple[Any, dict[str, Any], int]:
        folder = self._folder(step)
        saved, expected = read_manifest(folder).arrays, arrays.records(wanted)
        left_out: set[str] = set().union(*(arrays.differing(saved, expected, part) for part in optional))
        present = {path: leaf for path, leaf in wanted.items() if path not in left_out}
        arrays.require_equal(
            {path: record for path, record in saved.items() if path not in left_out},
            arrays.records(present),
            str(folder),
        )
        if not self._read_only:
            if peers.index() == 0:
                for damage in damaged:
                    self._quarantine(damage)
            peers.exchange("quarantined", None)
        meta = json.loads((folder / layout.META).read_text())
        restored = wanted | arrays.read_arrays(folder / "state", present, partial=bool(left_out))
        self._own = {own for own in self._own if own < step} | {step}
        self._durable_step = step
        if self._backup is not None:
            self._backup.goes_on_from(step)
        return arrays.unflatten(abstract_state, restored), meta, step

    def _damage(self, step: int) -> DamagedCheckpoint | None:
        """Verifies a step, each process a share of its files."""
        folder = self.root / str(step)
        found: list[str] | None = None
        try:
            manifest = read_manifest(folder)
            check_files(folder, manifest, sorted(manifest.files)[peers.index() :: peers.count()])
        except DamagedCheckpoint as error:
            found = [error.file, error.reason]
        except OSError as error:
            found = [str(error.filename or folder), error.strerror or str(error)]
        found = next((answer for answer in peers.exchange("verified", found) if answer is not None), None)
        return None if found is None else DamagedCheckpoint(str(step), *found)

    def _candidates(self) -> tuple[list[int], list[int]]:
        """Steps here, and in the second place where there is one that answers."""
        there: list[int] = []
        if self._backup is not None:
            try:
                there = self._backup.steps()
            except Exception as error:  # whatever a store raises
                log.warning("%s can't be listed: %s: %s", self._backup.place, type(error).__name__, error)
        return layout.finished_steps(self.root), there

    def _bring_back(self, step: int, damage: DamagedCheckpoint | None) -> DamagedCheckpoint | None:
        """Puts the copy of a step in the place of one that is damaged, or gone; returns what is wrong with the copy."""
        assert self._backup is not None
        why = "it is gone here" if damage is None else f"{damage.file} is damaged here: {damage.reason}"
        try:
            self._backup.fetch(step, why, lambda: None if damage is None else self._quarantine(damage))
        except DamagedCheckpoint as error:
            log.error("the copy, too: %s" if damage else "the copy: %s", error.message)
            return error
        return None

    def _quarantine(self, damage: DamagedCheckpoint) -> None:
        target = layout.unused_path(self.root / layout.QUARANTINE, damage.step)
        files.move(self.root / damage.step, target)
        self._manifests.pop(int(damage.step), None)
        self._emit("corrupt", step=int(damage.step), file=damage.file, reason=damage.reason, moved_to=str(target))

    # Behind the scenes

    def _prepare(self, save: Save, size: int) -> None:
        """Looks before the leap, on process 0: once Orbax has begun, the other processes wait in its barriers."""
        if peers.index() == 0:
            try:
                self._check_run_dir()
                self._check_lease()
                self.root.mkdir(exist_ok=True)
                # Also those between the step that this run went back to and the one that it saves now.
                self.supersede(min(save.step - 1, max(self._own, default=save.step)))
                for leftover in [*layout.temporaries(self.root), save.target]:
                    files.remove_tree(leftover)
                self._check_room(size, f"step {save.step}")
                save.folder.parent.mkdir(exist_ok=True)
            except (OSError, ConfigError, StorageError) as error:
                save.failure = describe(error, save.target, "can't save")
        failure = None if save.failure is None else save.failure.pack()
        save.failure = unpack(peers.exchange("checkpoint_prepared", failure)[0])

    def _check_run_dir(self) -> None:
        """Sees that the run directory is there, and still this run's: what was removed is not made anew."""
        if files.is_local(self.run_dir) and not self.run_dir.exists():  # a store has no folders
            raise StorageError(f"{self.run_dir} is gone", "the run directory was removed under the run")
        if self._run_id is not None and read_run_id(self.run_dir) != self._run_id:
            raise StorageError(
                f"{self.run_dir} is no longer the directory of this run (run_id {self._run_id})",
                "it was removed or replaced under the run; bring it back, or start the run again",
            )

    @property
    def _token(self) -> int:
        return 0 if self._lease is None else self._lease.token

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _check_room(self, size: int, what: str) -> None:
        free = files.free_bytes(self.root if self.root.exists() else self.run_dir)
        if free is not None and free < size:
            raise StorageError(
                f"{self.root}: {what} needs {size:,} bytes, {free:,} are free",
                "free space there, or lower checkpoint.save_total_limit",
            )

    def _finish(self, save: Save) -> None:
        """The finisher's thread. What fails behind `durable` (an event, retention) must not undo it."""
        finish(save, self._checkpointer().wait_until_finished, self._check_lease)
        try:
            if save.failure is not None:
                log.warning("checkpoint step %s was not saved: %s", save.step, save.failure.message)
                self._emit("save_failed", step=save.step, reason=save.failure.message)
                return
            self._own.add(save.step)
            self._durable_step = save.step
            if save.manifest is not None:  # process 0
                self._manifests[save.step] = save.manifest
                seconds = time.monotonic() - save.started
                self._emit("durable", step=save.step, seconds=seconds, bytes=save.manifest.size)
                if self._backup is not None:
                    self._backup.offer(save.manifest)
                self._retain()
        except Exception:
            log.exception("%s: after the save of step %s", self.root, save.step)

    def _settle(self, *, block: bool, tolerate: bool = True) -> None:
        """Takes note of a save that has ended.

        Args:
          block: whether to wait for it.
          tolerate: whether a failure that the next save may mend is passed over.
        """
        if self._lease is not None and self._lease.lost:
            raise self._lease.error()
        save = self._current
        if save is not None and save.thread is not None:
            if save.thread.is_alive() and not block:
                return
            save.thread.join()
            self._current = None
            self._last_failure = save.failure
            self._failures = 0 if save.failure is None else self._failures + 1
        failure = self._last_failure
        if failure and (failure.lasting or not tolerate or self._failures > self._max_save_failures):
            self._last_failure = None  # told once
            raise failure.error()

    def _retain(self) -> None:
        for step in surplus_steps(self._metrics(), self._limit, self._keep_best, self._best_mode):
            if self._backup is None or not self._backup.needs(step):  # then the next time
                self._manifests.pop(step, None)
                remove_step(self.root, str(step))

    def _retain_after_copies(self) -> None:
        """Removes what a copy still needed when it was due."""
        if peers.index() == 0:
            try:
                self._retain()
            except OSError as error:  # the next start does it
                log.warning("%s: %s", self.root, error)

    def _sweep(self) -> None:
        """Clears what a run that was killed has left behind."""
        for name in (layout.TRASH, layout.FETCHED):
            files.remove_tree(self.root / name)
        for folder in layout.temporaries(self.root):
            files.remove_tree(folder)
        for folder in layout.unfinished_steps(self.root):
            # Kept, since someone may have lost the manifest of a good step; but only the newest, since a run that is
            # killed again and again would fill the disk with them.
            target = self.root / layout.QUARANTINE / "unfinished"
            files.remove_tree(target)
            files.move(folder, target)
            self._emit("corrupt", step=int(folder.name), file=layout.MANIFEST, reason="missing", moved_to=str(target))

    def _metrics(self) -> dict[int, float | None]:
        """The deciding metric of each step whose manifest can be read."""
        metrics = {}
        for step in layout.finished_steps(self.root):
            if step not in self._manifests:
                try:
                    self._manifests[step] = read_manifest(self.root / str(step))
                except (CheckpointError, FileNotFoundError):
                    continue  # neither counted nor removed: restore will quarantine it
            metrics[step] = self._manifests[step].metrics.get(self._best_metric) if self._best_metric else None
        return metrics

    def _folder(self, step: int) -> epath.Path:
        folder = self.root / str(step)
        if not folder.exists():
            raise CheckpointError(f"{self.root} holds no checkpoint of step {step}", f"there are: {self.steps()}")
        return folder

    def _checkpointer(self) -> ocp.AsyncCheckpointer:
        if self._orbax is None:
            registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
            registry.add("state", ocp.args.PyTreeSave, arrays.state_handler())
            registry.add("meta", ocp.args.JsonSave, ocp.JsonCheckpointHandler())
            self._orbax = ocp.AsyncCheckpointer(
                ocp.CompositeCheckpointHandler(handler_registry=registry),
                async_options=ocp.options.AsyncOptions(timeout_secs=_ORBAX_TIMEOUT_SECONDS, barrier_sync_fn=self._meet),
            )
        return self._orbax

    def _meet(self, key: str, timeout_ms: int) -> None:
        """Where Orbax waits for its peers: not for one that could not write, up to the timeout."""
        peers.meet(self._topic, key, timeout_ms)

    def _emit(self, kind: str, **fields: Any) -> None:
        if self._on_event is not None and peers.index() == 0:
            self._on_event(kind, fields)
