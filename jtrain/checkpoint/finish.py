"""The second half of a save, in the background: from "Orbax has renamed" to "the step exists".

Every process runs it for every save and tells the others at three points, so that all agree on the outcome: did every
process write its part; what are the hashes (each process reads a share of the files); is the step where it belongs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable

from etils import epath

from jtrain.checkpoint import files, layout, peers
from jtrain.checkpoint.failures import Failure, describe, unpack
from jtrain.checkpoint.manifest import ArrayRecord, Manifest, hash_files, new_manifest, write_manifest

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Save:
    """One save on its way.

    Attributes:
      folder: where it is written.
      target: RUN/checkpoints/<step>; on an object store the same.
      arrays: what it holds.
      started: `time.monotonic()` when `save` was called.
      failure: what went wrong; after `thread` has ended it is the same on every process.
      manifest: of a save that is durable.
      number: counts the saves of this program; the same on every process.
    """

    step: int
    folder: epath.Path
    target: epath.Path
    arrays: dict[str, ArrayRecord]
    metrics: dict[str, float]
    started: float = dataclasses.field(default_factory=time.monotonic)
    failure: Failure | None = None
    manifest: Manifest | None = None
    thread: threading.Thread | None = None
    number: int = dataclasses.field(default_factory=itertools.count(1).__next__)

    @property
    def topic(self) -> str:
        """What the processes meet for while Orbax writes."""
        return f"save/{self.number}"


def finish(save: Save, wait_for_orbax: Callable[[], None], check_lease: Callable[[], None]) -> None:
    """Makes a save durable, or gives it a failure and removes what it left behind.

    Args:
      check_lease: raises when this run may write no longer; called on process 0, last before the step begins to exist.
    """
    try:
        if save.failure is None:
            try:
                wait_for_orbax()
            except peers.GivenUp:
                log.debug("a peer does not go on with the save of step %s", save.step)
            except Exception as error:
                save.failure = describe(error, save.folder, "can't save")
        if save.failure is not None:
            peers.give_up(save.topic)  # the others wait for this process, in Orbax
        _check(save, check_lease)
        _agree("written", save)
        if peers.index() == 0:
            peers.forget(save.topic)
        if save.failure is None:
            _hash_and_seal(save, check_lease)
    except Exception as error:  # a peer that is lost, or a bug: nobody else would see it in this thread
        save.failure = save.failure or describe(error, save.folder, "can't save")
    if peers.index() == 0:
        with contextlib.suppress(OSError):  # a read-only disk; the next start sweeps
            _clear(save)


def _clear(save: Save) -> None:
    """Removes what is no step: of a save that failed, and the folder of its own that it was written in."""
    if save.folder != save.target:
        for _ in range(20):
            files.remove_tree(save.folder.parent)
            if not save.folder.parent.exists():
                break
            time.sleep(0.05)  # of a save that failed, Orbax may still have writers under way
    elif save.failure is not None and save.failure.kind != "ConfigError":  # taken over: it may be the other run's
        for leftover in [*layout.temporaries(save.folder.parent), save.folder]:
            files.remove_tree(leftover)


def _check(save: Save, check_lease: Callable[[], None]) -> bool:
    """Whether this process may go on to write; a lease that is lost outweighs every failure that it has caused."""
    if peers.index() == 0:
        try:
            check_lease()
        except Exception as error:
            failure = describe(error, save.target, "can't see whether the run directory is still this run's")
            if save.failure is None or failure.kind == "ConfigError":
                save.failure = failure
    return save.failure is None


def _hash_and_seal(save: Save, check_lease: Callable[[], None]) -> None:
    names = None
    try:
        if peers.index() == 0:
            files.sync_tree(save.folder)
            names = list(files.walk(save.folder))
    except OSError as error:
        save.failure = describe(error, save.folder, "can't sync")
    names = peers.exchange("checkpoint_files", names)[0]
    records = {}
    try:
        records = hash_files(save.folder, (names or [])[peers.index() :: peers.count()])
    except OSError as error:
        save.failure = save.failure or describe(error, save.folder, "can't read back what was written")
    shares = peers.exchange("checkpoint_hashes", records)
    _agree("hashed", save)
    if save.failure is not None:
        return
    if peers.index() == 0 and _check(save, check_lease):
        merged = {name: (size, digest) for share in shares for name, (size, digest) in share.items()}
        manifest = new_manifest(save.step, merged, save.arrays, save.metrics)
        try:
            write_manifest(save.folder, manifest)
            if save.folder == save.target:
                save.manifest = manifest
            elif _check(save, check_lease):
                files.move(save.folder, save.target)
                save.manifest = manifest
        except OSError as error:
            save.failure = describe(error, save.target, "can't write the manifest")
    _agree("sealed", save)


def _agree(point: str, save: Save) -> None:
    """Gives every process the first failure that any of them has."""
    answers = peers.exchange(f"checkpoint_{point}", None if save.failure is None else save.failure.pack())
    save.failure = unpack(next((answer for answer in answers if answer is not None), None))
