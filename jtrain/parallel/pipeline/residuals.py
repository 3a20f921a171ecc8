"""Residuals of a forward, kept apart from the weights.

`jax.vjp` returns a function that is a pytree: its leaves are what the backward reads. Those that are the weights
themselves are left out of what is kept: with several chunks a stage they would be copied for every micro-batch in
flight, and they are put back, those of the chunk whose backward runs, when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


class Residuals:
    """`stage(chunk, shared, micro, carry, number) -> carry`, differentiated in two halves."""

    def __init__(self, stage: Callable[..., Any]):
        self._stage = stage

    def forward(self, chunk: Any, shared: Any, micro: Any, carry: Any, number: Any) -> tuple[Any, list[jax.Array]]:
        """(output, what has to be kept of it for the backward)."""
        y, pull = self._vjp(chunk, shared, micro, carry, number)
        weights = _ids((chunk, shared))
        return y, [leaf for leaf in jax.tree.leaves(pull) if id(leaf) not in weights]

    def shapes(self, chunk: Any, shared: Any, micro: Any, carry: Any, number: Any) -> list[jax.ShapeDtypeStruct]:
        """Shapes of what is kept."""
        return jax.eval_shape(lambda *arguments: self.forward(*arguments)[1], chunk, shared, micro, carry, number)

    def backward(self, kept: list[jax.Array], chunk: Any, shared: Any, micro: Any, carry: Any, number: Any) -> Any:
        """The function that pulls a cotangent back, over these weights and what was kept.

        The stage is traced once more for the structure of that function only; `carry` may be anything of the right
        shapes. Its forward is not used, and the compiler drops it.
        """
        _, pull = self._vjp(chunk, shared, micro, carry, number)
        weights, rest = _ids((chunk, shared)), iter(kept)
        leaves, tree = jax.tree.flatten(pull)
        return jax.tree.unflatten(tree, [leaf if id(leaf) in weights else next(rest) for leaf in leaves])

    def _vjp(self, chunk: Any, shared: Any, micro: Any, carry: Any, number: Any) -> tuple[Any, Any]:
        return jax.vjp(lambda c, s, x: self._stage(c, s, micro, x, number), chunk, shared, carry)


def _ids(tree: Any) -> set[int]:
    return {id(leaf) for leaf in jax.tree.leaves(tree)}
