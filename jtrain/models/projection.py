"""A matrix product with named axes: the query, key, value, output and feed-forward projections.

A projection may carry an adapter (`jtrain.models.lora`), and its kernel may be frozen, and then stored in few bits.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jtrain.models.dropout import dropout
from jtrain.models.parameters import constant, normal
from jtrain.models.quantized import QuantizedKernel
from jtrain.models.remat import PRODUCT
from jtrain.ops import fp8
from jtrain.ops.logical import constrain, gathered, ways
from jtrain.ops.quantization import Weight
from jtrain.ops.token_sums import weight_gradient

_AT_USE = {"heads": "heads", "kv_heads": "kv_heads", "mlp": "mlp"}
"""Axes that stay cut while a kernel is used; all others are gathered (that is what fsdp means)."""

RANK = "lora_rank"
"""Logical name of an adapter's inner axis."""


@dataclasses.dataclass(frozen=True)
class AdapterSettings:
    """What an adapter has beside its parameters.

    Attributes:
      scale: of A B.
      dropout: rate on the adapter's input.
      stream: number of the projection within its layer, which no other has: its masks hang on it.
    """

    scale: float
    dropout: float
    stream: int


class Projection(nnx.Module):
    """y = x @ kernel (+ bias), over one or two input axes to one or two output axes.

    Args:
      key: key of the kernel's initial draw.
      std: its standard deviation.
      inputs: size and parameter axis of every input axis, e.g. `(("embed", 512),)`.
      outputs: the same for the output.
      bias: whether there is one; it starts at zero.
      dtype: type of the parameters.

    Attributes:
      frozen: whether the kernel is never trained: then nothing computes its gradient.
      adapter: of the adapter that stands beside the kernel: parameters lora_a [*inputs, r], lora_b [r, *outputs] and,
        for DoRA, lora_magnitude [*outputs].
    """

    frozen: bool = False
    adapter: AdapterSettings | None = None

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
        self.kernel: nnx.Param | QuantizedKernel = normal(key, std, shape, axes, dtype)
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

    def stored(self) -> Any:
        """The kernel as it is kept: an array, or a `Weight`."""
        return self.kernel.weight() if isinstance(self.kernel, QuantizedKernel) else self.kernel[...]


def project(projections: Sequence[Projection], x: jax.Array, repeats: Sequence[int] | None = None) -> list[jax.Array]:
    """Several projections of the same x; see `Projection.__call__`.

    Where `tensor` cuts their outputs, every device has a part of the sum that is x's gradient. The parts of all
    projections are added before the devices are: one reduce-scatter instead of one a projection.
    """
    uses = tuple(
        _Use(p.axes, p.input_rank, n, x.dtype)
        for p, n in zip(projections, repeats or [1] * len(projections), strict=True)
    )
    ys = _base(projections, uses, x)
    result = []
    for p, use, y in zip(projections, uses, ys, strict=True):
        y = checkpoint_name(y, PRODUCT) if p.adapter is None else _adapted(p, use, x, checkpoint_name(y, PRODUCT))
        result.append(y if p.bias is None else y + use.repeated(p.bias[...].astype(x.dtype), 0))
    return result


# -- kernels where they are used ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Use:
    """How a kernel is used, beside its numbers.

    Attributes:
      axes: logical names of its dimensions.
      inputs: how many of them are summed over.
      repeats: see `Projection.__call__`.
      dtype: type of the product.
    """

    axes: tuple[str, ...]
    inputs: int
    repeats: int
    dtype: jnp.dtype

    def kernel(self, stored: jax.Array | Weight) -> jax.Array:
        """The kernel as it is multiplied with."""
        if not isinstance(stored, Weight):
            kernel = stored.astype(self.dtype)
            if self.repeats > 1:
                # Such a kernel is stored divided along D. In small moves: whole heads first, then repeated, then cut by
                # heads; in one, the partitioner would gather everything everywhere.
                kernel = constrain(kernel, *("embed" if axis == "embed" else None for axis in self.axes))
                kernel = constrain(self.repeated(kernel, self.inputs), *self.axes)
            return gathered(kernel, self.at_use, self.axes)
        # Gathered in few bits, then written out.
        names = stored.names(self.axes, stored.axis if hasattr(stored, "axis") else self.inputs)
        parts = {
            name: constrain(constrain(getattr(stored, name), *axes), *(_AT_USE.get(axis or "") for axis in axes))
            for name, axes in names.items()
        }
        kernel = dataclasses.replace(stored, **parts).dequantize(self.dtype)
        return constrain(self.repeated(kernel, self.inputs), *self.at_use)

    @property
    def at_use(self) -> tuple[str | None, ...]:
        return tuple(_AT_USE.get(axis) for axis in self.axes)

    def repeated(self, x: jax.Array, axis: int) -> jax.Array:
        """An array with every entry of `axis`, the first output axis, repeated."""
        return jnp.repeat(x, self.repeats, axis=axis) if self.repeats > 1 else x

    def cut(self, kernel: jax.Array) -> int:
        """How many ways the first output axis is cut."""
        return ways(kernel.shape[self.inputs], _AT_USE.get(self.axes[self.inputs], ""))


