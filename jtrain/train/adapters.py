"""Weights of a plain model for a run whose model has adapters: cast or quantised as they arrive, leaf after leaf."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from jtrain.models.lora import ADAPTER, magnitudes, projections
from jtrain.models.quantized import QuantizedKernel
from jtrain.parallel.sharding import parameter_spec
from jtrain.train.model import FunctionalModel
from jtrain.train.optimizers import parameter_paths
from jtrain.train.state import StatePlan

Leaves = dict[str, Any]


def has_adapters(paths: Any) -> bool:
    """Whether any of these parameters is an adapter's."""
    return any(path.rpartition("/")[2] in ADAPTER for path in paths)


def counts(model: FunctionalModel, trainable: Any) -> tuple[int, int]:
    """Numbers of trained parameters, and of all of them: weights, however few bits they are stored in."""
    trained = total = 0
    leaves = (jax.tree.leaves(tree) for tree in (model.params, trainable, model.has("exact")))
    for path, leaf, on, exact in zip(parameter_paths(model.params), *leaves, strict=True):
        codes = path.endswith("/codes") * (2 if leaf.dtype == jnp.uint8 else 1)  # NF4: two in a byte
        size = leaf.size * (codes if exact else 1)
        trained, total = trained + size * on, total + size
    return trained, total


class BaseWeights:
    """`InitialWeights` of the base model, as those of a model with adapters.

    Args:
      weights: of the base model (`fills` and `load`, with its paths); what it has as `adapters` (path -> array) takes
        the place of what would be drawn.
      model: the model with adapters.
      plan: where its parameters lie.
    """

    def __init__(self, weights: Any, model: FunctionalModel, plan: StatePlan):
        self._weights, self._plan = weights, plan
        self._adapters: Leaves = getattr(weights, "adapters", {})
        module = model.merge(plan.abstract.params, plan.abstract.variables)
        self._quantized = {
            "/".join(map(str, path)): m for path, m in nnx.iter_modules(module) if isinstance(m, QuantizedKernel)
        }
        self._part_of = {f"{path}/{part}": path for path, m in self._quantized.items() for part in m.parts}
        self._magnitude_of = {
            f"{path}/lora_magnitude": p for path, p in projections(module).items() if hasattr(p, "lora_magnitude")
        }
        # All that is frozen and no part of a quantised kernel is stored in one type; quantised kernels pass through it.
        flat = zip(parameter_paths(plan.abstract.params), jax.tree.leaves(plan.abstract.params), strict=True)
        self._dtype = next(leaf.dtype for path, leaf in flat if path not in self._part_of and not has_adapters([path]))

    def fills(self, path: str) -> bool:
        """Whether `load` brings this parameter: all but A and B that are drawn."""
        if path in self._adapters:
            return True
        base = self._base(path)
        return base is not None and self._weights.fills(base)

    def load(self, params: Leaves, variables: Leaves) -> tuple[Leaves, Leaves]:
        """See `InitialWeights`. At no time is a second copy of more than one kernel on the devices."""
        wanted = {base: self._abstract(base, params) for base in map(self._base, params) if base is not None}
        base, variables = self._weights.load(wanted, variables)
        loaded = {path: base[path] for path in params if path in base}
        for path, quantized in self._quantized.items():
            if path not in base:
                continue
            places = {part: params[f"{path}/{part}"].sharding for part in quantized.parts}
            parts = jax.jit(quantized.parts_of, out_shardings=places)(base[path])
            base.pop(path).delete()
            loaded |= {f"{path}/{part}": value for part, value in parts.items()}
        for path, projection in self._magnitude_of.items():
            if path in params and path not in self._adapters:
                loaded[path] = self._magnitude(path, projection, loaded, params[path].sharding)
        for path in params.keys() & self._adapters.keys():
            loaded[path] = jax.device_put(self._adapters[path].astype(params[path].dtype), params[path].sharding)
        return loaded, variables

    def _base(self, path: str) -> str | None:
        """The base model's parameter that this one is made of; None for A and B."""
        if path in self._magnitude_of:
            return path.removesuffix("lora_magnitude") + "kernel"
        return None if has_adapters([path]) else self._part_of.get(path, path)

    def _abstract(self, base: str, params: Leaves) -> jax.ShapeDtypeStruct:
        """Shape, type and place in which a parameter of the base model is asked for."""
        quantized = self._quantized.get(base)
        if quantized is None:
            return params[base]
        names = (*quantized.lead_names, *quantized.axes)
        shape = list(params[f"{base}/codes"].shape)
        if quantized.kind == "nf4":
            shape[len(quantized.lead_names) + quantized.axis] *= 2
        spec = parameter_spec(shape, names, self._plan.mesh, self._plan.rules)
        return jax.ShapeDtypeStruct(tuple(shape), self._dtype, sharding=NamedSharding(self._plan.mesh, spec))

    def _magnitude(self, path: str, projection: Any, loaded: Leaves, place: Any) -> jax.Array:
        kernel = path.removesuffix("lora_magnitude") + "kernel"
        quantized = self._quantized.get(kernel)
        if quantized is None:
            lead = loaded[kernel].ndim - len(projection.axes)
            of = functools.partial(magnitudes, lead=lead, inputs=projection.input_rank)
            return jax.jit(of, out_shardings=place)(loaded[kernel])
        parts = {part: loaded[f"{kernel}/{part}"] for part in quantized.parts}

        def of_parts(parts: Leaves) -> jax.Array:
            return magnitudes(quantized.written_out(parts), len(quantized.lead_names), projection.input_rank)

        return jax.jit(of_parts, out_shardings=place)(parts)
