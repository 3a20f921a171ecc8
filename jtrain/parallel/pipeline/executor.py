"""The pipeline executor: one table-driven loop that runs forwards and backwards of a whole batch, inside one jit.

It is traced inside a `shard_map` region that is manual over the pipeline axis. Each tick a device does at most one
chunk-forward and one chunk-backward; ticks fall into at most three scans (forwards only, both, backwards only), so that
no two devices ever differ in control flow. Activations and cotangents travel by `ppermute`, inputs of chunks (or the
residuals of their forwards) wait in a ring of slots. Gradients are summed on the way: nothing is differentiated through
the loop, and memory does not grow with the number of micro-batches.

What stands before and after the stack (embedding, head) is computed by all stages together for the one micro-batch that
enters or leaves: with their tables cut over the stages, none is heavier than another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jtrain.ops.collectives import sum_over
from jtrain.parallel.pipeline.residuals import Residuals
from jtrain.parallel.pipeline.schedule import Schedule, Work


@dataclasses.dataclass(frozen=True)
class Parts:
    """A model as the pipeline sees it. Every function is pure; `micro` is one micro-batch.

    Attributes:
      first: `(rest, micro) -> carry`, what stands before the stack.
      stage: `(chunk, shared, micro, carry, number) -> carry`, the layers of chunk `number` of the model.
      last: `(rest, variables, micro, carry) -> (scalar, (loss, variables))`: what stands after the stack, the scalar to
        be differentiated, and what is summed or handed on.

    `chunk` holds the trained parameters of one chunk's layers; `rest` those outside of the stack; `shared` those of
    `rest` that the layers read as well.
    """

    first: Callable[[Any, Any], Any]
    stage: Callable[[Any, Any, Any, Any, jax.Array], Any]
    last: Callable[[Any, Any, Any, Any], tuple[jax.Array, tuple[Any, Any]]]


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Sums over all micro-batches.

    Attributes:
      stack: of this stage's chunks [V, ...].
      rest: of what stands outside of the stack: the same on all stages, or of this stage's part of a cut table.
      shared: what this stage's layers add to the gradients of `rest`; to be summed over the stages.
    """

    stack: Any
    rest: Any
    shared: Any


def run_pipeline(
    parts: Parts,
    schedule: Schedule,
    axis: str,
    stack: Any,
    rest: Any,
    shared: Any,
    variables: Any,
    batch: Any,
    *,
    recompute: bool = True,
) -> tuple[Any, Any, Gradients | None]:
    """Runs a batch through the pipeline. Call it inside a region that is manual over `axis`.

    Args:
      parts: the model.
      schedule: the tables; one without backwards evaluates.
      axis: the pipeline's mesh axis.
      stack: trained parameters of this stage's chunks, a tree of arrays [V, ...].
      rest: trained parameters outside of the stack.
      shared: those of `rest` that the layers read.
      variables: handed from micro-batch to micro-batch.
      batch: a tree of arrays [M, ...].
      recompute: whether a backward computes its chunk's forward again (only the chunk's input is kept), or residuals
        are kept from the forward.

    Returns:
      (losses summed over the micro-batches, variables after the last, gradients or None).
    """
    loop = _Loop(parts, schedule, axis, stack, rest, shared, batch, recompute)
    state = loop.start(variables)
    for start, end, forward, backward in schedule.phases:
        rows = [_rows(work, start, end) for work in (schedule.forward, schedule.backward)]
        state, _ = lax.scan(lambda s, row, f=forward, b=backward: (loop.tick(s, row, f, b), None), state, rows)  # type: ignore[misc]
    gradients = Gradients(state["stack"], state["rest"], state["shared"]) if schedule.backward is not None else None
    return state["loss"], state["variables"], gradients


def _rows(work: Work | None, start: int, end: int) -> Any:
    """The table's rows of a phase; a missing table is empty."""
    if work is None:
        return None
    return {
        field.name: jnp.asarray(getattr(work, field.name)[start:end].astype(np.int32))
        for field in dataclasses.fields(work)
    }


