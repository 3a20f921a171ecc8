"""Evaluation: exact over every row, whatever the batch size, the mesh or the number of processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jtrain import progress
from jtrain.data.loader import DataLoader
from jtrain.data.rows import Batch, Rows
from jtrain.errors import ConfigError
from jtrain.parallel.mesh import data_ranks
from jtrain.train.loss import Loss

Sums = dict[str, tuple[float, float]]


class Interrupted(Exception):
    """The run was asked to leave while it evaluated."""


class FilledRows:
    """Rows for batches that a mesh can divide: every `count` rows are followed by rows past the end.

    A batch thus holds the same rows on every mesh, also where `count` is no multiple of its data-parallel ranks.

    Args:
      rows: in order; those past their end count for nothing.
      count: rows of a batch that are read.
      ranks: what a batch has to be divisible by.

    Attributes:
      size: rows of a batch, with the filling.
    """

    def __init__(self, rows: Rows, count: int, ranks: int):
        self._rows, self._count = rows, count
        self.per_token = getattr(rows, "per_token", ())
        self.size = -(-count // ranks) * ranks

    def __len__(self) -> int:
        return -(-len(self._rows) // self._count) * self.size

    def rows(self, indices: np.ndarray) -> Batch:
        return self._rows.rows(self._numbers(indices))

    def batch_length(self, indices: np.ndarray) -> int | None:
        """What the rows say, where they say it."""
        length = getattr(self._rows, "batch_length", None)
        return None if length is None else length(self._numbers(indices))

    def image_slots(self, indices: np.ndarray) -> int | None:
        """What the rows say, where they say it."""
        slots = getattr(self._rows, "image_slots", None)
        return None if slots is None else slots(self._numbers(indices))

    def _numbers(self, indices: np.ndarray) -> np.ndarray:
        batch, place = np.divmod(np.asarray(indices), self.size)
        return np.where(place >= self._count, len(self._rows), batch * self._count + place)


class Evaluator:
    """Evaluates a model on rows in their order; sums accumulate in float64 on the host.

    Args:
      step: `eval_step(params, variables, batch) -> Loss`.
      loader: batches in order, the last one filled up with rows that count for nothing.
      batches: how many.
      compute_metrics: `sums -> metrics`, added to the figures (name -> (sum, count), `loss` among them).
      prepare: `prepare(batch, params, variables) -> batch`, before the step (`Trainer.prepare`).
      stop: asked before every batch; True breaks the evaluation off.
    """

    def __init__(
        self,
        step: Callable[..., Loss],
        loader: DataLoader,
        batches: int,
        compute_metrics: Callable[[Sums], dict[str, float]] | None = None,
        *,
        prepare: Callable[[Any, Any, Any], Any] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ):
        self._step, self._loader, self._batches, self._compute = step, loader, batches, compute_metrics
        self._prepare = prepare or (lambda batch, params, variables: batch)
        self._stop = stop

    @staticmethod
    def over(
        rows: Rows,
        step: Callable[..., Loss],
        *,
        batch_size: int,
        sharding: NamedSharding,
        multiple: int | None = None,
        max_batches: int | None = None,
        compute_metrics: Callable[[Sums], dict[str, float]] | None = None,
        prepare: Callable[[Any, Any, Any], Any] | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Evaluator:
        """One over all rows.

        Args:
          rows: in order; rows past their end count for nothing.
          step, compute_metrics, prepare, stop: see the class.
          batch_size: rows of a batch, over all devices.
          sharding: of a batch's arrays.
          multiple: what the rows of a batch are filled up to a multiple of; by default the data-parallel ranks.
          max_batches: no more than these; None or 0: all.
        """
        filled = FilledRows(rows, batch_size, multiple or data_ranks(sharding.mesh))
        loader = DataLoader(filled, global_batch_size=filled.size, sharding=sharding, prefetch=1)
        batches = -(-len(rows) // batch_size)
        return Evaluator(
            step, loader, min(batches, max_batches or batches), compute_metrics, prepare=prepare, stop=stop
        )

    def __call__(self, params: Any, variables: Any) -> dict[str, float]:
        """`eval_loss`, `eval_<name>` for every metric of the loss that has a count, and the computed ones.

        A metric whose name begins with `_` is for `compute_metrics` alone.

        Raises:
          Interrupted: `stop` said so.
        """
        sums: Sums = {}
        previous: Loss | None = None
        for index in range(self._batches):
            if self._stop():
                raise Interrupted
            batch = self._prepare(self._loader[index], params, variables)
            current = self._step(params, variables, batch)
            progress.report()
            if previous is not None:  # read one batch late: the next one is already running
                _add(sums, previous)
            previous = current
        if previous is not None:
            _add(sums, previous)
        metrics = {f"eval_{name}": total / count for name, (total, count) in sums.items() if count and name[0] != "_"}
        if self._compute is not None:
            computed = self._compute(sums)
            try:
                metrics |= {name: float(value) for name, value in computed.items()}
            except (AttributeError, TypeError, ValueError) as error:
                raise ConfigError(f"compute_metrics returned {computed!r}: {error}", "return name -> number") from error
        return metrics

    def close(self) -> None:
        self._loader.close()


def perplexity(loss: float) -> float:
    """exp(loss), infinite where it overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _add(sums: Sums, loss: Loss) -> None:
    values = jax.device_get({"loss": (loss.sum, loss.count)} | loss.metrics)
    for name, (total, count) in values.items():
        before = sums.get(name, (0.0, 0.0))
        sums[name] = (before[0] + float(total), before[1] + float(count))
