"""The stack of layers, as one call: what a pipeline divides.

A model whose equal layers are stacked along a leading axis runs them by `scan_layers`. On one device, or on a mesh
without pipeline, that is a `lax.scan`. A pipeline runs the same body over its own share of the layers, and finds the
model's parts before and after the stack by this call alone: no model is divided by hand.

Legend: N layers.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax

Body = Callable[[Any, tuple[Any, Any]], Any]
"""`body(carry, (parameters, data)) -> carry`: one layer. What it closes over must be the same for every layer."""


class StackRunner(Protocol):
    """What runs a stack in place of the scan; see `jtrain.parallel.pipeline`."""

    def __call__(self, body: Body, carry: Any, parameters: Any, data: Any) -> Any: ...


_runner: contextvars.ContextVar[StackRunner | None] = contextvars.ContextVar("stack_runner", default=None)


@contextlib.contextmanager
def stack_runner(runner: StackRunner) -> Iterator[None]:
    """Gives every `scan_layers` that is traced inside to `runner`."""
    token = _runner.set(runner)
    try:
        yield
    finally:
        _runner.reset(token)


def scan_layers(body: Body, carry: Any, parameters: Any, data: Any = None) -> Any:
    """Runs a stack of layers.

    Args:
      body: one layer, already wrapped in its remat policy.
      carry: what goes through the layers: a tree of arrays, activations [B, ...] and whatever is summed on the way
        (auxiliary losses). Layers must keep its shapes and types.
      parameters: a tree of arrays [N, ...], the layers' parameters.
      data: a tree of arrays [N, ...] (or None) that differ by layer and are not trained: dropout keys, windows.

    Returns:
      The carry after the last layer.
    """
    runner = _runner.get()
    if runner is not None:
        return runner(body, carry, parameters, data)
    return jax.lax.scan(lambda state, layer: (body(state, layer), None), carry, (parameters, data))[0]
