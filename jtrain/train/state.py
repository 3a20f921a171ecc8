"""The state of a run: one plain tree, its layout on the mesh, and how it is born.

`plan_state` knows every shape and sharding before anything is allocated; `init_state` draws the parameters straight
into their shards; `Checkpoints.restore` fills the same plan from disk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jtrain.ops.context import DEFAULT_OPTIONS, ContextOptions
from jtrain.parallel.sharding import (
    Rules,
    batch_sharding,
    extend_spec,
    make_rules,
    parameter_spec,
    shard_like_parameters,
)
from jtrain.parallel.xla import compiler_options
from jtrain.train.model import FunctionalModel
from jtrain.train.precision import LossScale, Precision, precision_policy
from jtrain.train.spikes import Numbers, NumbersRule

INIT_STREAM, TRAIN_STREAM, SAMPLE_STREAM, SKETCH_STREAM = range(4)  # the data has keys of its own: jtrain/data/order.py


def stream_key(seed: int, stream: int, step: int | jax.Array = 0) -> jax.Array:
    """The key of (seed, stream, step): the only source of randomness; nothing random is stored."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), step)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything on the devices that a run needs to continue.

    Attributes:
      step: int32 scalar, optimizer updates applied.
      skipped: int32 scalar, batches that no update was made of: their numbers were not finite, or a spike, or the run
        went back and left them out. The next batch is number `step + skipped`.
      params: nested dict of arrays.
      opt_state: the optax state, over the trainable parameters.
      variables: what the model keeps beside parameters (batch statistics, ...).
      loss_scale: fp16 only, else None.
      ema: moving average of the trainable parameters, else None.
      across: what slices keep that compute by themselves (`jtrain/train/across_slices.py`), else None. With local steps
        `params` are the outer parameters, and `opt_state` is a stack, one a slice.
      numbers: what the step remembers of its own numbers (`jtrain/train/spikes.py`), else None.
      beside: what a task changes between steps and a resume needs (`Trainer.beside`). The step never sees it: it stands
        in what is saved and restored, and is None elsewhere.
    """

    step: jax.Array
    skipped: jax.Array
    params: Any
    opt_state: Any
    variables: Any
    loss_scale: LossScale | None = None
    ema: Any = None
    across: Any = None
    numbers: Numbers | None = None
    beside: Any = None


@dataclasses.dataclass(frozen=True)
class StatePlan:
    """Shapes and places of a state.

    Attributes:
      abstract: a `TrainState` of `ShapeDtypeStruct`s with shardings.
      gradients: tree of `NamedSharding` of the (accumulated) gradients; None where a parameter is frozen.
      trainable: tree of bools, of the structure of the parameters.
      exact: the same: which parameters the model sees in the type that they are stored in.
      mesh: the mesh.
      rules: the table of logical axes.
      precision: what is stored, and what a step computes in.
      context: how tokens of a row that lie on several devices meet.
      across: how slices that compute by themselves begin (an `AcrossSlices`), else None.
    """

    abstract: TrainState
    gradients: Any
    trainable: Any
    exact: Any
    mesh: Mesh
    rules: Rules
    precision: Precision
    context: ContextOptions = DEFAULT_OPTIONS
    across: Any = None

    @property
    def shardings(self) -> TrainState:
        """A `TrainState` of `NamedSharding`s."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract)

    @property
    def window(self) -> int:
        """Updates whose numbers the state remembers; 0: none."""
        numbers = self.abstract.numbers
        return 0 if numbers is None or numbers.losses is None else numbers.losses.shape[0]

    def cast(self, params: Any) -> Any:
        """Parameters as the model sees them: in the compute type, but for those that are exact."""
        return jax.tree.map(lambda leaf, exact: leaf if exact else self.precision.cast(leaf), params, self.exact)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of a batch's arrays [A, b, ...], for the DataLoader."""
        return batch_sharding(self.mesh, self.rules)


def with_skipped(state: TrainState, count: int) -> TrainState:
    """The state with another count of skipped batches, hence with another next batch."""
    place = state.skipped.sharding
    skipped = jax.make_array_from_callback((), place, lambda _: np.asarray(count, np.int32))
    return dataclasses.replace(state, skipped=skipped)


def select(tree: Any, mask: Any) -> Any:
    """The tree with None where `mask` is False: optax and `jax.grad` then do not see these leaves."""
    return jax.tree.map(lambda keep, leaf: leaf if keep else None, mask, tree)


def combine(trained: Any, rest: Any, mask: Any) -> Any:
    """The inverse of `select`: leaves of `trained` where the mask is True, of `rest` elsewhere."""
    return jax.tree.map(lambda keep, a, b: a if keep else b, mask, trained, rest, is_leaf=lambda x: x is None)


