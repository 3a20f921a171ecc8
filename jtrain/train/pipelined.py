"""Gradients and evaluation over a pipeline, for any model that runs its layers by `scan_layers` and any loss.

The loss function is traced three times, and `scan_layers` tells its parts apart: up to the call is what stands before
the stack, the body of the call is a layer, and what follows with the stack's result is what stands after it. No model
and no loss is divided by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval
from jax.sharding import PartitionSpec

from jtrain.errors import ConfigError
from jtrain.ops.collectives import sum_over
from jtrain.ops.logical import logical_rules
from jtrain.ops.stack import Body, stack_runner
from jtrain.parallel.pipeline.executor import Parts, run_pipeline
from jtrain.parallel.pipeline.layout import (
    PIPELINE,
    Division,
    Layout,
    as_spec,
    automatic_part,
    check_layers,
    manual_part,
)
from jtrain.parallel.pipeline.schedule import Schedule, make_schedule
from jtrain.train.gradients import Batch, GradientFn, in_their_place, per_micro_batch
from jtrain.train.loss import Loss, LossFn, call_loss
from jtrain.train.model import FunctionalModel
from jtrain.train.state import StatePlan

MANUAL = (PIPELINE, "data", "fsdp")
"""Axes of the region. With fsdp left to the partitioner, weights would be gathered at every tick."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How a step's rows and layers go through the stages.

    Attributes:
      schedule: gpipe, 1f1b or interleaved.
      stages: S, the size of the mesh axis.
      microbatches: micro-batches that each accumulation micro-batch is split into.
      chunks: V, chunks a stage.
      recompute: whether a backward computes its chunk's forward again.
    """

    schedule: str
    stages: int
    microbatches: int
    chunks: int = 1
    recompute: bool = True

    def tables(self, accumulation: int, *, training: bool = True) -> Schedule:
        """The schedule of a step of so many accumulation micro-batches: all of them go through in one run."""
        return make_schedule(
            self.schedule, self.stages, self.microbatches * accumulation, self.chunks, training=training
        )


def pipelined_gradients(model: FunctionalModel, loss_fn: LossFn, plan: StatePlan, pipeline: Pipeline) -> GradientFn:
    """The `GradientFn` of a mesh with a pipeline: the gradients of `accumulated_gradients`, from another order of work.

    The micro-batches of all accumulation steps go through in one run: its bubble is paid once.
    """
    return _Region(model, loss_fn, plan, pipeline).gradients


def pipelined_loss(
    model: FunctionalModel, loss_fn: LossFn, plan: StatePlan, pipeline: Pipeline
) -> Callable[[Any, Any, Batch], Loss]:
    """`loss(params, variables, batch) -> Loss` of an evaluation batch, forwards only; params in the compute type."""
    return _Region(model, loss_fn, plan, pipeline).loss


class _Captured(BaseException):
    """Ends a trace at the stack, with what goes in or comes out. No `except Exception` of a loss may catch it."""

    def __init__(self, carry: Any, parameters: Any = None):
        super().__init__("captured")
        self.carry, self.parameters = carry, parameters


class _Region:
    """One model and loss over one mesh."""

    def __init__(self, model: FunctionalModel, loss_fn: LossFn, plan: StatePlan, pipeline: Pipeline):
        self.model, self.loss_fn, self.plan, self.pipeline = model, loss_fn, plan, pipeline
        # Axes of size 1 as well: a Pallas kernel wants no axis to be automatic.
        self.manual = tuple(axis for axis, size in plan.mesh.shape.items() if axis in MANUAL or size == 1)
        self.rows = tuple(axis for axis in plan.rules["batch"] if axis in self.manual and plan.mesh.shape[axis] > 1)
        leaves, self.tree = jax.tree.flatten(plan.abstract.params)
        self.shapes = [leaf.shape for leaf in leaves]
        self.trainable = jax.tree.leaves(plan.trainable)
        self.names = self.tree.flatten_up_to(model.names)

    # --- entries, outside of the region

    def gradients(self, params: Any, variables: Any, batch: Batch, rng: jax.Array, scale: jax.Array) -> Any:
        """See `GradientFn`."""
        params = jax.tree.leaves(self.plan.cast(params))
        stack, layouts = self._divide(params, variables, batch, rng)

        def region(params: Any, variables: Any, batch: Batch, rng: jax.Array, scale: jax.Array) -> Any:
            with self._rules(stack):
                return self._train(stack, layouts, params, variables, batch, rng, scale)

        stored = [as_spec(layout.stored) for layout in layouts]
        places = [as_spec(layout.gradient) if on else None for layout, on in zip(layouts, self.trainable, strict=True)]
        whole = PartitionSpec()
        mapped = jax.shard_map(
            region,
            mesh=self.plan.mesh,
            in_specs=(stored, whole, self._row_spec(batch), whole, whole),
            out_specs=(places, whole, whole),
            axis_names=set(self.manual),
            check_vma=False,
        )
        grads, loss, variables = mapped(params, variables, batch, rng, scale)
        return in_their_place(jax.tree.unflatten(self.tree, grads), self.plan), loss, variables

    def loss(self, params: Any, variables: Any, batch: Batch) -> Loss:
        """The loss of a batch [A, b, ...], nothing random."""
        params = jax.tree.leaves(params)
        stack, layouts = self._divide(params, variables, batch, None)

        def region(params: Any, variables: Any, batch: Batch) -> Loss:
            with self._rules(stack):
                return self._evaluate(stack, layouts, params, variables, batch)

        return jax.shard_map(
            region,
            mesh=self.plan.mesh,
            in_specs=([as_spec(layout.stored) for layout in layouts], PartitionSpec(), self._row_spec(batch)),
            out_specs=PartitionSpec(),
            axis_names=set(self.manual),
            check_vma=False,
        )(params, variables, batch)

    # --- inside of the region

    def _train(
        self, stack: list[int], layouts: list[Layout], params: Any, variables: Any, batch: Batch, rng: Any, scale: Any
    ) -> Any:
        model = _Split(self, stack, layouts, [layout.gather(x) for layout, x in zip(layouts, params, strict=True)])
        micro_batches = self._micro_batches(batch, self.pipeline.microbatches)
        schedule = self.pipeline.tables(jax.tree.leaves(batch)[0].shape[0])
        shared = model.shared(variables, micro_batches, rng)
        loss, after, grads = run_pipeline(
            model.parts(variables, rng, scale, shared),
            schedule,
            PIPELINE,
            model.stack,
            model.rest,
            [model.rest[i] for i in shared],
            variables,
            micro_batches,
            recompute=self.pipeline.recompute,
        )
        assert grads is not None
        rest = list(grads.rest)
        for i, g in zip(shared, sum_over(grads.shared, (PIPELINE,)), strict=True):
            rest[i] = rest[i] + g
        by_leaf = dict(zip(model.stack_leaves, grads.stack, strict=True))
        by_leaf |= dict(zip(model.rest_leaves, rest, strict=True))
        reduced = [layouts[i].reduce(by_leaf[i]) if i in by_leaf else None for i in range(len(layouts))]
        # Rows of other ranks changed their own copies: what a model sums up beside its parameters is summed over all.
        after = jax.tree.map(lambda new, old: old + sum_over(new - old, self.rows), after, variables)
        return reduced, sum_over(loss, self.rows), after

    def _evaluate(self, stack: list[int], layouts: list[Layout], params: Any, variables: Any, batch: Batch) -> Loss:
        model = _Split(self, stack, layouts, [layout.gather(x) for layout, x in zip(layouts, params, strict=True)])
        rows = jax.tree.leaves(batch)[0].shape[1]
        split = max(m for m in range(1, min(self.pipeline.microbatches, rows) + 1) if rows % m == 0)
        micro_batches = self._micro_batches(batch, split)
        pipeline = dataclasses.replace(self.pipeline, microbatches=split)
        schedule = pipeline.tables(jax.tree.leaves(batch)[0].shape[0], training=False)
        parts = model.parts(variables, None, jnp.ones(()), [])
        loss, _, _ = run_pipeline(parts, schedule, PIPELINE, model.stack, model.rest, [], variables, micro_batches)
        return sum_over(loss, self.rows)

    def _micro_batches(self, batch: Batch, split: int) -> Batch:
        """[A, b, ...] -> [A M, b / M, ...], of this rank's rows."""
        return jax.tree.map(lambda x: x.reshape(x.shape[0] * split, x.shape[1] // split, *x.shape[2:]), batch)

    # --- what is known from shapes

    def _divide(
        self, params: list[jax.Array], variables: Any, batch: Batch, rng: Any
    ) -> tuple[list[int], list[Layout]]:
        """Which leaves are the stack's, in the order in which `scan_layers` gets them, and the way of every leaf."""
        micro = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batch)
        order: list[int] = []

        def probe(params: list[jax.Array], variables: Any, micro: Batch, rng: Any) -> None:
            def runner(body: Body, carry: Any, parameters: Any, data: Any) -> Any:
                raise _Captured(carry, parameters)

            captured = self._trace(runner, params, variables, micro, rng)
            if not isinstance(captured, _Captured):
                raise ConfigError(
                    f"mesh.pipeline={self.pipeline.stages}: this model and loss run no stack of layers",
                    "run equal, stacked layers by jtrain.scan_layers (docs/pipeline.md), or write mesh.pipeline: 1",
                )
            place = {id(leaf): i for i, leaf in enumerate(params)}
            order.extend(place.get(id(leaf), -1) for leaf in jax.tree.leaves(captured.parameters))
            if -1 in order:
                raise ConfigError(
                    "the parameters given to scan_layers are not the model's own arrays, as they are stored",
                    "give the stacked parameters unchanged; cast or reshape them inside of the body",
                )
            for leaf in jax.tree.leaves(captured.carry):
                if not jnp.issubdtype(leaf.dtype, jnp.floating):
                    raise ConfigError(
                        f"the carry of scan_layers holds an array of type {leaf.dtype}",
                        "carry floating-point arrays only; give whole numbers by the body's closure or data",
                    )

        jax.eval_shape(probe, params, variables, micro, rng)
        depths = {self.shapes[i][0] for i in order}
        if len(depths) != 1:
            raise ConfigError(f"the arrays given to scan_layers have {sorted(depths)} layers", "stack them alike")
        layers = depths.pop()
        check_layers(layers, self.pipeline.stages, self.pipeline.chunks)
        division = Division(layers, self.pipeline.stages, self.pipeline.chunks)
        return order, [self._layout(i, division if i in order else None) for i in range(len(params))]

    def _layout(self, leaf: int, division: Division | None) -> Layout:
        shape, names = self.shapes[leaf], self.names[leaf]
        rank, plan = len(shape), self.plan
        cut = 0 if division is not None else None
        if cut is None and names is not None and "vocab" in names and self._cuts_vocabulary:
            cut = list(names).index("vocab")
        places = jax.tree.leaves(plan.abstract.params)[leaf].sharding.spec
        gradient = self.tree.flatten_up_to(plan.gradients)[leaf]
        return Layout(
            stored=manual_part(places, rank, self.manual),
            gradient=manual_part(places if gradient is None else gradient.spec, rank, self.manual),
            free=automatic_part(places, rank, self.manual, plan.mesh),
            cut=cut,
            size=0 if cut is None else shape[cut],
            division=division,
            stages=self.pipeline.stages,
            batch_axes=self.rows,
        )

    @property
    def _cuts_vocabulary(self) -> bool:
        """Whether the model looks up and scores tokens by `jtrain.ops`, which sum over a cut vocabulary."""
        return PIPELINE in self.plan.rules.get("vocab", ()) and self.model.vocabulary_parallel

    def _rules(self, stack: list[int]) -> Any:
        rules = self.plan.rules
        vocabularies = {
            shape[list(names).index("vocab")]
            for shape, names in zip(self.shapes, self.names, strict=True)
            if names is not None and "vocab" in names
        }
        if not self._cuts_vocabulary:
            rules = {**rules, "vocab": tuple(axis for axis in rules.get("vocab", ()) if axis != PIPELINE)}
        sizes = {"vocab": max(vocabularies)} if vocabularies else {}
        return logical_rules(self.plan.mesh, rules, manual=self.manual, sizes=sizes)

    def _row_spec(self, batch: Batch) -> Any:
        return jax.tree.map(lambda _: PartitionSpec(None, self.rows or None), batch)

    def _trace(
        self, runner: Any, params: list[Any], variables: Any, micro: Batch, rng: Any
    ) -> _Captured | tuple[Loss, Any] | None:
        """Traces the loss with the stack given to `runner`: what it captured, or (loss, variables) if it returned."""
        calls = 0

        def once(body: Body, carry: Any, parameters: Any, data: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise ConfigError(
                    "the loss runs the stack of layers twice, and a pipeline runs it once a micro-batch",
                    "put both batches into one call of the model (concatenate their rows), or write mesh.pipeline: 1",
                )
            return runner(body, carry, parameters, data)

        module = self.model.merge(
            jax.tree.unflatten(self.tree, params), variables, None if rng is None else per_micro_batch(rng, micro)
        )
        module.eval() if rng is None else module.train()
        try:
            with stack_runner(once):
                loss = call_loss(self.loss_fn, module, micro, rng)
        except _Captured as captured:
            return captured
        return (loss, self.model.variables_of(module)) if calls else None


class _Split:
    """The model's parts as functions of the trained leaves of its stack and of the rest, inside of the region."""

    def __init__(self, region: _Region, stack: list[int], layouts: list[Layout], leaves: list[jax.Array]):
        self.region, self.leaves = region, leaves
        on = region.trainable
        self.order = stack
        self.stack_leaves = sorted(i for i in stack if on[i])
        self.rest_leaves = [i for i in range(len(leaves)) if i not in stack and on[i]]
        self.stack = [leaves[i] for i in self.stack_leaves]
        self.rest = [leaves[i] for i in self.rest_leaves]
        division = layouts[stack[0]].division
        assert division is not None
        self.division = division

    def parts(self, variables: Any, rng: Any, scale: jax.Array, shared: list[int]) -> Parts:
        """The parts for `run_pipeline`; `shared`: numbers of the leaves of `rest` that the layers read."""
        region = self.region

        def first(rest: list[jax.Array], micro: Batch) -> Any:
            def runner(body: Body, carry: Any, parameters: Any, data: Any) -> Any:
                raise _Captured(carry)

            captured = region._trace(runner, self._params(rest), variables, micro, rng)
            assert isinstance(captured, _Captured)
            return captured.carry

        def stage(chunk: list[jax.Array], read: list[jax.Array], micro: Batch, carry: Any, number: jax.Array) -> Any:
            rest = list(self.rest)
            for i, leaf in zip(shared, read, strict=True):
                rest[i] = leaf
            runner = self._runner(carry, chunk, number)
            captured = region._trace(runner, self._params(rest), variables, micro, rng)
            assert isinstance(captured, _Captured)
            return captured.carry

        def last(rest: list[jax.Array], variables: Any, micro: Batch, carry: Any) -> Any:
            def runner(body: Body, _: Any, parameters: Any, data: Any) -> Any:
                return carry

            out = region._trace(runner, self._params(rest), variables, micro, rng)
            assert isinstance(out, tuple)
            return out[0].sum * scale, out

        return Parts(first, stage, last)

    def shared(self, variables: Any, micro_batches: Batch, rng: Any) -> list[int]:
        """Numbers of the leaves of `rest` that a layer's result depends on: most models have none."""
        micro = jax.tree.map(lambda x: x[0], micro_batches)
        parts = self.parts(variables, rng, jnp.ones(()), list(range(len(self.rest))))

        def probe(rest: list[jax.Array]) -> Any:
            carry = jax.tree.map(jax.lax.stop_gradient, parts.first(self.rest, micro))
            chunk = [leaf[0] for leaf in self.stack]
            return parts.stage(chunk, rest, micro, carry, jnp.int32(0))

        jaxpr = jax.make_jaxpr(probe)(self.rest)
        _, used = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
        return [i for i, read in enumerate(used) if read]

    def _runner(self, x: Any, trained: list[jax.Array], number: jax.Array) -> Any:
        """Runs the layers of one chunk; layers that are padding hand on what they get."""
        division = self.division
        chunk = number // self.region.pipeline.stages
        leaves = {
            i: jax.lax.dynamic_index_in_dim(self.leaves[i], chunk, 0, keepdims=False)
            for i in self.order
            if i not in self.stack_leaves
        }
        leaves |= dict(zip(self.stack_leaves, trained, strict=True))

        def runner(body: Body, _: Any, parameters: Any, data: Any) -> Any:
            parameters = jax.tree.unflatten(jax.tree.structure(parameters), [leaves[i] for i in self.order])
            layers = number * division.layers_per_chunk + jnp.arange(division.layers_per_chunk)
            live = layers < division.layers
            data = jax.tree.map(lambda leaf: leaf[jnp.minimum(layers, division.layers - 1)], data)

            def layer(carry: Any, xs: Any) -> tuple[Any, None]:
                new = body(carry, xs[:2])
                if division.padded > division.layers:
                    new = jax.tree.map(lambda a, b: jnp.where(xs[2], a, b), new, carry)
                return new, None

            raise _Captured(jax.lax.scan(layer, x, (parameters, data, live))[0])

        return runner

    def _params(self, rest: list[jax.Array]) -> list[jax.Array]:
        """All leaves, with these of the rest. Those of the stack have their shapes only: the runner has the chunk's."""
        leaves = list(self.leaves)
        for i in self.order:
            leaves[i] = jnp.zeros(self.region.shapes[i], leaves[i].dtype)
        for i, leaf in zip(self.rest_leaves, rest, strict=True):
            leaves[i] = leaf
        return leaves
