"""What a model has learned, from another run's checkpoint: parameters, and what it keeps beside them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from jtrain.checkpoint import arrays
from jtrain.checkpoint.layout import MANIFEST, check_store, checkpoints_root, finished_steps, run_path
from jtrain.checkpoint.manifest import ArrayRecord, DamagedCheckpoint, Manifest, check_files, read_manifest
from jtrain.errors import CheckpointError


def load_parameters(
    path: epath.PathLike, abstract_params: Any, *, prefix: str = "params", cast: bool = False, partial: bool = False
) -> Any:
    """Reads the parameters of a run (its newest intact step) or of one checkpoint.

    Args:
      path: RUN, RUN/checkpoints or RUN/checkpoints/<step>.
      abstract_params: pytree of `jax.ShapeDtypeStruct` with the shardings that are wanted.
      prefix: where the parameters stand in the saved state.
      cast: read floating-point arrays in the type that they were saved in, and round them on the devices.
      partial: whether the run may have parameters that are not asked for.

    Returns:
      The pytree with arrays. Optimizer state, step and counters are not read.

    Raises:
      CheckpointError: there is no intact checkpoint, or its parameters have other paths, shapes or dtypes.
    """
    folder, manifest = _intact(run_path(path))
    wanted = {f"{prefix}/{name}": leaf for name, leaf in arrays.flatten(abstract_params).items()}
    saved = {name: record for name, record in manifest.arrays.items() if name.startswith(f"{prefix}/")}
    if partial:
        saved = {name: record for name, record in saved.items() if name in wanted}
    remedy = (
        "give the model the shape that it has there (config.yaml of that run), or write model.path: with its folder"
    )
    stored = {name: _as_saved(leaf, saved.get(name)) for name, leaf in wanted.items()} if cast else wanted
    arrays.require_equal(saved, arrays.records(stored), str(folder), remedy)
    restored = arrays.read_arrays(folder / "state", stored, partial=True)
    for name, leaf in wanted.items():
        if restored[name].dtype != leaf.dtype:  # one by one: no second copy of them all
            restored[name] = jax.jit(lambda x, dtype=leaf.dtype: x.astype(dtype), out_shardings=leaf.sharding)(
                restored[name]
            )
    return arrays.unflatten(abstract_params, {name.removeprefix(f"{prefix}/"): x for name, x in restored.items()})


def saved_parameters(path: epath.PathLike, *, prefix: str = "params") -> list[str]:
    """Paths of the parameters of a run (its newest intact step) or of one checkpoint.

    Raises:
      CheckpointError: there is no intact checkpoint.
    """
    _, manifest = _intact(run_path(path))
    return [name.removeprefix(f"{prefix}/") for name in manifest.arrays if name.startswith(f"{prefix}/")]


def load_variables(path: epath.PathLike, fresh: Any, *, prefix: str = "variables") -> Any:
    """What the model of a run kept beside its parameters (batch statistics, the balancing bias of experts).

    Args:
      path: as for `load_parameters`.
      fresh: pytree of arrays, in their place; those that the checkpoint has not, or in another shape or type, stay.
      prefix: where they stand in the saved state.

    Raises:
      CheckpointError: there is no intact checkpoint.
    """
    values = {f"{prefix}/{name}": leaf for name, leaf in arrays.flatten(fresh).items()}
    if not values:
        return fresh
    folder, manifest = _intact(run_path(path))
    wanted = {
        name: jax.ShapeDtypeStruct(values[name].shape, values[name].dtype, sharding=values[name].sharding)
        for name, record in arrays.records(values).items()
        if manifest.arrays.get(name) == record
    }
    if wanted:
        values |= arrays.read_arrays(folder / "state", wanted, partial=True)
    return arrays.unflatten(fresh, {name.removeprefix(f"{prefix}/"): x for name, x in values.items()})


def saved_dtype(path: epath.PathLike, *, prefix: str = "params") -> str:
    """Type that most parameters of a run's newest intact checkpoint, or of one checkpoint, have.

    Raises:
      CheckpointError: there is no intact checkpoint.
    """
    _, manifest = _intact(run_path(path))
    found = Counter(record[0] for name, record in manifest.arrays.items() if name.startswith(f"{prefix}/"))
    return found.most_common(1)[0][0]


def _as_saved(leaf: Any, record: ArrayRecord | None) -> Any:
    if record is None or not all(jnp.issubdtype(jnp.dtype(dtype), jnp.floating) for dtype in (record[0], leaf.dtype)):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(record[0]), sharding=leaf.sharding)


def _intact(path: epath.Path) -> tuple[epath.Path, Manifest]:
    check_store(path, reads=True)
    if (path / MANIFEST).exists():
        manifest = read_manifest(path)
        check_files(path, manifest)
        return path, manifest
    root = next((root for root in (checkpoints_root(path), path) if finished_steps(root)), None)
    if root is None:
        if (path / "config.json").exists():
            raise CheckpointError(f"{path} is a Hugging Face folder, and no run", "write model.path: with it")
        raise CheckpointError(
            f"{path} holds no finished checkpoint",
            "give a run directory, or one of its folders checkpoints/<step>",
        )
    damage: DamagedCheckpoint | None = None
    for step in reversed(finished_steps(root)):
        try:
            manifest = read_manifest(root / str(step))
            check_files(root / str(step), manifest)
            return root / str(step), manifest
        except DamagedCheckpoint as error:
            damage = damage or error
    raise CheckpointError(f"{path}: no checkpoint is intact; the newest: {damage.message if damage else ''}")
