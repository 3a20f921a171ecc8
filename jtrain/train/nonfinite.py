"""Where numbers first stop being finite: in the state, the batch, a layer, the loss or a gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.checkpoint import arrays
from jtrain.ops.stack import Body, stack_runner
from jtrain.train.gradients import Batch, per_micro_batch
from jtrain.train.loss import call_loss
from jtrain.train.program import Program
from jtrain.train.state import TRAIN_STREAM, TrainState, stream_key
from jtrain.train.step import jit, loss_multiplier, to_device


class Place(NamedTuple):
    """Where it is.

    Attributes:
      kind: parameter, optimizer, batch, embedding (what goes into the first layer), layer, loss or gradient.
      name: of the array; of a layer the number of its stack (0, unless the model has several).
      layers: the layer; of an array that holds all layers, those that are not finite.
      micro_batches: numbers of the micro-batches.
    """

    kind: str
    name: str = ""
    layers: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()


def first_nonfinite(program: Program, state: TrainState, batch: Batch) -> list[Place]:
    """Looks in the order in which an update comes about, and stops at the first kind that has any.

    Compiles the forward pass and the gradients of a batch; the state stays the caller's.

    Returns:
      The places; none where all is finite.
    """
    stored = [*_arrays("parameter", state.params, program), *_arrays("optimizer", state.opt_state, program)]
    for found in ([place for place in stored if place.kind == kind] for kind in ("parameter", "optimizer")):
        if found:
            return found
    if found := _arrays("batch", batch, program):
        return found
    if found := _forward(program, state, batch):
        return found
    if program.gradients is None:
        return []

    def gradients(state: TrainState, batch: Batch) -> Any:
        state = to_device(state, program.plan.abstract)
        rng = stream_key(program.config.seed, TRAIN_STREAM, state.step + state.skipped)
        scale = loss_multiplier(state, batch, program.precision)
        assert program.gradients is not None
        return program.gradients(state.params, state.variables, batch, rng, scale)[0]

    return _arrays("gradient", jit(gradients, program.plan, None)(state, batch), program)


def _arrays(kind: str, tree: Any, program: Program) -> list[Place]:
    """Arrays that are not finite; `layers` of those of the model's stacks."""
    floats = {path: x for path, x in arrays.flatten(tree).items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    stacked = _stacked(program) if kind != "batch" else set()

    def flags(flat: dict[str, jax.Array]) -> dict[str, jax.Array]:
        def one(path: str, x: jax.Array) -> jax.Array:
            entries = x.ndim > 1 and any(path == name or path.endswith(f"/{name}") for name in stacked)
            return jnp.isfinite(x).all(range(1, x.ndim)) if entries else jnp.isfinite(x).all()

        return {path: one(path, x) for path, x in flat.items()}

    replicated = jax.sharding.NamedSharding(program.mesh, jax.sharding.PartitionSpec())
    found = jax.device_get(jax.jit(flags, out_shardings=replicated)(floats))
    return [
        Place(kind, path, tuple(np.flatnonzero(~fine).tolist()) if fine.ndim else ())
        for path, fine in found.items()
        if not fine.all()
    ]


def _stacked(program: Program) -> set[str]:
    """Paths of parameters whose first axis numbers the layers."""
    names = program.model.names
    flat = arrays.flatten(program.plan.abstract.params)
    axes = jax.tree.structure(program.plan.abstract.params).flatten_up_to(names)
    return {path for path, logical in zip(flat, axes, strict=True) if logical and logical[0] == "layers"}


def _forward(program: Program, state: TrainState, batch: Batch) -> list[Place]:
    """Runs the loss layer by layer: the layers whose outcome is not finite, else the loss."""
    model, plan = program.model, program.plan

    def forward(state: TrainState, batch: Batch) -> Any:
        state = to_device(state, plan.abstract)
        rng = stream_key(program.config.seed, TRAIN_STREAM, state.step + state.skipped)
        params = plan.cast(state.params)

        def one(micro: Batch) -> tuple[list[jax.Array], jax.Array]:
            stacks: list[jax.Array] = []

            def watched(body: Body, carry: Any, parameters: Any, data: Any) -> Any:
                def layer(carry: Any, xs: Any) -> tuple[Any, jax.Array]:
                    carry = body(carry, xs)
                    return carry, _finite(carry)

                before = _finite(carry)
                carry, after = jax.lax.scan(layer, carry, (parameters, data))
                stacks.append(jnp.concatenate([before[None], after]))
                return carry

            module = model.merge(params, state.variables, per_micro_batch(rng, micro))
            module.train()
            with stack_runner(watched):
                loss = call_loss(program.loss_fn, module, micro, rng)
            return stacks, jnp.isfinite(loss.sum)

        return jax.lax.map(one, batch)

    stacks, losses = jax.device_get(jit(forward, plan, None)(state, batch))
    for number, fine in enumerate(stacks):  # [A, 1 + layers]
        micro = np.flatnonzero(~fine.all(1))
        if len(micro):
            first = int(np.argmin(fine[micro].all(0)))
            if first == 0:
                return [Place("embedding", str(number), (), tuple(micro.tolist()))]
            return [Place("layer", str(number), (first - 1,), tuple(micro.tolist()))]
    micro = np.flatnonzero(~losses)
    return [Place("loss", "", (), tuple(micro.tolist()))] if len(micro) else []


def _finite(tree: Any) -> jax.Array:
    flags = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack(flags).all() if flags else jnp.bool_(True)
