"""A ledger of the rows that a run's updates have read: after any fault it shows whether one was left out or read twice.

Every process writes a line for each batch that it hands to the step, with a checksum of what its devices hold of it.
The checksums of all processes add up to that of the batch: a sum over its elements, each mixed with its name and its
place in the batch, so it does not depend on the mesh, on the number of processes, or on the cut into micro-batches.

It costs a copy of every batch back to the host: it is for rehearsals (`jtrain drill`) and tests.
"""

from __future__ import annotations

import itertools
import os
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jtrain.observe.jsonlines import JsonLines, read_lines
from jtrain.train.callbacks import Callback

if TYPE_CHECKING:
    from jtrain.train.trainer import Trainer

_MULTIPLIERS = np.asarray([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


class Read(NamedTuple):
    """A batch that an update has read.

    Attributes:
      batch: its number: updates and skipped steps before it.
      checksum: of its arrays.
      step: the update that was made with it; None: it was skipped, or the process ended before its figures were read.
      time: when that update was done, in seconds since the epoch; else when the batch was handed over.
    """

    batch: int
    checksum: int
    step: int | None
    time: float


class RowLedger(Callback):
    """Writes FOLDER/rows-<process>.jsonl; a start of the run after another one goes on in the same files.

    Args:
      folder: of the ledger, which exists; not the run directory, whose disk may be full.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._lines = JsonLines(Path(folder) / f"rows-{jax.process_index()}.jsonl")
        self._next: int | None = None

    def attach(self, trainer: Trainer) -> None:
        """Makes it hear of the trainer's updates, and of what they read."""
        trainer.callbacks.callbacks.append(self)
        prepare = trainer.prepare

        def prepare_and_note(batch: dict[str, jax.Array], params: Any, variables: Any) -> dict[str, jax.Array]:
            if self._next is not None:  # else it is a batch of an evaluation, or one to compile with
                self._write("read", batch=self._next, checksum=f"{checksum(batch):016x}")
                self._next = None
            return prepare(batch, params, variables)

        trainer.prepare = prepare_and_note  # type: ignore[method-assign]

    def on_fit_start(self, trainer: Trainer) -> None:
        self._write("start", batch=trainer.counters.batches)

    def on_step_start(self, trainer: Trainer, step: int) -> None:
        self._next = step - 1 + trainer.counters.skipped

    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        self._write("done", batch=trainer.counters.batches - 1, step=step)

    def _write(self, kind: str, **fields: Any) -> None:
        self._lines.append({"kind": kind, **fields, "time": time.time()})


def checksum(batch: dict[str, jax.Array]) -> int:
    """What this process's devices hold of a batch [A, b, ...], each element once over all processes; below 2**64."""
    total = 0
    for name, array in batch.items():
        if name == "row":  # a row's number in the step, which stands in its place as well
            continue
        seed = np.uint64(zlib.crc32(name.encode()))
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                places = [np.arange(*part.indices(n)) for part, n in zip(shard.index, array.shape, strict=True)]
                total += _sum(np.asarray(shard.data), places, array.shape, seed)
    return total % 2**64


def _sum(values: np.ndarray, places: list[np.ndarray], shape: tuple[int, ...], seed: np.uint64) -> int:
    # The number of an element, in C order of the whole array: [A, b, ...] counts as [A * b, ...].
    number = np.zeros((1,) * len(shape), np.uint64)
    for axis, (place, size) in enumerate(zip(places, shape, strict=True)):
        own = place.astype(np.uint64).reshape([-1 if a == axis else 1 for a in range(len(shape))])
        number = number * np.uint64(size) + own
    bits = np.ascontiguousarray(values)
    bits = bits.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[bits.dtype.itemsize]).astype(np.uint64)
    mixed = (number + seed + np.uint64(1)) * _MULTIPLIERS[0] ^ (bits + np.uint64(1)) * _MULTIPLIERS[1]
    mixed = (mixed ^ (mixed >> np.uint64(31))) * _MULTIPLIERS[2]
    return int(np.sum(mixed ^ (mixed >> np.uint64(29)), dtype=np.uint64))


def read_ledger(folder: str | os.PathLike[str]) -> tuple[list[Read], list[str]]:
    """What the run has read, and what is wrong with it.

    A start that goes on from an earlier batch reads again what was lost: the last reading of a batch counts.

    Returns:
      The batches from the first to the last, and a sentence for each gap, each repetition within a start, and each
      batch of which two processes have a different story.
    """
    reads: dict[int, Read] = {}
    wrong: list[str] = []
    files = sorted(Path(folder).glob("rows-*.jsonl"))
    for file in files:
        own, found = _one_process(file)
        wrong += [f"{file.stem}: {text}" for text in found]
        if file is not files[0] and own.keys() != reads.keys():
            wrong.append(f"{file.stem}: batches {_some(own.keys() ^ reads.keys())} are not those of {files[0].stem}")
        for batch, read in own.items():
            other = reads.get(batch)
            reads[batch] = read if other is None else other._replace(
                checksum=(other.checksum + read.checksum) % 2**64, time=max(other.time, read.time)
            )  # fmt: skip
    return [reads[batch] for batch in sorted(reads)], wrong


def recovered_at(folder: str | os.PathLike[str], struck: float) -> float | None:
    """When process 0 had done the first update of a start after a fault; both in seconds since the epoch."""
    begun = False
    for line in read_lines(Path(folder) / "rows-0.jsonl"):
        begun |= line["kind"] == "start" and line["time"] > struck
        if begun and line["kind"] == "done":
            return line["time"]
    return None


def _one_process(file: Path) -> tuple[dict[int, Read], list[str]]:
    reads: dict[int, Read] = {}
    wrong: list[str] = []
    expected, begun = 0, False
    for line in read_lines(file):
        batch, kind = line["batch"], line["kind"]
        if kind == "start":
            if begun and batch > (furthest := max(reads, default=-1) + 1):
                wrong.append(f"a start went on at batch {batch}, and {furthest} was never read")
            expected, begun = batch, True
            reads = {number: read for number, read in reads.items() if number < batch}
        elif kind == "read":
            if batch != expected:
                wrong.append(f"batch {batch} was read where {expected} is due")
            expected = batch + 1
            reads[batch] = Read(batch, int(line["checksum"], 16), None, line["time"])
        elif batch in reads:
            reads[batch] = reads[batch]._replace(step=line["step"], time=line["time"])
    return reads, wrong


def _some(numbers: set[int]) -> str:
    shown = sorted(numbers)
    return ", ".join(map(str, itertools.islice(shown, 5))) + (", …" if len(shown) > 5 else "")
