"""Logical axis names on activations: the model says what a dimension *is*, a table says where it lies.

`constrain(x, "batch", "sequence", "embed")` is a no-op outside a mesh. Under `logical_rules(mesh, rules)` it pins
the activation to the mesh axes that the table names. A mesh axis that does not divide its dimension is left out
(the dimension is then replicated over that axis), so that no model has to know the mesh.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

MeshAxes = tuple[str, ...]
Rules = Mapping[str, MeshAxes]


class _Context(NamedTuple):
    mesh: Mesh
    rules: Rules
    """Without the manual axes."""
    manual: Rules
    """The manual axes of each logical axis."""
    sizes: Mapping[str, int]
    """Whole sizes, without padding, of logical axes that manual axes cut."""


_context: contextvars.ContextVar[_Context | None] = contextvars.ContextVar("logical_rules", default=None)


@contextlib.contextmanager
def logical_rules(
    mesh: Mesh, rules: Rules, *, manual: Collection[str] = (), sizes: Mapping[str, int] | None = None
) -> Iterator[None]:
    """Gives `constrain` its mesh and its table while a function is traced.

    Args:
      mesh: the device mesh.
      rules: activation axis name -> mesh axes; a name that is absent is replicated.
      manual: mesh axes that are manual here (the function is traced inside a `shard_map` over them): arrays are local
        in them, and `constrain` leaves them alone.
      sizes: whole sizes, without padding, of logical axes that manual axes cut.
    """
    free = {name: tuple(axis for axis in axes if axis not in manual) for name, axes in rules.items()}
    held = {name: tuple(axis for axis in axes if axis in manual) for name, axes in rules.items()}
    token = _context.set(_Context(mesh, free, held, sizes or {}))
    try:
        yield
    finally:
        _context.reset(token)


def current_mesh() -> Mesh | None:
    """The mesh of the innermost `logical_rules`, or None: kernels take their platform from its devices."""
    context = _context.get()
    return None if context is None else context[0]


def mesh_axis_size(name: str) -> int:
    """How many ways the logical axis `name` is cut at present (1 outside a mesh), manual axes left out."""
    context = _context.get()
    if context is None:
        return 1
    return math.prod(context.mesh.shape[axis] for axis in context.rules.get(name, ()))


def manual_axes(name: str) -> MeshAxes:
    """The manual mesh axes that cut the logical axis `name` at present: whoever sums over it sums over them too."""
    context = _context.get()
    if context is None:
        return ()
    return tuple(axis for axis in context.manual.get(name, ()) if context.mesh.shape[axis] > 1)


def logical_size(name: str, local: int) -> int:
    """The whole size of a logical axis of which an array here has `local` entries."""
    context = _context.get()
    return local if context is None or not manual_axes(name) else context.sizes[name]


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Pins `x` to the mesh axes of its logical dimensions; one name (or None: replicated) a dimension."""
    context = _context.get()
    if context is None:
        return x
    return pin(x, activation_spec(x.shape, names, context.mesh, context.rules))


def pin(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Pins `x` to mesh axes by their own names; for what `constrain` can't say."""
    context = _context.get()
    if context is None:
        return x
    mesh = region_mesh(context.mesh)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    if all(kind == AxisType.Manual or mesh.shape[axis] == 1 for axis, kind in kinds):
        return x  # nothing to place, and a constraint would keep XLA from fusing across it
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def axis_sizes(axes: Sequence[str]) -> list[int]:
    """Sizes of mesh axes."""
    context = _context.get()
    return [] if context is None else [context.mesh.shape[axis] for axis in axes]


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gathered(x: jax.Array, at_use: tuple[str | None, ...], stored: tuple[str | None, ...]) -> jax.Array:
    """A stored parameter where it is used: `constrain(x, *at_use)`, whose gradient goes straight to its `stored` place.

    The gradient of a plain `constrain` is pinned to the place of use: a sum over the data-parallel devices would first
    be made whole everywhere.
    """
    # Pinned where it is stored first: a cast before it would else be done after the gather, which sends more bytes.
    return constrain(constrain(x, *stored), *at_use)


def _gathered_forward(x: jax.Array, at_use: tuple[str | None, ...], stored: tuple[str | None, ...]) -> Any:
    return constrain(constrain(x, *stored), *at_use), None


def _gathered_backward(at_use: tuple[str | None, ...], stored: tuple[str | None, ...], _: None, d: jax.Array) -> Any:
    return (constrain(d, *stored),)


gathered.defvjp(_gathered_forward, _gathered_backward)


def ways(size: int, name: str) -> int:
    """How many ways `constrain` cuts a dimension of this size and name."""
    context = _context.get()
    if context is None:
        return 1
    (axes,) = activation_spec((size,), (name,), context.mesh, context.rules)
    return math.prod(context.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))


def region_mesh(mesh: Mesh) -> Mesh | AbstractMesh:
    """The mesh as it is known inside a manual region, with its manual axes marked; `mesh` itself outside of one."""
    inner = jax.sharding.get_abstract_mesh()
    return mesh if inner.empty else inner


def logical_spec(shape: Sequence[int], *names: str | None) -> PartitionSpec:
    """Where `constrain` would put an array of this shape: for manual regions, which must say it themselves."""
    context = _context.get()
    if context is None:
        return PartitionSpec(*[None] * len(shape))
    return activation_spec(shape, names, context.mesh, context.rules)


def activation_spec(shape: Sequence[int], names: Sequence[str | None], mesh: Mesh, rules: Rules) -> PartitionSpec:
    """The spec of an activation: every mesh axis is used once at most, and only where it divides.

    Raises:
      ValueError: the number of names is not the number of dimensions.
    """
    if len(shape) != len(names):
        raise ValueError(f"{len(names)} logical names {tuple(names)} for an array of shape {tuple(shape)}")
    used: set[str] = set()
    spec: list[MeshAxes | None] = []
    for size, name in zip(shape, names, strict=True):
        axes: list[str] = []
        ways = 1
        for axis in rules.get(name, ()) if name else ():
            if axis not in used and mesh.shape[axis] > 1 and size % (ways * mesh.shape[axis]) == 0:
                axes.append(axis)
                ways *= mesh.shape[axis]
        used.update(axes)
        spec.append(tuple(axes) or None)
    return PartitionSpec(*spec)
