"""A matrix product with named axes: the query, key, value, output and feed-forward projections."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jtrain.models.parameters import constant, normal
from jtrain.models.remat import PRODUCT
from jtrain.ops.logical import constrain, gathered, ways
from jtrain.ops.token_sums import weight_gradient

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
        return project([self], x, [repeats])[0]

    def at_use(self, dtype: jnp.dtype, repeats: int) -> tuple[jax.Array, jax.Array | None]:
        """Kernel and bias as they are multiplied with."""
        kernel = self.kernel[...].astype(dtype)
        bias = None if self.bias is None else self.bias[...].astype(dtype)
        if repeats > 1:
            # Such a kernel is stored divided along D. In small moves: whole heads first, then repeated, then cut by
            # heads; in one, the partitioner would gather everything everywhere.
            kernel = constrain(kernel, *("embed" if axis == "embed" else None for axis in self.axes))
            kernel = jnp.repeat(kernel, repeats, axis=self.input_rank)
            kernel = constrain(kernel, *self.axes)
            bias = None if bias is None else jnp.repeat(bias, repeats, axis=0)
        return gathered(kernel, tuple(_AT_USE.get(axis) for axis in self.axes), self.axes), bias


def project(projections: Sequence[Projection], x: jax.Array, repeats: Sequence[int] | None = None) -> list[jax.Array]:
    """Several projections of the same x; see `Projection.__call__`.

    Where `tensor` cuts their outputs, every device has a part of the sum that is x's gradient. The parts of all
    projections are added before the devices are: one reduce-scatter instead of one a projection.
    """
    kernels, biases = zip(
        *(p.at_use(x.dtype, n) for p, n in zip(projections, repeats or [1] * len(projections), strict=True)),
        strict=True,
    )
    rank = projections[0].input_rank
    cut = [
        ways(kernel.shape[rank], _AT_USE.get(p.axes[rank], "")) for p, kernel in zip(projections, kernels, strict=True)
    ]
    ys = _products(rank, min(cut) > 1, tuple(p.axes for p in projections), x, kernels)
    ys = tuple(checkpoint_name(y, PRODUCT) for y in ys)
    return [y if bias is None else y + bias for y, bias in zip(ys, biases, strict=True)]


_Names = tuple[tuple[str, ...], ...]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _products(
    rank: int, cut: bool, axes: _Names, x: jax.Array, kernels: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    return tuple(jnp.tensordot(x, kernel, axes=rank) for kernel in kernels)


def _products_forward(rank: int, cut: bool, axes: _Names, x: jax.Array, kernels: tuple[jax.Array, ...]):
    return _products(rank, cut, axes, x, kernels), (x, kernels)


def _products_backward(rank: int, cut: bool, axes: _Names, residuals, d_ys: tuple[jax.Array, ...]):
    x, kernels = residuals
    first = x.ndim - rank  # of the output axes
    if first == 2:
        # Gathered once, for both products below.
        d_ys = tuple(
            constrain(d_y, "batch", "sequence", *(_AT_USE.get(axis) for axis in names[rank:]))
            for d_y, names in zip(d_ys, axes, strict=True)
        )
        d_kernels = tuple(weight_gradient(x, d_y, *names) for d_y, names in zip(d_ys, axes, strict=True))
    else:
        rows = tuple(range(first))
        d_kernels = tuple(jnp.tensordot(x, d_y, axes=(rows, rows)) for d_y in d_ys)
    if cut and len(d_ys) > 1:
        d_x = _back(_side_by_side(d_ys, first), _side_by_side(kernels, rank), first, rank)
    else:
        d_x = sum(_back(d_y, kernel, first, rank) for d_y, kernel in zip(d_ys, kernels, strict=True))
    return d_x, d_kernels


_products.defvjp(_products_forward, _products_backward)


def _back(d_y: jax.Array, kernel: jax.Array, first: int, rank: int) -> jax.Array:
    """The product over all output axes."""
    return jnp.tensordot(d_y, kernel, axes=(tuple(range(first, d_y.ndim)), tuple(range(rank, kernel.ndim))))


def _side_by_side(parts: Sequence[jax.Array], axis: int) -> jax.Array:
    """Arrays whose `axis` is cut, joined without moving anything between devices: along an axis of their own.

    Arrays of one size are stacked; else each becomes [..., n, size / n, ...] with n the smallest size (heads, cut by
    key-value heads), and the groups are joined.
    """
    sizes = {part.shape[axis] for part in parts}
    if len(sizes) == 1:
        return jnp.stack(parts, axis)
    grouped = [part.reshape(*part.shape[:axis], min(sizes), -1, *part.shape[axis + 1 :]) for part in parts]
    return jnp.concatenate(grouped, axis + 1)
