"""Predictions over rows, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jtrain.data.loader import DataLoader
from jtrain.train.program import Program


def predict(
    program: Program, params: Any, variables: Any, predict_fn: Callable[[Any, dict[str, jax.Array]], Any], rows: Any
) -> Any:
    """`predict_fn(model, batch)` over all rows.

    Returns:
      The function's tree, numpy arrays [number of rows, ...].
    """

    def first_micro_batch(module: Any, batch: dict[str, jax.Array]) -> Any:  # there is one
        return predict_fn(module, jax.tree.map(lambda x: x[0], batch))

    run = program.forward(first_micro_batch)
    size = program.batch.rows
    outputs = []
    options = {"global_batch_size": size, "sharding": program.batch_sharding, "prefetch": 1, "whole": True}
    with DataLoader(rows, **options) as loader:
        for index in range(-(-len(rows) // size)):
            output = run(params, variables, loader[index])
            outputs.append(multihost_utils.process_allgather(output, tiled=True))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[: len(rows)], *outputs)
