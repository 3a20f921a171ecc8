"""A kernel that is kept in few bits: never trained, written out where it is read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jtrain.models.parameters import EXACT, FROZEN
from jtrain.ops.quantization import Axes, Kind, Weight, block_axis, part_names, quantize, restore


class QuantizedKernel(nnx.Module):
    """Stands where a kernel stood: `kernel[...]` is the weight in float32.

    Args:
      kernel: the parameter [*lead, *inputs, *outputs]; leading axes stack layers and experts.
      names: logical names of all its axes.
      lead: how many of them are leading ones.
      inputs: how many are summed over.
      kind: int8 or nf4.

    Its parts are `nnx.Param`s that are frozen and exact (`jtrain.models.parameters`), so that they are divided over the
    mesh, saved and loaded like all parameters: their shapes and names are those of `jtrain.ops.quantization`, each with
    the leading axes before them.
    """

    def __init__(self, kernel: jax.Array, names: Axes, lead: int, inputs: int, kind: Kind):
        shape, self.lead_names, self.axes = kernel.shape[lead:], names[:lead], names[lead:]
        self.kind, self.inputs = kind, inputs
        self.axis = block_axis(shape, self.axes) if kind == "nf4" else inputs
        own = part_names(kind, shape, self.axes, inputs)
        self.parts = tuple(own)
        for name, value in self.parts_of(kernel).items():
            setattr(self, name, nnx.Param(value, out_sharding=(*self.lead_names, *own[name]), **FROZEN, **EXACT))

    def parts_of(self, kernel: jax.Array) -> dict[str, jax.Array]:
        """The parts of a kernel like this one; of a stack layer by layer, so that little is in float32 at a time."""

        def one(kernel: jax.Array) -> dict[str, jax.Array]:
            weight = quantize(self.kind, kernel, self.axes, self.inputs)
            return {name: getattr(weight, name) for name in self.parts}

        lead = kernel.ndim - len(self.axes)
        for _ in range(lead - 1):
            one = jax.vmap(one)
        return jax.lax.map(one, kernel) if lead else one(kernel)

    def weight(self) -> Weight:
        """The parts together."""
        return restore(self.kind, {name: getattr(self, name)[...] for name in self.parts}, self.axis)

    def __getitem__(self, index: Any) -> jax.Array:
        """The weight in float32, with the leading axes that it has here."""
        return self.written_out({name: getattr(self, name)[...] for name in self.parts})[index]

    def written_out(self, parts: dict[str, jax.Array]) -> jax.Array:
        """The weight in float32 of such parts."""

        def one(weight: Weight) -> jax.Array:
            return weight.dequantize(jnp.float32)

        weight = restore(self.kind, parts, self.axis)
        for _ in range(weight.codes.ndim - len(self.axes)):
            one = jax.vmap(one)
        return one(weight)