def _base(projections: Sequence[Projection], uses: tuple[_Use, ...], x: jax.Array) -> tuple[jax.Array, ...]:
    """The products without bias and adapters."""
    stored = tuple(p.stored() for p in projections)
    if all(p.frozen for p in projections):
        return _frozen_products(uses, x, stored)
    kernels = tuple(use.kernel(part) for use, part in zip(uses, stored, strict=True))
    cut = min(use.cut(kernel) for use, kernel in zip(uses, kernels, strict=True)) > 1
    return _products(uses[0].inputs, cut, tuple(use.axes for use in uses), fp8.fp8_mode(), x, kernels)


# -- adapters ----------------------------------------------------------------------------------------------------------

_keys: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar("adapter_keys", default=None)


@contextlib.contextmanager
def adapter_keys(keys_B: jax.Array | None) -> Iterator[None]:
    """Gives the adapters of the layer that is traced inside one key a row, for dropout; None switches it off.

    The keys are functions of (rng, layer, global row), so that neither the mesh nor accumulation changes a mask.
    """
    token = _keys.set(keys_B)
    try:
        yield
    finally:
        _keys.reset(token)


def _adapted(p: Projection, use: _Use, x: jax.Array, y: jax.Array) -> jax.Array:
    """y + scale * dropout(x) A B; for DoRA (Liu et al. 2024, eq. 5) its columns brought to the lengths m.

    DoRA: g (x W + scale x A B) with g = m / |W + scale A B| by columns, the length taken as a constant (section 4.3).
    Where x is dropped, the part (g - 1) x W is of the dropped x, as in PEFT.
    """
    assert p.adapter is not None
    settings, inputs = p.adapter, use.inputs
    keys_B = _keys.get() if settings.dropout else None
    x_in = x if keys_B is None else _dropped(x, inputs, settings, keys_B)
    a, b = (parameter[...].astype(x.dtype) for parameter in (p.lora_a, p.lora_b))
    of_a = _Use((*use.axes[:inputs], RANK), inputs, 1, x.dtype)
    of_b = _Use((RANK, *use.axes[inputs:]), 1, use.repeats, x.dtype)
    (h_BLr,) = _trained_products(of_a, x_in, a)
    h_BLr = constrain(h_BLr * jnp.asarray(settings.scale, h_BLr.dtype), "batch", "sequence", None)
    (added,) = _trained_products(of_b, h_BLr, b)
    if not hasattr(p, "lora_magnitude"):
        return y + added
    length = column_lengths(use.kernel(p.stored()), of_a.kernel(a), of_b.kernel(b), inputs, settings.scale)
    magnitude = use.repeated(p.lora_magnitude[...].astype(length.dtype), 0)
    g = magnitude / jax.lax.stop_gradient(length)
    base = y if keys_B is None else _base([p], (use,), x_in)[0]
    return y + (g - 1).astype(y.dtype) * base + g.astype(y.dtype) * added


def column_lengths(kernel: jax.Array, a: jax.Array, b: jax.Array, inputs: int, scale: float) -> jax.Array:
    """|W + scale A B| over the input axes, for every output; float32 at least. A B is never formed.

    Args:
      kernel: W [*inputs, *outputs].
      a: [*inputs, r].
      b: [r, *outputs].
      inputs: how many input axes there are.
      scale: of A B.
    """
    wide = jnp.promote_types(kernel.dtype, jnp.float32)
    w, a, b = (jax.lax.stop_gradient(x).astype(wide) for x in (kernel, a, b))
    over = tuple(range(inputs))
    cross = jnp.tensordot(a, w, axes=(over, over))  # [r, *outputs]
    gram = jnp.tensordot(a, a, axes=(over, over))  # [r, r]
    squares = (w * w).sum(over) + scale * (b * (2 * cross + scale * jnp.tensordot(gram, b, axes=1))).sum(0)
    return jnp.sqrt(jnp.maximum(squares, 0))


def _dropped(x: jax.Array, inputs: int, settings: AdapterSettings, keys_B: jax.Array) -> jax.Array:
    keys_B = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, settings.stream)
    flat = x.reshape(*x.shape[: x.ndim - inputs], math.prod(x.shape[x.ndim - inputs :]))
    return dropout(flat, settings.dropout, keys_B).reshape(x.shape)


def _trained_products(use: _Use, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, ...]:
    """Of an adapter; never in 8 bits: they are too small to gain by it."""
    return _products(use.inputs, False, (use.axes,), None, x, (use.kernel(kernel),))


# -- products ----------------------------------------------------------------------------------------------------------

