"""Low-rank adapters beside frozen projections: LoRA, rsLoRA, DoRA, and QLoRA's quantised base.

y = x W + scale * dropout(x) A B, where only A [in, r] and B [r, out] are trained (Hu et al. 2021, section 4.1). A
begins as in PEFT, uniform within 1 / sqrt(in) (`kaiming_uniform_(a=sqrt(5))`), and B at zero: step 0 is the base model.
The scale is alpha / r, or alpha / sqrt(r) (rsLoRA, Kalajdzievski 2023, theorem 3.2). DoRA (Liu et al. 2024, eq. 5) also
trains the length of every output's column.

Adapters attach to any module's `Projection`s from outside: `add_lora(module, Lora(rank=8), key=...)`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jtrain.errors import ConfigError
from jtrain.models.moe import ExpertKernels
from jtrain.models.parameters import COMPUTE_TYPE, FROZEN, OWN_TYPE
from jtrain.models.projection import RANK, AdapterSettings, Projection
from jtrain.models.quantized import QuantizedKernel
from jtrain.ops.quantization import Kind

ALL_LINEAR = "all-linear"
ADAPTER = ("lora_a", "lora_b", "lora_magnitude")
"""Names of an adapter's parameters."""


@dataclasses.dataclass(frozen=True)
class Lora:
    """The adapters of a model.

    Attributes:
      rank: r.
      alpha: the scale is alpha / rank.
      dropout: rate on what goes into the adapters.
      targets: projections by name or pattern of their paths; see `targeted`.
      rslora: the scale is alpha / sqrt(rank).
      dora: whether lengths are trained too.
      quantization: of the projections' kernels, adapter or not; None: they stay as they are.
      dtype: type in which the rest of the frozen model is stored; None: the run's parameter type; auto: bfloat16 where
        the step computes in it, else the parameter type.
    """

    rank: int
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = (ALL_LINEAR,)
    rslora: bool = False
    dora: bool = False
    quantization: Kind | None = None
    dtype: str | None = None

    @property
    def scale(self) -> float:
        """Of A B."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def projections(module: nnx.Module) -> dict[str, Projection]:
    """Path (`layers/attention/q_proj`) -> projection, in the order of the paths.

    Those whose path begins with one of the module's `without_adapters` are left out: they get no adapter, and keep
    their kernels as they are.
    """
    outside = tuple(getattr(module, "without_adapters", ()))
    found = {"/".join(map(str, path)): m for path, m in nnx.iter_modules(module) if isinstance(m, Projection)}
    return {path: found[path] for path in sorted(found) if not path.startswith(outside)}


def targeted(paths: Sequence[str], targets: Sequence[str]) -> list[str]:
    """The paths that a target matches: `all-linear`; the end of a path (`q_proj`); a regular expression of a path.

    Raises:
      ConfigError: a target that is no regular expression or matches nothing.
    """
    found: set[str] = set()
    for target in targets:
        try:
            pattern = re.compile(".*" if target == ALL_LINEAR else rf"(.*/)?({target})")
        except re.error as error:
            raise ConfigError(
                f"model.lora.targets: {target!r} is not a pattern ({error})",
                "write a name such as q_proj, a Python regular expression of paths, or all-linear",
            ) from error
        matches = {path for path in paths if pattern.fullmatch(path)}
        if not matches:
            names = sorted({path.rpartition("/")[2] for path in paths})
            raise ConfigError(
                f"model.lora.targets: {target!r} matches no projection (routed experts, embedding and head have none)",
                f"names: {', '.join(names)}, or all-linear; paths: {', '.join(sorted(paths))}",
            )
        found |= matches
    return sorted(found)


def add_lora(module: nnx.Module, lora: Lora, *, key: jax.Array) -> nnx.Module:
    """Puts adapters beside the projections of a module, and freezes all that it had; in place.

    Args:
      module: any module with `Projection`s, stacked layers among them ([N, ...], as `Decoder` has).
      lora: what is added.
      key: of the adapters' initial draw. A's numbers depend on it, the projection's path and the layer alone.

    Returns:
      The module. Parameters of the adapters: `<path>/lora_a` [N, *inputs, r], `<path>/lora_b` [N, r, *outputs], and for
      DoRA `<path>/lora_magnitude` [N, *outputs].

    Raises:
      ConfigError: targets that match nothing, a rank above a projection's width, a weight that can't be quantised.
    """
    found = projections(module)
    if not found:
        raise ConfigError("model.lora: the model has no projection", "build it of jtrain.models.Projection")
    chosen = targeted(list(found), lora.targets)
    for path, projection in found.items():
        projection.frozen = True
        kernel = projection.kernel
        if lora.quantization is not None:
            projection.kernel = _quantized(kernel, len(projection.axes), projection.input_rank, lora.quantization, path)
        if path in chosen:
            _attach(projection, path, lora, kernel[...], key)
    if lora.quantization is not None:
        _quantize_experts(module, lora.quantization)
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        metadata = variable.get_metadata()
        if path[-1] in ADAPTER or metadata.get("exact") or metadata.get("trained"):
            continue
        variable.set_metadata(**FROZEN)
        if lora.dtype == "auto":
            variable.set_metadata(**COMPUTE_TYPE)
        elif lora.dtype is not None:
            variable.set_metadata(**OWN_TYPE)
            variable.set_value(variable[...].astype(lora.dtype))
    if lora.dropout:
        module.adapter_dropout = lora.dropout  # type: ignore[attr-defined]  # `Decoder.hidden` makes keys for it
    return module


def _quantized(kernel: nnx.Param, rank: int, inputs: int, kind: Kind, path: str) -> QuantizedKernel:
    value, names = kernel[...], kernel.get_metadata()["out_sharding"]
    try:
        return QuantizedKernel(value, tuple(names), value.ndim - rank, inputs, kind)
    except ValueError as error:
        raise ConfigError(f"model.lora.base: {kind}: {path}: {error}", "write base: int8") from None


def _quantize_experts(module: nnx.Module, kind: Kind) -> None:
    """Kernels of experts have no adapter, but most of the bytes."""
    for path, experts in list(nnx.iter_modules(module)):
        if isinstance(experts, ExpertKernels):
            for name in ("gate_proj", "up_proj", "down_proj"):
                if hasattr(experts, name):
                    place = "/".join(map(str, (*path, name)))
                    setattr(experts, name, _quantized(getattr(experts, name), 2, 1, kind, place))


def _attach(projection: Projection, path: str, lora: Lora, kernel: jax.Array, key: jax.Array) -> None:
    inputs, axes = projection.input_rank, projection.axes
    lead, shape = kernel.shape[: kernel.ndim - len(axes)], kernel.shape[kernel.ndim - len(axes) :]
    fan_in, fan_out = math.prod(shape[:inputs]), math.prod(shape[inputs:])
    if lora.rank > min(fan_in, fan_out):
        raise ConfigError(
            f"model.lora.rank: {lora.rank} is above the width of {path}, {fan_in} to {fan_out}",
            f"write a rank of {min(fan_in, fan_out)} or less, or leave {path.rpartition('/')[2]} out of the targets",
        )
    crc = zlib.crc32(path.encode()) & 0x7FFFFFFF
    key, bound = jax.random.fold_in(key, crc), 1 / math.sqrt(fan_in)

    def draw(key: jax.Array) -> jax.Array:
        return jax.random.uniform(key, (*shape[:inputs], lora.rank), jnp.float32, -bound, bound)

    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(math.prod(lead)))
    a = jax.vmap(draw)(keys).reshape(*lead, *shape[:inputs], lora.rank)
    b = jnp.zeros((*lead, lora.rank, *shape[inputs:]), jnp.float32)
    names = ("layers",) * len(lead)
    projection.lora_a = nnx.Param(a, out_sharding=(*names, *axes[:inputs], RANK))
    projection.lora_b = nnx.Param(b, out_sharding=(*names, RANK, *axes[inputs:]))
    projection.adapter = AdapterSettings(lora.scale, lora.dropout, crc)
    if lora.dora:
        magnitude = magnitudes(projection.kernel[...], len(lead), inputs)
        projection.lora_magnitude = nnx.Param(magnitude, out_sharding=(*names, *axes[inputs:]))


def magnitudes(kernel: jax.Array, lead: int, inputs: int) -> jax.Array:
    """DoRA's initial lengths: those of the columns of W, [*lead, *outputs] float32."""
    over = tuple(range(lead, lead + inputs))
    return jnp.sqrt((kernel.astype(jnp.float32) ** 2).sum(over))


