"""Rows whose completions a model writes itself, in place of those of the data.

Whose they are, and every token that is drawn, are functions of (seed, number of the batch, number of the row in it):
a run that is resumed draws the same ones.

Legend: n rows of a batch, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jtrain.data.order import key64
from jtrain.data.rows import IGNORE, Batch, Rows

_CHOICE, _DRAW = 0x64697374, 0x64726177
"""Streams of the run's seed ("dist", "draw"), apart from those of the data."""

Complete = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""`complete(prompts, seed) -> tokens of each completion`, with the token that ended it."""


class NumberedRows:
    """A stream of rows that say which batch they stand in: `batch_number` int32 [n].

    Args:
      rows: the stream.
      size: rows of a batch.
    """

    def __init__(self, rows: Rows, size: int):
        self.plain, self._size = rows, size

    def __len__(self) -> int:
        return len(self.plain)

    def __getattr__(self, name: str) -> Any:
        if name == "plain":  # not there yet: a copy that is being made
            raise AttributeError(name)
        return getattr(self.plain, name)

    def rows(self, indices: np.ndarray) -> Batch:
        return self.plain.rows(indices) | {"batch_number": (np.asarray(indices) // self._size).astype(np.int32)}

    def batch(self, number: int) -> Batch:
        """All rows of a batch."""
        return self.plain.rows(number * self._size + np.arange(self._size))


def is_on_policy(seed: int, number: int, fraction: float) -> bool:
    """Whether a batch trains on the student's completions: so many do, chosen by its number."""
    return key64(seed, _CHOICE, number) < fraction * 2.0**64


def drawing_seed(seed: int, number: int) -> int:
    """The seed of what is drawn for a batch."""
    return key64(seed, _DRAW, number) & 0xFFFFFFFF


def prompt_of(ids: np.ndarray, labels: np.ndarray, segment_ids: np.ndarray, longest: int) -> list[int] | None:
    """The prompt of a row [L]: all that stands before the last stretch of labels; None: the row has none.

    Of a conversation that is everything before the last answer. Of a prompt that is too long the end is kept.
    """
    live = np.flatnonzero((labels != IGNORE) & (segment_ids > 0))
    if not len(live):
        return None
    gaps = np.flatnonzero(np.diff(live) > 1)
    start = live[gaps[-1] + 1] if len(gaps) else live[0]
    return ids[max(0, start - longest) : start].tolist()


def completed(batch: Batch, complete: Complete, seed: int, *, longest_prompt: int, pad_id: int) -> Batch:
    """A batch with other completions.

    Args:
      batch: rows of one example each.
      complete: the model.
      seed: of what it draws.
      longest_prompt: tokens of a prompt that are kept.
      pad_id: token that stands in padding.

    Returns:
      input_ids, labels, segment_ids, position_ids [n, L]: prompt and completion; all tokens of the completion are
      labels. Rows without a prompt are left empty.
    """
    n, length = batch["input_ids"].shape
    prompts = [
        prompt_of(*row, longest_prompt)
        for row in zip(batch["input_ids"], batch["labels"], batch["segment_ids"], strict=True)
    ]
    drawn = iter(complete([prompt for prompt in prompts if prompt is not None], seed))
    ids, labels = np.full((n, length), pad_id, np.int32), np.full((n, length), IGNORE, np.int32)
    segments, positions = np.zeros((n, length), np.int32), np.zeros((n, length), np.int32)
    for row, prompt in enumerate(prompts):
        if prompt is None:
            continue
        tokens = [*prompt, *next(drawn)]
        ids[row, : len(tokens)] = tokens
        labels[row, len(prompt) : len(tokens)] = tokens[len(prompt) :]
        segments[row, : len(tokens)] = 1
        positions[row, : len(tokens)] = np.arange(len(tokens))
    return {"input_ids": ids, "labels": labels, "segment_ids": segments, "position_ids": positions}


def shortened(batch: Batch, buckets: Sequence[int]) -> Batch:
    """Arrays [n, L] cut to the first of the lengths that holds all their tokens; without lengths as they are."""
    longest = int((batch["segment_ids"] > 0).sum(1).max(initial=0))
    length = next((bucket for bucket in buckets if bucket >= longest), None)
    return {name: values[:, :length] for name, values in batch.items()}
