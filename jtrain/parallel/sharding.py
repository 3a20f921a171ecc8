"""Where every array lies: one table of logical axis -> mesh axes, applied to parameters, optimizer state, batch.

A model names the dimensions of its parameters (`nnx.Param(..., out_sharding=("embed", "mlp"))`) and of its activations
(`jtrain.ops.logical.constrain`). The table below places them; `sharding.rules` of the config overrides it. A mesh axis
that does not divide its dimension moves to another dimension of the same parameter that it does divide (storage stays
divided), and is left out where there is none. Stored arrays are thus never padded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jtrain.errors import ConfigError
from jtrain.parallel.mesh import AXES, BATCH_AXES

Rules = dict[str, tuple[str, ...]]
LogicalNames = tuple[str | None, ...] | None

RULES: Rules = {
    # parameters
    "layers": (),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    "mlp": ("tensor",),
    "expert": ("expert",),
    "router": (),
    "latent": (),
    "positions": (),
    "norm": (),
    "lora_rank": (),
    # activations (heads, kv_heads, mlp and vocab are shared with the parameters)
    "batch": BATCH_AXES,
    "sequence": ("context",),
    "residual_sequence": ("context", "tensor"),  # between blocks, where every token stands alone
}


def make_rules(overrides: Mapping[str, Sequence[str]] | None = None) -> Rules:
    """The table with a user's overrides.

    Raises:
      ConfigError: an unknown mesh axis, or one named twice in a row of the table.
    """
    rules = dict(RULES)
    for name, axes in (overrides or {}).items():
        for axis in axes:
            if axis not in AXES:
                raise ConfigError(
                    f"sharding.rules.{name} names the mesh axis {axis!r}", f"known axes: {', '.join(AXES)}"
                )
        if len(set(axes)) != len(axes):
            raise ConfigError(f"sharding.rules.{name} names a mesh axis twice: {list(axes)}", "name each axis once")
        rules[name] = tuple(axes)
    return rules


def pipeline_rules(rules: Rules, chunks: int) -> Rules:
    """The table under a pipeline: layers and vocabulary are divided over its stages, at rest too.

    With several chunks a stage, the layers of a stage do not stand together; parameters of the stack are then cut along
    `embed` and turned round in the step (`jtrain.parallel.pipeline.layout`). A row that a user wrote stays.
    """
    changed: Rules = {"vocab": ("pipeline", "tensor")}
    changed |= {"layers": ("pipeline",)} if chunks == 1 else {"embed": ("fsdp", "pipeline")}
    return {**rules, **{name: axes for name, axes in changed.items() if rules[name] == RULES[name]}}


def parameter_spec(shape: Sequence[int], names: LogicalNames, mesh: Mesh, rules: Rules) -> PartitionSpec:
    """The spec of one stored parameter.

    Args:
      shape: the parameter's shape.
      names: one logical name (or None) a dimension; None when the model names nothing, in which case `fsdp` goes to
        the largest dimension that it divides.
    """
    placed: list[list[str]] = [[] for _ in shape]
    homeless: list[str] = []
    if names is None or len(names) != len(shape):
        homeless = [axis for axis in ("fsdp",) if mesh.shape[axis] > 1]
        movable = list(range(len(shape)))
    else:
        used: set[str] = set()
        for i, name in enumerate(names):
            for axis in rules.get(name, ()) if name else ():
                if axis in used or mesh.shape[axis] == 1:
                    continue
                used.add(axis)
                if shape[i] % (_ways(placed[i], mesh) * mesh.shape[axis]) == 0:
                    placed[i].append(axis)
                else:
                    homeless.append(axis)
        movable = [i for i, name in enumerate(names) if name != "layers"]  # the scan runs over `layers`: keep it whole
    for axis in homeless:
        _place(axis, placed, shape, movable, mesh)
    for axes in placed:
        if "pipeline" in axes:  # inside of the pipeline's manual region the automatic axes must come last
            axes.sort(key=AXES.index)
    return PartitionSpec(*[tuple(axes) or None for axes in placed])


def extend_spec(spec: PartitionSpec, shape: Sequence[int], axes: Sequence[str], mesh: Mesh) -> PartitionSpec:
    """`spec` with further mesh axes on the largest dimensions that they divide (ZeRO: Rajbhandari et al. 2020)."""
    placed: list[list[str]] = []
    for entry in (*spec, *[None] * (len(shape) - len(spec))):
        placed.append([] if entry is None else [entry] if isinstance(entry, str) else list(entry))
    used = {axis for entry in placed for axis in entry}
    for axis in axes:
        if axis not in used and mesh.shape[axis] > 1:
            _place(axis, placed, shape, range(len(shape)), mesh)
    return PartitionSpec(*[tuple(entry) or None for entry in placed])


def shard_like_parameters(tx: optax.GradientTransformation, params: Any, shardings: Any, mesh: Mesh) -> tuple[Any, Any]:
    """Shapes and shardings of any optax chain's state: what mirrors a parameter lies as `shardings` says.

    Args:
      tx: any chain, masked and partitioned ones included.
      params: tree of `ShapeDtypeStruct`.
      shardings: tree of `NamedSharding`, of the same structure.

    Returns:
      (tree of ShapeDtypeStruct, tree of NamedSharding), both of the structure of `tx.init(params)`.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    state = jax.eval_shape(tx.init, params)

    def is_leaf(x: Any) -> bool:  # optax.tree.map_params walks into masked nodes without it
        return isinstance(x, NamedSharding | optax.MaskedNode)

    mirrored = optax.tree.map_params(
        tx, lambda _, sharding: sharding, state, shardings, transform_non_params=lambda _: replicated, is_leaf=is_leaf
    )

    def fit(leaf: Any, sharding: NamedSharding) -> Any:
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        # Factored statistics (adafactor) mirror a parameter with another shape: small, so replicated.
        return sharding if _divides(sharding, leaf.shape) else replicated

    return state, jax.tree.map(fit, state, mirrored, is_leaf=is_leaf)


def batch_sharding(mesh: Mesh, rules: Rules) -> NamedSharding:
    """Sharding of a batch's arrays [A, b, ...]: micro-batches whole, rows divided over the data-parallel ranks."""
    return NamedSharding(mesh, PartitionSpec(None, tuple(rules["batch"])))


def bytes_per_device(tree: Any) -> int:
    """Bytes that one device holds of a tree of arrays or ShapeDtypeStructs with shardings."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _divides(sharding: NamedSharding, shape: Sequence[int]) -> bool:
    if len(sharding.spec) > len(shape):
        return False
    try:
        sharding.shard_shape(tuple(shape))
    except ValueError:
        return False
    return True


def _ways(axes: Sequence[str], mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _place(axis: str, placed: list[list[str]], shape: Sequence[int], dimensions: Sequence[int], mesh: Mesh) -> None:
    """Adds `axis` to the dimension whose shards are largest, among those that it divides; nowhere if there is none."""
    fits = [i for i in dimensions if shape[i] % (_ways(placed[i], mesh) * mesh.shape[axis]) == 0]
    if fits:
        placed[max(fits, key=lambda i: shape[i] // _ways(placed[i], mesh))].append(axis)
