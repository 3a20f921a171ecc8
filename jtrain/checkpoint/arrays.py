"""The arrays of a state: their paths, the tree that is stored, and what differs from the tree that is wanted.

A state may be any pytree (optax chains are named tuples in tuples). Stored is a plain nested dict keyed by the path of
each array, so that a checkpoint can be read without the classes that wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jtrain.checkpoint.manifest import ArrayRecord
from jtrain.errors import CheckpointError

_SHOWN = 12


def flatten(tree: Any) -> dict[str, Any]:
    """Path ("params/layers/kernel") -> leaf.

    Raises:
      TypeError: a leaf is no numeric array.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    flat = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    for path, leaf in flat.items():
        if not hasattr(leaf, "dtype") or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise TypeError(f"{path} is {type(leaf).__name__}: a state holds int, float and bool arrays only")
    if len(flat) != len(leaves):
        raise TypeError("two arrays of the state have the same path")
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Path -> leaf, as nested dicts; without arrays that have no element, which Orbax can't store."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        if 0 in leaf.shape:
            continue
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def unflatten(like: Any, flat: Mapping[str, Any]) -> Any:
    """The tree of `like` with the leaves of `flat`."""
    structure = jax.tree_util.tree_structure(like)
    return jax.tree_util.tree_unflatten(structure, [flat[path] for path in flatten(like)])


def records(flat: Mapping[str, Any]) -> dict[str, ArrayRecord]:
    """dtype and global shape of each array."""
    return {path: (str(np.dtype(leaf.dtype)), tuple(int(n) for n in leaf.shape)) for path, leaf in flat.items()}


def require_equal(
    saved: Mapping[str, ArrayRecord],
    wanted: Mapping[str, ArrayRecord],
    where: str,
    remedy: str = "use the config it was saved with, or start a new run from its parameters (checkpoint.init_from)",
) -> None:
    """Compares paths, shapes and dtypes: nothing is padded, cut or cast silently.

    Raises:
      CheckpointError: they differ; lists the paths.
    """
    problems = [f"{path}: not in the checkpoint" for path in sorted(wanted.keys() - saved.keys())]
    problems += [f"{path}: in the checkpoint only" for path in sorted(saved.keys() - wanted.keys())]
    for path in sorted(wanted.keys() & saved.keys()):
        if saved[path] != wanted[path]:
            problems.append(f"{path}: {_show(saved[path])} in the checkpoint, {_show(wanted[path])} in this run")
    if problems:
        more = [f"… and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise CheckpointError(
            f"{where} is of another model or optimizer:\n    " + "\n    ".join(problems[:_SHOWN] + more),
            remedy,
        )


def differing(saved: Mapping[str, ArrayRecord], wanted: Mapping[str, ArrayRecord], part: str) -> set[str]:
    """Paths below `part` that are on one side only, or of another shape or dtype."""
    paths = {path for path in saved.keys() | wanted.keys() if path.startswith(f"{part}/")}
    return {path for path in paths if saved.get(path) != wanted.get(path)}


def read_arrays(folder: epath.Path, flat: Mapping[str, Any], *, partial: bool = False) -> dict[str, jax.Array]:
    """Reads arrays of STEP/state straight to their devices.

    Args:
      folder: the state's folder.
      flat: path -> `jax.ShapeDtypeStruct` with the sharding that is wanted (without one: the first device).
      partial: whether the folder may hold more arrays than these.
    """
    wanted = {path: _with_sharding(leaf) for path, leaf in flat.items()}
    tree = nest(wanted)
    with ocp.Checkpointer(state_handler()) as reader:
        restored = reader.restore(
            folder,
            args=ocp.args.PyTreeRestore(
                item=tree,
                restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
                partial_restore=partial,
            ),
        )
    arrays = flatten(restored) | {path: jnp.zeros(x.shape, x.dtype) for path, x in wanted.items() if 0 in x.shape}
    # Orbax puts arrays into device memory; a sharding in host memory needs one more copy.
    return {
        path: arrays[path] if arrays[path].sharding == leaf.sharding else jax.device_put(arrays[path], leaf.sharding)
        for path, leaf in wanted.items()
    }


def state_handler() -> ocp.PyTreeCheckpointHandler:
    """Orbax' handler of the arrays.

    Not compressed: weights shrink by 8 %, at four times the CPU time of a save, and without compression the space that
    a save needs is known before it begins.
    """
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def size_bytes(flat: Iterable[Any]) -> int:
    """Bytes of the arrays, over all devices, each counted once."""
    return sum(int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize for leaf in flat)


def _with_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _show(record: ArrayRecord) -> str:
    return f"{record[0]}[{', '.join(map(str, record[1]))}]"