# -- the base model again ----------------------------------------------------------------------------------------------


def merge(module: nnx.Module) -> nnx.Module:
    """Adds every adapter to its kernel, so that the module computes without adapters; in place, see `unmerge`.

    The sum is formed in float32 (or wider); a quantised kernel is written out.
    """
    for projection in projections(module).values():
        if projection.adapter is None:
            continue
        kernel = projection.kernel
        with nnx.use_eager_sharding(False):  # it lies where the parts lie
            projection.kernel = nnx.Param(merged_kernel(projection), out_sharding=_names(kernel), **FROZEN)
        projection.unmerged, projection.unmerged_adapter, projection.adapter = kernel, projection.adapter, None
    return module


def unmerge(module: nnx.Module) -> nnx.Module:
    """Puts the kernels back that `merge` replaced, bit by bit: they were kept. In place."""
    for projection in projections(module).values():
        if hasattr(projection, "unmerged"):
            projection.kernel, projection.adapter = projection.unmerged, projection.unmerged_adapter
            del projection.unmerged, projection.unmerged_adapter
    return module


def merged_kernel(projection: Projection) -> jax.Array:
    """W + scale A B; for DoRA m (W + scale A B) / |W + scale A B|. As the adapter's type or wider, layer by layer."""
    inputs, settings, axes = projection.input_rank, projection.adapter, projection.axes
    assert settings is not None
    wide = projection.lora_a[...].dtype

    def one(parts: tuple[jax.Array, ...]) -> jax.Array:
        kernel, a, b, *magnitude = (part.astype(jnp.promote_types(part.dtype, wide)) for part in parts)
        delta = jnp.tensordot(a, b, axes=1, precision=jax.lax.Precision.HIGHEST)
        kernel = kernel + settings.scale * delta
        if magnitude:
            kernel = kernel * (magnitude[0] / jnp.sqrt((kernel**2).sum(tuple(range(inputs)))))
        return kernel

    parts = [projection.kernel[...], projection.lora_a[...], projection.lora_b[...]]
    if hasattr(projection, "lora_magnitude"):
        parts.append(projection.lora_magnitude[...])
    return one(tuple(parts)) if parts[0].ndim == len(axes) else jax.lax.map(one, tuple(parts))


