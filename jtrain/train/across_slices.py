"""Slices that compute by themselves: what crosses the slow network between them is decided here.

On an ordinary mesh XLA adds gradients over `data` wherever it likes, in float32. Here every slice computes those of its
own rows under `vmap`, so that they come as stacks [S, ...] cut over `data`, and nothing has crossed yet. The exchange
then sends them in fewer bytes (`jtrain/parallel/compression.py`), or `jtrain/train/local_steps.py` sends nothing at all
for many updates.

Legend: S slices, the size of the mesh axis `data`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jtrain.config.rules import slices_by_themselves
from jtrain.config.schema import Config, DcnConfig
from jtrain.ops.logical import logical_rules
from jtrain.parallel.compression import Bfloat16, Codec, Int8, MatrixShape, matrix_shape, sum_coded, sum_low_rank
from jtrain.train.gradients import Batch, GradientFn, in_their_place
from jtrain.train.loss import Loss
from jtrain.train.state import SKETCH_STREAM, StatePlan, TrainState, select, stream_key

SLOW = "data"
"""The mesh axis that the slow network carries."""
_MEMBERS = "slices"
_STACKED = ("layers", "expert")
"""Logical axes that number matrices."""
_CODECS: dict[str, Codec] = {"bf16": Bfloat16(), "int8": Int8()}

Kept = dict[str, Any]
"""`TrainState.across`: name -> tree. error: what each slice still owes [S, ...]; sketch: PowerSGD's right factors
[N, J, R]; and for local steps params [S, ...] and momentum."""


def by_slice(function: Callable[..., Any], in_axes: Any, out_axes: Any = 0) -> Callable[..., Any]:
    """`vmap` over the slices: each runs on devices of its own, and `psum` over "slices" crosses the slow network."""
    return jax.vmap(function, in_axes=in_axes, out_axes=out_axes, axis_name=_MEMBERS, spmd_axis_name=SLOW)


def stacked_place(place: NamedSharding) -> NamedSharding:
    """Where a stack [S, ...] lies: every slice holds its own entry, cut inside as `place` says."""
    return NamedSharding(place.mesh, PartitionSpec(SLOW, *place.spec), memory_kind=place.memory_kind)


def stacked(abstract: jax.ShapeDtypeStruct, slices: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """A stack [S, ...] of an array, in its place."""
    place = stacked_place(abstract.sharding)
    return jax.ShapeDtypeStruct((slices, *abstract.shape), dtype or abstract.dtype, sharding=place)


def gradients_of_slices(gradients: GradientFn, plan: StatePlan, *, own_params: bool = False) -> GradientFn:
    """Gradients of every slice's own rows; nothing of them crosses the slow network.

    Args:
      gradients: of a batch on an ordinary mesh.
      plan: the state's layout.
      own_params: whether `params` are stacks [S, ...] too.

    Returns:
      A function like `gradients` whose gradients and loss are stacks [S, ...]. Variables meet in every step: a float
      (batch statistics) is the mean over the slices, an integer (a count) moves by what all slices counted.
    """
    slices = plan.mesh.shape[SLOW]
    # Inside a slice `data` does not exist: rows are cut over the axes that are left.
    rules = {name: tuple(axis for axis in axes if axis != SLOW) for name, axes in plan.rules.items()}
    rows = NamedSharding(plan.mesh, PartitionSpec(None, SLOW, rules["batch"] or None))

    def split(x: jax.Array) -> jax.Array:
        """[A, b, ...] as [A, S, b / S, ...]: the rows of a slice lie side by side."""
        parts = x.reshape(x.shape[0], slices, x.shape[1] // slices, *x.shape[2:])
        return jax.lax.with_sharding_constraint(parts, rows)

    def meet(before: jax.Array, after: jax.Array) -> jax.Array:
        if jnp.issubdtype(before.dtype, jnp.integer):
            return before + (after - before).sum(0, dtype=before.dtype)
        return after.any(0) if before.dtype == bool else after.mean(0)

    def of_slices(params: Any, variables: Any, batch: Batch, rng: jax.Array, scale: jax.Array) -> Any:
        with logical_rules(plan.mesh, rules):
            run = by_slice(gradients, (0 if own_params else None, None, 1, None, None))
            grads, loss, after = run(params, variables, jax.tree.map(split, batch), rng, scale)
        return grads, loss, jax.tree.map(meet, variables, after)

    return of_slices


def total_loss(loss: Loss) -> Loss:
    """The loss over all slices, from [S] each: the first of the few numbers that cross in every step."""
    return jax.tree.map(lambda x: x.sum(0), loss)


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
    """Adds gradients over the slices.

    Attributes:
      plan: the state's layout: of the gradients and of the mesh.
      dcn: the config section.
      names: logical axis names of every parameter.
    """

    plan: StatePlan
    dcn: DcnConfig
    names: Any

    @property
    def mesh(self) -> Mesh:
        return self.plan.mesh

    @property
    def slices(self) -> int:
        return self.mesh.shape[SLOW]

    def abstract(self) -> Kept:
        """What it keeps from step to step, as shapes and places."""
        kept: Kept = {}
        matrices = self._matrices()
        if self.dcn.compression != "none" and self.dcn.error_feedback:
            kept["error"] = jax.tree.map(
                lambda p, place, sent: (
                    stacked(jax.ShapeDtypeStruct(p.shape, _wide(p.dtype), sharding=place), self.slices)
                    if sent
                    else None
                ),
                self._gradients(),
                self.plan.gradients,
                self._is_compressed(matrices),
            )
        if self.dcn.compression == "powersgd":
            whole = NamedSharding(self.mesh, PartitionSpec())
            kept["sketch"] = jax.tree.map(
                lambda p, m: m and jax.ShapeDtypeStruct(m.sketch(self.dcn.rank), _wide(p.dtype), sharding=whole),
                self._gradients(),
                matrices,
            )
        return kept

    def begin(self, seed: int) -> Kept:
        """What it keeps before the first step: no debts, and random sketches. Traceable."""
        kept: Kept = {}
        for part, tree in self.abstract().items():
            leaves, structure = jax.tree.flatten(tree)
            if part == "sketch":
                keys = jax.random.split(stream_key(seed, SKETCH_STREAM), len(leaves))
                drawn = [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)]
            else:
                drawn = [jnp.zeros(x.shape, x.dtype) for x in leaves]
            kept[part] = jax.tree.unflatten(structure, drawn)
        return kept

    def __call__(self, stacks: Any, kept: Kept, scale: Any = 1) -> tuple[Any, Kept]:
        """The sum over the slices.

        Args:
          stacks: gradients [S, ...], cut over `data`.
          kept: of the last step.
          scale: that the gradients were multiplied by; debts are kept without it.

        Returns:
          The sums, in the gradients' places, and what is kept now.
        """
        errors = kept.get("error")
        if errors is not None:
            errors = jax.tree.map(lambda e: e * jnp.asarray(scale, e.dtype), errors)
        sketches = kept.get("sketch")
        if self.dcn.compression in _CODECS:
            totals, errors = self._coded(stacks, errors)
        elif self.dcn.compression == "powersgd":
            totals, errors, sketches = self._low_rank(stacks, errors, sketches)
        else:
            totals = jax.tree.map(lambda x: x.sum(0), stacks)
        if errors is not None:
            errors = jax.tree.map(lambda e: e / jnp.asarray(scale, e.dtype), errors)
        kept = kept | ({} if errors is None else {"error": errors}) | ({} if sketches is None else {"sketch": sketches})
        return in_their_place(totals, self.plan), kept

    def _coded(self, stacks: Any, errors: Any) -> tuple[Any, Any]:
        """Every device sends its own shard: inside the region all axes are manual, and XLA has nothing to decide."""
        codec = _CODECS[self.dcn.compression]

        def one(x: jax.Array, place: NamedSharding, error: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
            def local(x: jax.Array, error: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
                total, owed = sum_coded(x[0], None if error is None else error[0], SLOW, codec)
                return total, None if owed is None else owed[None]

            stack = stacked_place(place).spec
            return jax.shard_map(
                local, mesh=self.mesh, in_specs=(stack, stack), out_specs=(place.spec, stack), check_vma=False
            )(x, error)

        return _unzip(stacks, lambda x, *rest: one(x, *rest), 2, self.plan.gradients, errors)

    def _low_rank(self, stacks: Any, errors: Any, sketches: Any) -> tuple[Any, Any, Any]:
        def one(
            x: jax.Array, place: NamedSharding, matrix: MatrixShape | None, error: Any, sketch: Any
        ) -> tuple[Any, Any, Any]:
            if matrix is None:
                return x.sum(0), None, None

            def member(x: jax.Array, error: jax.Array | None) -> tuple[jax.Array, jax.Array | None, jax.Array]:
                return sum_low_rank(x, error, sketch, _MEMBERS, matrix)

            total, owed, sketch = by_slice(member, 0, (None, 0, None))(x, error)
            if owed is not None:
                owed = jax.lax.with_sharding_constraint(owed, stacked_place(place))
            return total, owed, sketch

        return _unzip(stacks, one, 3, self.plan.gradients, self._matrices(), errors, sketches)

    def _gradients(self) -> Any:
        return select(self.plan.abstract.params, self.plan.trainable)

    def _matrices(self) -> Any:
        """The shape that PowerSGD sees, None where a gradient is sent as it is."""

        def one(p: Any, names: Any) -> MatrixShape | None:
            leading = 0
            while names is not None and leading < len(names) and names[leading] in _STACKED:
                leading += 1
            return matrix_shape(p.shape, self.dcn.rank, leading)

        return jax.tree.map(one, self._gradients(), select(self.names, self.plan.trainable))

    def _is_compressed(self, matrices: Any) -> Any:
        everything = self.dcn.compression in _CODECS
        return jax.tree.map(lambda p, m: everything or m is not None, self._gradients(), matrices)


@dataclasses.dataclass(frozen=True)
class AcrossSlices:
    """What the slices of a run keep, and how it begins.

    Attributes:
      exchange: adds gradients, or with local steps the changes of the parameters.
      seed: of the run.
    """

    exchange: Exchange
    seed: int

    @property
    def local(self) -> bool:
        """Whether every slice has parameters of its own."""
        return self.exchange.dcn.local_steps > 1

    def extend(self, plan: StatePlan) -> StatePlan:
        """The plan of a state that holds what slices keep, and with local steps an optimizer state a slice."""
        state, slices = plan.abstract, self.exchange.slices
        kept = self.exchange.abstract()
        opt_state = state.opt_state
        if self.local:
            trained = select(state.params, plan.trainable)
            kept["params"] = jax.tree.map(lambda p: stacked(p, slices), trained)
            kept["momentum"] = jax.tree.map(
                lambda p: jax.ShapeDtypeStruct(p.shape, _wide(p.dtype), sharding=p.sharding), trained
            )
            opt_state = jax.tree.map(lambda leaf: stacked(leaf, slices), opt_state)
        abstract = dataclasses.replace(state, across=kept or None, opt_state=opt_state)
        return dataclasses.replace(plan, abstract=abstract, across=self)

    def begin(self, params: Any) -> Kept | None:
        """What is kept before the first step, given the parameters. Traceable."""
        kept = self.exchange.begin(self.seed)
        if self.local:
            trained = select(params, self.exchange.plan.trainable)
            kept["params"] = jax.tree.map(self._for_all, trained)
            kept["momentum"] = jax.tree.map(lambda p: jnp.zeros(p.shape, _wide(p.dtype)), trained)
        return kept or None

    def init_optimizer(self, tx: optax.GradientTransformation, trained: Any) -> Any:
        """The first optimizer state, a slice each with local steps. Traceable."""
        opt_state = tx.init(trained)
        return jax.tree.map(self._for_all, opt_state) if self.local else opt_state

    def _for_all(self, x: Any) -> jax.Array:
        return jnp.broadcast_to(x, (self.exchange.slices, *jnp.shape(x)))


def exchange_name(config: Config) -> str | None:
    """How the slices meet, for the log; None where they do in every sum."""
    if slices_by_themselves(config) is None:
        return None
    dcn, slices = config.dcn, config.mesh.slices
    what = "float32" if dcn.compression == "none" else dcn.compression
    rounds = f", every {dcn.local_steps} steps" if dcn.local_steps > 1 else ""
    return f"{what} between {slices} slices{rounds}"


def complete(state: TrainState, plan: StatePlan) -> tuple[TrainState, list[str]]:
    """A restored state in which parts of `across` may be missing (shapes in place of arrays): they begin anew.

    Returns:
      The state, and the names of the parts that begin anew.
    """
    if plan.across is None or state.across is None:
        return state, []

    def is_missing(tree: Any) -> bool:
        return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))

    missing = sorted(part for part, tree in state.across.items() if is_missing(tree))
    if not missing:
        return state, []
    begin, places = plan.across.begin, plan.shardings.across

    def parts(params: Any) -> Kept:
        fresh = begin(params)
        return {part: fresh[part] for part in missing}

    fresh = jax.jit(parts, out_shardings={part: places[part] for part in missing})(state.params)
    return dataclasses.replace(state, across=state.across | fresh), missing


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _unzip(tree: Any, function: Callable[..., Any], count: int, *rest: Any) -> tuple[Any, ...]:
    """Maps a function with `count` results over trees: a tree each; a tree of `rest` may lack leaves, or be None."""
    leaves, structure = jax.tree.flatten(tree)
    empty = [None] * len(leaves)
    columns = [empty if other is None else structure.flatten_up_to(other) for other in rest]
    rows = [function(*row) for row in zip(leaves, *columns, strict=True)]
    results = []
    for i in range(count):
        column = [row[i] for row in rows]
        results.append(None if all(x is None for x in column) else jax.tree.unflatten(structure, column))
    return tuple(results)
