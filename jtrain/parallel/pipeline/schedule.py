"""Pipeline schedules as tables: what every stage does at every tick.

A schedule is data, made by plain Python before anything is traced. At a tick a stage does at most one forward and one
backward of one chunk (its share of the layers) for one micro-batch; all stages move in lockstep. What a stage sends
forward at a tick, its neighbour uses at the next; so does a cotangent on its way back.

Legend: S stages, V chunks a stage (virtual stages), M micro-batches, T ticks. Chunk v of stage s is chunk v S + s of
the whole model.

| schedule | order | activations held, in chunk inputs |
|---|---|---|
| gpipe | all forwards, then all backwards (Huang et al. 2019) | M V |
| 1f1b | one forward, one backward (Narayanan et al. 2019, 2021) | min(M, 2 S - 1) |
| interleaved | the same with V > 1 chunks a stage (Narayanan et al. 2021, section 2.2) | min(M V, S (V + 1) - 1) |
"""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction

import numpy as np

SCHEDULES = ("gpipe", "1f1b", "interleaved")


@dataclasses.dataclass(frozen=True)
class Work:
    """One kind of work (forward or backward) of every stage at every tick: arrays [T, S].

    Attributes:
      on: whether the stage works.
      microbatch: on which micro-batch.
      chunk: on which of its chunks.
      slot: where the chunk's input waits between its forward and its backward.
    """

    on: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    slot: np.ndarray


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A schedule of `microbatches` micro-batches over `stages` stages of `chunks` chunks.

    Attributes:
      name: gpipe, 1f1b or interleaved.
      forward, backward: the tables; a schedule of forwards only has no backward.
      phases: (first tick, last tick + 1, forward, backward): stretches in which forwards, backwards or both happen.
      slots: chunk inputs that a stage holds at most.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    forward: Work
    backward: Work | None
    phases: tuple[tuple[int, int, bool, bool], ...]
    slots: int

    @property
    def ticks(self) -> int:
        """Length in ticks."""
        return self.forward.on.shape[0]

    def time(self, forward: Fraction | int = 1, backward: Fraction | int = 2) -> Fraction:
        """Lockstep time of the schedule, in units of one stage's work (all its chunks) on one micro-batch.

        Args:
          forward: time of a forward.
          backward: time of a backward.
        """
        ticks = sum((end - start) * (forward * f + backward * b) for start, end, f, b in self.phases)
        return Fraction(ticks) / self.chunks

    def bubble(self) -> Fraction:
        """Share of the lockstep time in which a stage idles; (S - 1) / (M V + S - 1) where S divides M or V is 1."""
        forward, backward = 1, 2 if self.backward is not None else 0
        return 1 - Fraction(self.microbatches * (forward + backward)) / self.time(forward, backward)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.stages} stages x {self.chunks} chunks, {self.microbatches} micro-batches, "
            f"bubble {float(self.bubble()):.1%}, {self.slots} slots"
        )

    def picture(self) -> str:
        """The schedule as text: two lines a stage (forwards, backwards), a column a tick.

        Micro-batches are letters a to z, then from a again; every other chunk of a stage has capitals.
        """
        lines = [str(self)]
        for stage in range(self.stages):
            for label, work in (("F", self.forward), ("B", self.backward)):
                if work is not None:
                    cells = "".join(_cell(work, tick, stage) for tick in range(self.ticks))
                    lines.append(f"stage {stage} {label} |{cells}|")
        return "\n".join(lines)