def plain_parameters(module: nnx.Module, *, merged: bool = True) -> dict[str, Any]:
    """The parameters of the model without adapters, as its class has them: quantised kernels are written out.

    Args:
      module: a module with adapters; it stays as it is.
      merged: whether the adapters are added to the kernels; else the base alone.

    Returns:
      Nested dict of arrays with the paths of the base model.
    """
    replaced: dict[tuple[Any, ...], jax.Array] = {
        path: m[...]
        for path, m in nnx.iter_modules(module)
        if isinstance(m, QuantizedKernel) and "unmerged" not in path
    }
    for name, projection in projections(module).items():
        parts = tuple(name.split("/"))
        with_adapter = merged and projection.adapter is not None
        replaced[(*parts, "kernel")] = merged_kernel(projection) if with_adapter else projection.kernel[...]
    tree: dict[str, Any] = {}

    def put(path: tuple[Any, ...], value: jax.Array) -> None:
        node = tree
        for name in path[:-1]:
            node = node.setdefault(str(name), {})
        node[str(path[-1])] = value

    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        inside = any(path[: len(kernel)] == kernel for kernel in replaced)
        if path[-1] not in ADAPTER and "unmerged" not in path and not inside:
            put(path, variable[...])
    for path, value in replaced.items():
        put(path, value)
    return tree


def _names(kernel: Any) -> tuple[str | None, ...] | None:
    """Logical names of a kernel, quantised or not."""
    if isinstance(kernel, QuantizedKernel):
        return (*kernel.lead_names, *kernel.axes)
    return kernel.get_metadata().get("out_sharding")


def projection_shapes(module: nnx.Module) -> dict[str, tuple[tuple[int, ...], int]]:
    """Path of every projection -> shape of its kernel in one layer, and how many of its axes are inputs."""
    shapes = {}
    for path, projection in projections(module).items():
        shape = projection.kernel[...].shape
        shapes[path] = (tuple(shape[len(shape) - len(projection.axes) :]), projection.input_rank)
    return shapes
