"""Predictions over rows, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from jtrain.data.loader import DataLoader
from jtrain.train.program import Program


def predict(
    program: Program, params: Any, variables: Any, predict_fn: Callable[[Any, dict[str, jax.Array]], Any], rows: Any
) -> Any:
    """`predict_fn(model, batch)` over all rows.

    Returns:
      The function's tree, numpy arrays [number of rows, ...].
    """

    run = program.forward(first_micro_batch(predict_fn))
    return outputs_of(lambda batch: run(params, variables, batch), rows, program.batch.rows, program.batch_sharding)


def first_micro_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(module, batch)` for a batch [1, b, ...], of its only micro-batch."""
    return lambda module, batch: function(module, jax.tree.map(lambda x: x[0], batch))


def outputs_of(run: Callable[[Any], Any], rows: Any, size: int, sharding: NamedSharding, *, whole: bool = True) -> Any:
    """What `run(batch)` gives of all rows: its tree of arrays [b, ...] as numpy arrays [number of rows, ...].

    Args:
      run: of a batch with arrays [1, b, ...].
      rows: in order; what stands past their end is left out.
      size: rows of a batch.
      sharding: of its arrays.
      whole: False: a batch is cut to its own length where the rows say it (for outputs without one).
    """
    outputs = []
    options = {"global_batch_size": size, "sharding": sharding, "prefetch": 1, "whole": whole}
    with DataLoader(rows, **options) as loader:
        for index in range(-(-len(rows) // size)):
            outputs.append(multihost_utils.process_allgather(run(loader[index]), tiled=True))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[: len(rows)], *outputs)
