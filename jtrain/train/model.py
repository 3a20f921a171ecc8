"""A Flax NNX model as the step sees it: a graph definition beside a plain tree of parameters.

The state of a run is a pure nested dict of arrays (cheap to dispatch, easy to save); the module is put together again
inside the traced step.
"""

from __future__ import annotations

import dataclasses
import inspect
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jtrain.errors import ConfigError
from jtrain.train.optimizers import path_of

TRAITS = ("frozen", "own_type", "compute_type", "exact")
ModelFactory = Callable[[nnx.Rngs], nnx.Module]


@dataclasses.dataclass(frozen=True)
class FunctionalModel:
    """A model split into structure and values.

    Attributes:
      init: function of a key -> (params, variables): the initial values; traceable, so that they can be born sharded.
      params: tree of ShapeDtypeStruct (pure nested dict), the `nnx.Param`s.
      variables: the same for everything else that a model keeps (batch statistics, ...), without random states.
      names: tree of the structure of `params`: logical axis names of each parameter, or None.
      traits: the same: which of `TRAITS` are set in a parameter's metadata
        (`jtrain.models.parameters`).
      vocabulary_parallel: whether the module's class says so: its tables with a "vocab" axis are read by `jtrain.ops`
        only (`embedding_lookup`, `cross_entropy`), which work on a part of the vocabulary as well.
    """

    init: Callable[[jax.Array], tuple[Any, Any]]
    params: Any
    variables: Any
    names: Any
    traits: Any
    vocabulary_parallel: bool
    _graphdef: Any
    _states: tuple[Any, Any, Any]

    def has(self, trait: str) -> Any:
        """Tree of bools: which parameters have the trait."""
        return jax.tree.map(lambda traits: trait in traits, self.traits, is_leaf=lambda x: isinstance(x, frozenset))

    def merge(self, params: Any, variables: Any, rng: jax.Array | None = None) -> nnx.Module:
        """The module with these values. `rng` seeds its own random streams (`nnx.Dropout` and the like)."""
        param_state, variable_state, random_state = self._states
        return nnx.merge(
            self._graphdef, _fill(param_state, params), _fill(variable_state, variables), _reseed(random_state, rng)
        )

    def variables_of(self, model: nnx.Module) -> Any:
        """The values of a merged module's variables, after a forward pass may have changed them."""
        _, _, variables, _ = nnx.split(model, nnx.Param, nnx.Not(nnx.RngState), ...)
        return _pure(variables)

    def end_step(self, params: Any, variables: Any) -> tuple[Any, dict[str, jax.Array]]:
        """The variables after the module's `end_step()`, and the figures that it returned.

        A module may define it for what happens once an update, after all of its micro-batches (the balancing bias of a
        mixture of experts). It may change variables, not parameters, and return name -> scalar, or None.
        """
        module = self.merge(params, variables)
        hook = getattr(module, "end_step", None)
        if hook is None:
            return variables, {}
        figures = hook()
        return self.variables_of(module), figures or {}


def functional_model(model: ModelFactory | type[nnx.Module] | nnx.Module) -> FunctionalModel:
    """Splits a model.

    Args:
      model: a class or function that takes `rngs` (an `nnx.Rngs`) and returns a module, or a module (whose values are
        then the initial ones).

    Raises:
      ConfigError: it is neither, or has no parameters.
    """
    if isinstance(model, nnx.Module):
        module = model
        build: ModelFactory = lambda rngs: module  # noqa: E731
        given = nnx.split(module, nnx.Param, nnx.Not(nnx.RngState), ...)[1:3]
    elif callable(model):
        named = "rngs" in inspect.signature(model).parameters
        build = lambda rngs: model(rngs=rngs) if named else model(rngs)  # type: ignore[call-arg]  # noqa: E731
        given = None
    else:
        raise ConfigError(
            f"model={model!r} is not a Flax NNX module", "pass a module, its class, or a function of rngs"
        )

    vocabulary_parallel = False

    def split(key: jax.Array) -> tuple[Any, Any, Any, Any]:
        nonlocal vocabulary_parallel
        with nnx.use_eager_sharding(False):
            module = build(nnx.Rngs(key))
            vocabulary_parallel = getattr(module, "vocabulary_parallel", False)
            return nnx.split(module, nnx.Param, nnx.Not(nnx.RngState), ...)

    graphdef, params, variables, random = _abstract(split)
    if not jax.tree.leaves(params):
        raise ConfigError(f"model={model!r} has no nnx.Param", "declare what is to be trained as nnx.Param")

    def init(key: jax.Array) -> tuple[Any, Any]:
        if given is not None:
            return _pure(given[0]), _pure(given[1])
        _, drawn, kept, _ = split(key)
        return _pure(drawn), _pure(kept)

    pure = _pure(params)
    names = _metadata(params, pure, _names)
    traits = _metadata(params, pure, lambda metadata: frozenset(trait for trait in TRAITS if metadata.get(trait)))
    states = (params, variables, random)
    return FunctionalModel(init, pure, _pure(variables), names, traits, vocabulary_parallel, graphdef, states)


def _abstract(split: Callable[[jax.Array], tuple[Any, Any, Any, Any]]) -> tuple[Any, Any, Any, Any]:
    graphdef = None

    def states(key: jax.Array) -> Any:
        nonlocal graphdef
        graphdef, *rest = split(key)
        return tuple(rest)

    params, variables, random = jax.eval_shape(states, jax.random.key(0))
    return graphdef, params, variables, random


def _names(metadata: dict[str, Any]) -> Any:
    """Logical axis names of a parameter."""
    names = metadata.get("out_sharding")
    return None if names is None else tuple(names)


def _metadata(params: Any, pure: Any, read: Callable[[dict[str, Any]], Any]) -> Any:
    """What `read` makes of the Flax metadata of every parameter, as a tree of the structure of `pure`."""
    flat = nnx.to_flat_state(params)
    table = {"/".join(map(str, path)): read(variable.get_metadata()) for path, variable in flat}
    return jax.tree_util.tree_map_with_path(lambda path, _: table[path_of(path)], pure)


def _pure(state: Any) -> dict[str, Any]:
    """A nested dict with string keys (indices of lists too: storage knows no others)."""

    def strings(tree: Any) -> Any:
        return {str(key): strings(value) for key, value in tree.items()} if isinstance(tree, dict) else tree

    return strings(nnx.to_pure_dict(state))


def _fill(state: Any, values: Any) -> Any:
    """A copy of an NNX state with these values (the structure stays untouched for the next trace)."""
    filled = jax.tree.map(lambda leaf: leaf, state)
    nnx.replace_by_pure_dict(filled, values)
    return filled


def _reseed(random: Any, rng: jax.Array | None) -> Any:
    """Random streams of a module as functions of `rng` and their place in it; counters start at 0 in every step."""
    rng = jax.random.key(0) if rng is None else rng

    def one(path: tuple[Any, ...], leaf: Any) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.fold_in(rng, zlib.crc32(jax.tree_util.keystr(path).encode()) & 0x7FFFFFFF)
        return jnp.zeros(leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, random)