class _Loop:
    """The body of the loop and its state, a dict:

    `arriving` (activation from the stage before), `returning` (cotangent from the stage after), `ring` (inputs or
    residuals), `outputs` (outputs of last chunks, where their backward is not at the same tick), `stack`, `rest`,
    `shared` (gradients), `loss`, `variables`.
    """

    def __init__(
        self,
        parts: Parts,
        schedule: Schedule,
        axis: str,
        stack: Any,
        rest: Any,
        shared: Any,
        batch: Any,
        recompute: bool,
    ):
        self.parts, self.schedule, self.axis = parts, schedule, axis
        self.weights, self.rest_weights, self.shared_weights, self.batch = stack, rest, shared, batch
        self.recompute = recompute
        self.training = schedule.backward is not None
        self.stage = lax.axis_index(axis)
        self.is_first, self.is_last = self.stage == 0, self.stage == schedule.stages - 1
        # 1F1B turns a micro-batch round at the tick in which its last chunk runs: its output need not be kept.
        self.keeps_outputs = schedule.name == "gpipe" and not recompute
        self.residuals = Residuals(parts.stage)

    def start(self, variables: Any) -> dict[str, Any]:
        micro, chunk = _take(self.batch, 0), _take(self.weights, 0)
        carry = jax.eval_shape(self.parts.first, self.rest_weights, micro)
        _, (loss, _) = jax.eval_shape(self.parts.last, self.rest_weights, variables, micro, carry)
        zeros = _zeros(carry)
        state = {"arriving": zeros, "loss": _zeros(loss), "variables": variables}
        if not self.training:
            return state
        kept: Any = carry
        if not self.recompute:
            kept = self.residuals.shapes(chunk, self.shared_weights, micro, carry, jnp.int32(0))
        slots = self.schedule.slots
        ring = jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), kept)
        outputs = jax.tree.map(lambda leaf: jnp.zeros((slots, *leaf.shape), leaf.dtype), carry)
        sums = {"stack": self.weights, "rest": self.rest_weights, "shared": self.shared_weights}
        return {
            **state,
            "returning": zeros,
            "ring": ring,
            "outputs": outputs if self.keeps_outputs else None,
            **{name: jax.tree.map(_accumulator, tree) for name, tree in sums.items()},
        }

    def tick(self, state: dict[str, Any], row: Any, forward: bool, backward: bool) -> dict[str, Any]:
        """One tick: what arrived is used, what comes of it is sent."""
        state = dict(state)
        arriving, output = state["arriving"], None
        if forward:
            work = {name: column[self.stage] for name, column in row[0].items()}
            output = self._forward(state, row[0], work)
            arriving = self._send(output, 1)
        if backward:
            work = {name: column[self.stage] for name, column in row[1].items()}
            state["returning"] = self._send(self._backward(state, row[1], work, output), -1)
        state["arriving"] = arriving
        return state

    def _forward(self, state: dict[str, Any], row: Any, work: Any) -> Any:
        """The chunk's output; keeps what its backward needs."""
        parts = self.parts
        enters = (row["on"][0] > 0) & (row["chunk"][0] == 0)  # the same on all stages: collectives are safe inside
        entering = _cond(
            enters,
            lambda: parts.first(self.rest_weights, _take(self.batch, row["microbatch"][0])),
            lambda: _zeros(state["arriving"]),
        )
        x = _where(self.is_first & (work["chunk"] == 0), entering, state["arriving"])
        arguments = self._stage_arguments(work, x)
        on = work["on"] > 0
        if self.training and not self.recompute:
            y, kept = self.residuals.forward(*arguments)
            state["ring"] = _put(state["ring"], kept, work["slot"], on)
        else:
            y = parts.stage(*arguments)
            if self.training:
                state["ring"] = _put(state["ring"], x, work["slot"], on)
        if self.keeps_outputs and self.training:
            state["outputs"] = _put(state["outputs"], y, work["slot"], on)
        if not self.training:
            self._evaluate(state, row, y)
        return y

    def _backward(self, state: dict[str, Any], row: Any, work: Any, output: Any) -> Any:
        """Adds this tick's gradients; the cotangent of the chunk's input."""
        parts, last = self.parts, self.schedule.stages - 1
        kept = _take(state["ring"], work["slot"])
        if self.recompute:
            arguments = self._stage_arguments(work, kept)
            chunk, shared, micro, x, number = arguments
            y, pull = jax.vjp(lambda c, s, x: parts.stage(c, s, micro, x, number), chunk, shared, x)
        else:
            arguments = self._stage_arguments(work, _zeros(state["arriving"]))
            pull = self.residuals.backward(kept, *arguments)
            y = _take(state["outputs"], work["slot"]) if self.keeps_outputs else output
            y = _zeros(state["arriving"]) if y is None else y

        leaves = (row["on"][last] > 0) & (row["chunk"][last] == self.schedule.chunks - 1)
        micro_out = _take(self.batch, row["microbatch"][last])

        def head(total: Any) -> tuple[Any, Any]:
            out = self._broadcast(y, self.is_last)
            gradients, (loss, variables) = jax.grad(parts.last, argnums=(0, 3), has_aux=True)(
                self.rest_weights, state["variables"], micro_out, out
            )
            added = jax.tree.map(_add, (total[0], total[1]), (gradients[0], loss))
            return (*added, variables), gradients[1]

        total, from_head = _cond(
            leaves,
            head,
            lambda total: (total, _zeros(state["arriving"])),
            (state["rest"], state["loss"], state["variables"]),
        )
        state["rest"], state["loss"], state["variables"] = total

        is_top = self.is_last & (work["chunk"] == self.schedule.chunks - 1)
        d_chunk, d_shared, d_x = pull(_where(is_top, from_head, state["returning"]))
        on = work["on"] > 0
        state["stack"] = jax.tree.map(
            lambda total, g: lax.dynamic_update_index_in_dim(
                total, _add(_at(total, work["chunk"]), jnp.where(on, g, 0)), work["chunk"], 0
            ),
            state["stack"],
            d_chunk,
        )
        state["shared"] = jax.tree.map(lambda total, g: _add(total, jnp.where(on, g, 0)), state["shared"], d_shared)

        entered = (row["on"][0] > 0) & (row["chunk"][0] == 0)
        micro_in = _take(self.batch, row["microbatch"][0])

        def embedding(total: Any) -> Any:
            pull_first = jax.vjp(lambda rest: parts.first(rest, micro_in), self.rest_weights)[1]
            return jax.tree.map(_add, total, pull_first(self._broadcast(d_x, self.is_first))[0])

        state["rest"] = _cond(entered, embedding, lambda total: total, state["rest"])
        return d_x

    def _evaluate(self, state: dict[str, Any], row: Any, y: Any) -> None:
        last = self.schedule.stages - 1
        leaves = (row["on"][last] > 0) & (row["chunk"][last] == self.schedule.chunks - 1)
        micro = _take(self.batch, row["microbatch"][last])

        def head(total: Any) -> Any:
            out = self._broadcast(y, self.is_last)
            _, (loss, variables) = self.parts.last(self.rest_weights, total[1], micro, out)
            return jax.tree.map(_add, total[0], loss), variables

        state["loss"], state["variables"] = _cond(
            leaves, head, lambda total: total, (state["loss"], state["variables"])
        )

    def _stage_arguments(self, work: Any, x: Any) -> tuple[Any, ...]:
        chunk, micro = _take(self.weights, work["chunk"]), _take(self.batch, work["microbatch"])
        return chunk, self.shared_weights, micro, x, work["chunk"] * self.schedule.stages + self.stage

    def _broadcast(self, tree: Any, mine: jax.Array) -> Any:
        """The tree of the one stage where `mine` is true, on all."""
        return sum_over(_where(mine, tree, _zeros(tree)), (self.axis,))

    def _send(self, tree: Any, step: int) -> Any:
        """To the next stage (or the one before). With one chunk a stage the last sends nothing to the first."""
        stages = self.schedule.stages
        pairs = [(i, (i + step) % stages) for i in range(stages)]
        if self.schedule.chunks == 1:
            pairs = [(i, j) for i, j in pairs if j - i == step]
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, self.axis, pairs), tree)


def _cond(condition: jax.Array, true: Callable[..., Any], false: Callable[..., Any], *operands: Any) -> Any:
    """`lax.cond` whose branches may pin their results to different places: XLA wants a conditional's to agree."""
    return lax.cond(
        condition,
        lambda *xs: lax.optimization_barrier(true(*xs)),
        lambda *xs: lax.optimization_barrier(false(*xs)),
        *operands,
    )


def _at(array: jax.Array, index: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(array, index, 0, keepdims=False)


def _take(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda leaf: _at(leaf, index), tree)


def _put(tree: Any, new: Any, index: Any, on: jax.Array) -> Any:
    """Replaces entry `index` of every array where `on` is true."""
    return jax.tree.map(
        lambda ring, leaf: lax.dynamic_update_index_in_dim(ring, jnp.where(on, leaf, _at(ring, index)), index, 0),
        tree,
        new,
    )


def _where(condition: jax.Array, a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def _accumulator(leaf: jax.Array) -> jax.Array:
    """Gradients are summed in float32 at least."""
    return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))


def _add(total: jax.Array, part: jax.Array) -> jax.Array:
    return total + part.astype(total.dtype)