def plan_state(
    model: FunctionalModel,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    rules: Rules | None = None,
    precision: Precision | str = "32-true",
    *,
    trainable: Any = None,
    optimizer_axes: Sequence[str] = (),
    gradient_axes: Sequence[str] = (),
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
    ema: bool = False,
    numbers: NumbersRule | None = None,
    context: ContextOptions = DEFAULT_OPTIONS,
) -> StatePlan:
    """Plans the state's layout without touching a device.

    Args:
      model: the split model (`functional_model`).
      tx: any optax chain.
      mesh: the mesh.
      rules: the table of `make_rules`; by default without overrides.
      precision: a policy, or its name in the config; its parameter dtype is the stored one.
      trainable: tree of bools; None trains all that the model does not freeze.
      optimizer_axes: mesh axes that divide the optimizer state beyond the parameters' own (ZeRO-1).
      gradient_axes: mesh axes that divide the gradients beyond the parameters' own (ZeRO-2).
      offload_optimizer: optimizer state in pinned host memory between steps.
      offload_parameters: parameters in pinned host memory between steps.
      ema: whether a moving average is kept.
      numbers: what of the numbers decides about an update; None: only whether they are finite.
      context: how tokens of a row that lie on several devices meet.
    """
    rules = make_rules() if rules is None else rules
    precision = precision_policy(precision, mesh.devices.flat[0]) if isinstance(precision, str) else precision
    trainable = jax.tree.map(lambda frozen: not frozen, model.has("frozen")) if trainable is None else trainable
    exact = model.has("exact")
    params = _stored(model, precision)

    def sharding(extra: Sequence[str], host: bool) -> Any:
        def one(leaf: jax.ShapeDtypeStruct, names: Any) -> NamedSharding:
            spec = extend_spec(parameter_spec(leaf.shape, names, mesh, rules), leaf.shape, extra, mesh)
            return NamedSharding(mesh, spec, memory_kind="pinned_host") if host else NamedSharding(mesh, spec)

        return jax.tree.map(one, params, model.names)

    places = sharding((), offload_parameters)
    moments = select(sharding(optimizer_axes, False), trainable)
    opt_state, opt_places = shard_like_parameters(tx, select(params, trainable), moments, mesh)
    if offload_optimizer:  # counters stay on the device: the step's arithmetic on them is scalar
        opt_places = jax.tree.map(
            lambda leaf, place: place.with_memory_kind("pinned_host") if leaf.ndim else place, opt_state, opt_places
        )
    replicated = NamedSharding(mesh, PartitionSpec())
    scalar = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    scale = LossScale(jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated), scalar)
    abstract = TrainState(
        step=scalar,
        skipped=scalar,
        params=_with(params, places),
        opt_state=_with(opt_state, opt_places),
        variables=jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated), model.variables
        ),
        loss_scale=scale if precision.loss_scaling else None,
        ema=_with(jax.eval_shape(_float32, select(params, trainable)), select(sharding((), False), trainable))
        if ema
        else None,
        numbers=jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated),
            jax.eval_shape(lambda: Numbers.begin(numbers.window)),
        )
        if numbers is not None and numbers.remembers
        else None,
    )
    gradients = select(sharding(gradient_axes, False), trainable)
    return StatePlan(abstract, gradients, trainable, exact, mesh, rules, precision, context)


def _stored(model: FunctionalModel, precision: Precision) -> Any:
    """Shapes and types of the parameters at rest."""
    params = jax.eval_shape(precision.store, model.params)
    for trait in ("exact", "own_type"):
        params = jax.tree.map(lambda keep, own, leaf: own if keep else leaf, model.has(trait), model.params, params)
    if precision.compute_dtype == jnp.bfloat16:
        computed = jax.eval_shape(precision.cast, params)
        params = jax.tree.map(lambda on, a, b: a if on else b, model.has("compute_type"), computed, params)
    return params


def init_state(
    model: FunctionalModel, tx: optax.GradientTransformation, plan: StatePlan, *, seed: int, drawn: Any = None
) -> TrainState:
    """The initial state, every array born in its shards. The same bits on every mesh.

    Args:
      model: the split model.
      tx: the optax chain whose state the plan holds.
      plan: the state's layout.
      seed: of the run.
      drawn: tree of bools: the parameters that are wanted. The others, which come from elsewhere, are neither drawn nor
        in the result (None), and nor are the average and `across`, which begin with them. None: all of it.
    """
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, plan.abstract.params)

    def create() -> TrainState:
        params, variables = model.init(stream_key(seed, INIT_STREAM))
        params = jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), params, dtypes)
        trained, across = select(params, plan.trainable), plan.across
        return TrainState(
            step=jnp.int32(0),
            skipped=jnp.int32(0),
            params=params if drawn is None else select(params, drawn),
            opt_state=tx.init(trained) if across is None else across.init_optimizer(tx, trained),
            variables=variables,
            loss_scale=None if plan.abstract.loss_scale is None else LossScale.create(),
            ema=None if plan.abstract.ema is None or drawn is not None else _float32(trained),
            across=None if across is None or drawn is not None else across.begin(params),
            numbers=None if plan.abstract.numbers is None else Numbers.begin(plan.window),
        )

    places = plan.shardings
    if drawn is not None:
        places = dataclasses.replace(places, params=select(places.params, drawn), ema=None, across=None)
    options = compiler_options(plan.mesh.devices.flat[0].platform, run_once=True)
    return jax.jit(create, out_shardings=places, compiler_options=options)()


def _with(shapes: Any, places: Any) -> Any:
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, places
    )


def _float32(tree: Any) -> Any:
    """Averages are kept in float32 (or wider): a step of 1e-4 would vanish in bfloat16."""
    return jax.tree.map(
        lambda leaf: (
            leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
            if jnp.issubdtype(leaf.dtype, jnp.floating)
            else leaf
        ),
        tree,
    )
