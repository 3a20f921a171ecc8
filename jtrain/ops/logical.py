"""Logical axis names on activations: the model says what a dimension *is*, a table says where it lies.

`constrain(x, "batch", "sequence", "embed")` is a no-op outside a mesh. Under `logical_rules(mesh, rules)` it pins
the activation to the mesh axes that the table names. A mesh axis that does not divide its dimension is left out
(the dimension is then replicated over that axis), so that no model has to know the mesh.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MeshAxes = tuple[str, ...]
Rules = Mapping[str, MeshAxes]

_context: contextvars.ContextVar[tuple[Mesh, Rules] | None] = contextvars.ContextVar("logical_rules", default=None)


@contextlib.contextmanager
def logical_rules(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """Gives `constrain` its mesh and its table while a function is traced.

    Args:
      mesh: the device mesh.
      rules: activation axis name -> mesh axes; a name that is absent is replicated.
    """
    token = _context.set((mesh, rules))
    try:
        yield
    finally:
        _context.reset(token)


def current_mesh() -> Mesh | None:
    """The mesh of the innermost `logical_rules`, or None: kernels take their platform from its devices."""
    context = _context.get()
    return None if context is None else context[0]


def mesh_axis_size(name: str) -> int:
    """How many ways the logical axis `name` is cut at present (1 outside a mesh)."""
    context = _context.get()
    if context is None:
        return 1
    mesh, rules = context
    return math.prod(mesh.shape[axis] for axis in rules.get(name, ()))


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Pins `x` to the mesh axes of its logical dimensions; one name (or None: replicated) a dimension."""
    context = _context.get()
    if context is None:
        return x
    mesh, rules = context
    spec = activation_spec(x.shape, names, mesh, rules)
    if mesh.size == 1:  # nothing to place, and a constraint would keep XLA from fusing across it
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def logical_spec(shape: Sequence[int], *names: str | None) -> PartitionSpec:
    """Where `constrain` would put an array of this shape: for manual regions, which must say it themselves."""
    context = _context.get()
    return PartitionSpec(*[None] * len(shape)) if context is None else activation_spec(shape, names, *context)


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