_Names = tuple[tuple[str, ...], ...]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _products(
    rank: int, cut: bool, axes: _Names, mode: fp8.Mode | None, x: jax.Array, kernels: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """`mode` is given, not looked up: a backward pass is traced when the context of its forward pass is over."""
    with fp8.fp8_products(mode):
        return tuple(_forth(x, kernel, rank) for kernel in kernels)


def _products_forward(
    rank: int, cut: bool, axes: _Names, mode: fp8.Mode | None, x: jax.Array, kernels: tuple[jax.Array, ...]
):
    return _products(rank, cut, axes, mode, x, kernels), (x, kernels)


def _products_backward(
    rank: int, cut: bool, axes: _Names, mode: fp8.Mode | None, residuals, d_ys: tuple[jax.Array, ...]
):
    x, kernels = residuals
    first = x.ndim - rank  # of the output axes
    d_ys = _gathered_once(d_ys, axes, rank, first)
    with fp8.fp8_products(mode):
        if first == 2:
            d_kernels = tuple(_weight_gradient(x, d_y, names) for d_y, names in zip(d_ys, axes, strict=True))
        else:
            rows = tuple(range(first))
            d_kernels = tuple(_dot(x, d_y, rows, rows, _OF_WEIGHTS) for d_y in d_ys)
        return _input_gradient(d_ys, kernels, first, rank, cut), d_kernels


_products.defvjp(_products_forward, _products_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _frozen_products(uses: tuple[_Use, ...], x: jax.Array, stored: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    """`_products` of kernels that are not trained: the backward pass keeps them as they are stored, and no x."""
    return tuple(_forth(x, use.kernel(part), use.inputs) for use, part in zip(uses, stored, strict=True))


def _frozen_forward(uses: tuple[_Use, ...], x: jax.Array, stored: tuple[Any, ...]):
    return _frozen_products(uses, x, stored), stored


def _frozen_backward(uses: tuple[_Use, ...], stored: tuple[Any, ...], d_ys: tuple[jax.Array, ...]):
    rank = uses[0].inputs
    first = d_ys[0].ndim - (len(uses[0].axes) - rank)
    d_ys = _gathered_once(d_ys, tuple(use.axes for use in uses), rank, first)
    kernels = tuple(use.kernel(part) for use, part in zip(uses, stored, strict=True))
    cut = min(use.cut(kernel) for use, kernel in zip(uses, kernels, strict=True)) > 1
    return _input_gradient(d_ys, kernels, first, rank, cut), None


_frozen_products.defvjp(_frozen_forward, _frozen_backward)


def _gathered_once(d_ys: tuple[jax.Array, ...], axes: _Names, rank: int, first: int) -> tuple[jax.Array, ...]:
    """Gradients of [B, L, *outputs] as both products of a backward pass read them."""
    if first != 2:
        return d_ys
    return tuple(
        constrain(d_y, "batch", "sequence", *(_AT_USE.get(axis) for axis in names[rank:]))
        for d_y, names in zip(d_ys, axes, strict=True)
    )


def _input_gradient(
    d_ys: tuple[jax.Array, ...], kernels: tuple[jax.Array, ...], first: int, rank: int, cut: bool
) -> jax.Array:
    if cut and len(d_ys) > 1:
        return _back(_side_by_side(d_ys, first), _side_by_side(kernels, rank), first, rank)
    return sum(_back(d_y, kernel, first, rank) for d_y, kernel in zip(d_ys, kernels, strict=True))


_OF_PRODUCTS = (fp8.FORWARD, fp8.FORWARD)
_OF_INPUTS = (fp8.GRADIENT, fp8.FORWARD)
_OF_WEIGHTS = (fp8.FORWARD, fp8.GRADIENT)
"""Formats of the operands of a forward product, of an input's gradient and of a weight's, where they are fp8."""


def _forth(x: jax.Array, kernel: jax.Array, rank: int) -> jax.Array:
    """x @ kernel, over the last axes of x."""
    return _dot(x, kernel, tuple(range(x.ndim - rank, x.ndim)), tuple(range(rank)), _OF_PRODUCTS)


def _back(d_y: jax.Array, kernel: jax.Array, first: int, rank: int) -> jax.Array:
    """The product over all output axes."""
    return _dot(d_y, kernel, tuple(range(first, d_y.ndim)), tuple(range(rank, kernel.ndim)), _OF_INPUTS)


def _weight_gradient(x: jax.Array, d_y: jax.Array, names: tuple[str, ...]) -> jax.Array:
    mode = fp8.fp8_mode()
    if mode is None:
        return weight_gradient(x, d_y, *names)
    (x8, scale_x), (d_y8, scale_y) = (
        fp8.rounded(operand, kind, mode) for operand, kind in zip((x, d_y), _OF_WEIGHTS, strict=True)
    )
    return weight_gradient(x8, d_y8, *names, dtype=x.dtype) * (scale_x * scale_y)


def _dot(
    a: jax.Array, b: jax.Array, over_a: tuple[int, ...], over_b: tuple[int, ...], kinds: tuple[Any, Any]
) -> jax.Array:
    return fp8.dot_general(a, b, ((over_a, over_b), ((), ())), kinds)


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
