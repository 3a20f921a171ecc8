"""A matrix product with named axes: the query, key, value, output and feed-forward projections."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jtrain.models.parameters import constant, normal
from jtrain.ops.logical import constrain

_AT_USE = {"heads": "heads", "kv_heads": "kv_heads", "mlp": "mlp"}
"""Axes that stay cut while a kernel is used; all others are gathered (that is what fsdp means)."""


class Projection(nnx.Module):
    """y = x @ kernel (+ bias), over one or two input axes to one or two output axes.

    Args:
      key: key of the kernel's initial draw.
      std: its standard deviation.
      inputs: size and parameter axis of every input axis, e.g. `(("embed", 512),)`.
      outputs: the same for the output.
      bias: whether there is one; it starts at zero.
      dtype: type of the parameters.
    """

    def __init__(
        self,
        key: jax.Array,
        std: float,
        inputs: tuple[tuple[str, int], ...],
        outputs: tuple[tuple[str, int], ...],
        *,
        bias: bool,
        dtype: jnp.dtype,
    ):
        axes, shape = zip(*inputs, *outputs, strict=True)
        self.input_rank = len(inputs)
        self.axes = axes
        self.kernel = normal(key, std, shape, axes, dtype)
        self.bias = constant(0.0, shape[len(inputs) :], axes[len(inputs) :], dtype) if bias else None

    def __call__(self, x: jax.Array, *, repeats: int = 1) -> jax.Array:
        """Projects the last axes of x.

        Args:
          x: [B, L, *inputs].
          repeats: how often every entry of the first output axis is repeated: key-value heads that `tensor`
            does not divide. Repeating the kernel, not the result, leaves every device its own share of the work.

        Returns:
          [B, L, *outputs], in the type of x.
        """
        kernel = self.kernel[...].astype(x.dtype)
        bias = None if self.bias is None else self.bias[...].astype(x.dtype)
        if repeats > 1:
            # Such a kernel is stored divided along D. In small moves: whole heads first, then repeated, then cut by
            # heads; in one, the partitioner would gather everything everywhere.
            kernel = constrain(kernel, *("embed" if axis == "embed" else None for axis in self.axes))
            kernel = jnp.repeat(kernel, repeats, axis=self.input_rank)
            kernel = constrain(kernel, *self.axes)
            bias = None if bias is None else jnp.repeat(bias, repeats, axis=0)
        kernel = constrain(kernel, *(_AT_USE.get(axis) for axis in self.axes))
        y = jnp.tensordot(x, kernel, axes=self.input_rank)
        return y if bias is None else y + bias