def make_schedule(name: str, stages: int, microbatches: int, chunks: int = 1, *, training: bool = True) -> Schedule:
    """Builds and checks a schedule.

    Args:
      name: gpipe, 1f1b or interleaved.
      stages: S.
      microbatches: M, any number of at least 1.
      chunks: V, chunks a stage.
      training: False leaves the backwards out (evaluation).

    Raises:
      ValueError: an unknown name, or a number below 1.
    """
    if name not in SCHEDULES or min(stages, microbatches, chunks) < 1:
        raise ValueError(f"no schedule {name!r} of {stages} stages, {microbatches} micro-batches, {chunks} chunks")

    def forward_tick(m: int, v: int, s: int) -> int:
        # Groups of S micro-batches go through chunk 0 of every stage, then through chunk 1, ...: a chunk's output
        # arrives at stage 0 again just when the group is through. A last group that is not full leaves gaps.
        return m + s if chunks == 1 else (m // stages) * stages * chunks + v * stages + m % stages + s

    last_forward = max(forward_tick(microbatches - 1, chunks - 1, s) for s in range(stages))

    def backward_tick(m: int, v: int, s: int) -> int:
        if name == "gpipe":
            return 2 * last_forward + 1 - forward_tick(m, v, s)
        # The last chunk turns round at once; a cotangent needs a tick a chunk on its way back.
        return forward_tick(m, chunks - 1, stages - 1) + stages * chunks - 1 - (v * stages + s)

    events = [
        (s, m, v, forward_tick(m, v, s), backward_tick(m, v, s))
        for s in range(stages)
        for m in range(microbatches)
        for v in range(chunks)
    ]
    ticks = (max(event[4] for event in events) if training else last_forward) + 1
    forward, backward = _empty(ticks, stages), _empty(ticks, stages) if training else None
    slots = 1
    for stage in range(stages):
        mine = sorted((event for event in events if event[0] == stage), key=lambda event: event[3])
        taken: list[int] = []  # slot -> tick of the backward that frees it
        for _, m, v, start, end in mine:
            slot = next((i for i, busy in enumerate(taken) if busy < start), len(taken)) if training else 0
            if training:
                taken[slot : slot + 1] = [end]
            _enter(forward, start, stage, m, v, slot)
            if backward is not None:
                _enter(backward, end, stage, m, v, slot)
        slots = max(slots, len(taken))
    return Schedule(name, stages, microbatches, chunks, forward, backward, _phases(forward, backward), slots)


def choose_schedule(stages: int, microbatches: int, chunks: int) -> str:
    """The schedule of `pipeline.schedule: auto`.

    Lockstep time is the same for all with V = 1. 1F1B holds min(M, 2 S - 1) activations, GPipe M: with M <= S they are
    as many, and GPipe's program is the smaller (two loops instead of three).
    """
    if chunks > 1:
        return "interleaved"
    return "1f1b" if microbatches > stages else "gpipe"


def _empty(ticks: int, stages: int) -> Work:
    return Work(np.zeros((ticks, stages), bool), *(np.zeros((ticks, stages), np.int32) for _ in range(3)))


def _enter(work: Work, tick: int, stage: int, microbatch: int, chunk: int, slot: int) -> None:
    if work.on[tick, stage]:
        raise ValueError(f"stage {stage} has two pieces of work at tick {tick}")
    work.on[tick, stage] = True
    work.microbatch[tick, stage], work.chunk[tick, stage], work.slot[tick, stage] = microbatch, chunk, slot


def _phases(forward: Work, backward: Work | None) -> tuple[tuple[int, int, bool, bool], ...]:
    """Stretches of ticks by what happens in them; a gap inside a stretch does not end it."""
    ticks = forward.on.shape[0]

    def stretch(work: Work | None) -> tuple[int, int]:
        if work is None:
            return ticks, ticks
        busy = np.flatnonzero(work.on.any(axis=1))
        return int(busy[0]), int(busy[-1]) + 1

    (f0, f1), (b0, b1) = stretch(forward), stretch(backward)
    edges = sorted({0, f0, f1, b0, b1, ticks})
    cuts = [(a, b, f0 <= a < f1, b0 <= a < b1) for a, b in itertools.pairwise(edges)]
    return tuple(cut for cut in cuts if cut[2] or cut[3])


def _cell(work: Work, tick: int, stage: int) -> str:
    if not work.on[tick, stage]:
        return "."
    letter = chr(ord("a") + int(work.microbatch[tick, stage]) % 26)
    return letter.upper() if work.chunk[tick, stage] % 2 else letter
