"""The reference of a preference loss: a frozen copy, the base under adapters, another model; or a table of its numbers.

Wherever it comes from, its parameters are arguments of a program of its own that runs before the step.
"""

from __future__ import annotations

import functools
import hashlib
import io
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx
from jax.experimental import multihost_utils

from jtrain import progress
from jtrain.checkpoint import arrays, files, layout
from jtrain.checkpoint.checkpoints import Checkpoints
from jtrain.checkpoint.parameters import load_parameters
from jtrain.config.schema import Config
from jtrain.data.cache import cache_folder
from jtrain.data.loader import DataLoader
from jtrain.data.pairs import MismatchedRows
from jtrain.data.rows import Batch, EvalRows, TrainRows
from jtrain.models.lora import projections
from jtrain.parallel import processes
from jtrain.tasks.loaded import plan_of
from jtrain.tasks.prepared import Added
from jtrain.tasks.roles import RoleModel, role_mesh, role_rules
from jtrain.train.program import Program
from jtrain.train.state import StatePlan
from jtrain.train.step import make_forward, to_device

Scores = Callable[[nnx.Module, Any], Added]
ReferenceFn = Callable[[Any, Any, Any], Added]
"""`reference(batch, params, variables)` -> log-probabilities of a batch; params and variables are the policy's."""

_IDENTITY = "identity"
"""Name of the array of a table's file that is no column."""
# What numpy and zipfile raise for a file that is cut off or has wrong bytes.
_DAMAGED = (OSError, ValueError, KeyError, EOFError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error)


def base_reference(program: Program, scores: Scores) -> ReferenceFn:
    """The policy without its adapters: no second model."""

    def without_adapters(model: nnx.Module, batch: Any) -> Added:
        for projection in projections(model).values():
            projection.adapter = None
        return scores(model, batch)

    run = program.forward(without_adapters)
    return lambda batch, params, variables: run(params, variables, batch)


class FrozenCopy:
    """The policy as it began, in the type that the step computes in.

    Args:
      role: the copy, on its mesh.
      scores: what is computed with it.
    """

    def __init__(self, role: RoleModel, scores: Scores):
        self.role = role
        self._run = role.jit(scores)

    @property
    def params(self) -> Any:
        """Its parameters."""
        return self.role.params

    def __call__(self, batch: Any, params: Any, variables: Any) -> Added:
        return self._run(batch)

    @classmethod
    def of(
        cls, config: Config, program: Program, scores: Scores, params: Any, variables: Any, *, exact: bool = False
    ) -> FrozenCopy:
        """The copy of a policy.

        Args:
          config: the run's.
          program: of the run.
          scores: what is computed with it.
          params, variables: the policy's.
          exact: whether it is kept in the type of the parameters, for `mix`.
        """
        cast = (lambda tree: tree) if exact else program.plan.cast
        # A copy: the step takes the policy's own buffers.
        copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, cast(to_device(tree, program.plan.abstract.params))))(
            params
        )
        return cls(copy_role(config, program, copied, variables), scores)

    def mix(self, params: Any, alpha: float, plan: StatePlan) -> None:
        """Moves the copy towards the policy: alpha x policy + (1 - alpha) x copy (Gorbatovski et al. 2024, eq. 7).

        Args:
          params: the policy's.
          alpha: share of the policy.
          plan: the policy's.
        """
        places = jax.tree.map(lambda leaf: leaf.sharding, self.role.params)
        moved = jax.device_put(to_device(params, plan.abstract.params), places)
        self.role.params = _mixed(self.role.params, moved, alpha)

    def save(self, run_dir: str) -> None:
        """Writes RUN/reference, which a resume needs."""
        with Checkpoints(folder_of(run_dir), best_metric=None, async_save=False) as checkpoints:
            checkpoints.save(0, {"params": self.role.params, "variables": self.role.variables}, {})

    @classmethod
    def load(cls, config: Config, program: Program, scores: Scores, variables: Any) -> FrozenCopy:
        """The copy that a run keeps.

        Raises:
          CheckpointError: it is missing or damaged.
        """
        cast = jax.eval_shape(program.plan.cast, program.plan.abstract.params)
        places = jax.tree.map(lambda leaf: leaf.sharding, copy_plan(config, program).abstract.params)
        abstract = jax.tree.map(
            lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at.with_memory_kind("device")),
            cast,
            places,
        )
        return cls(copy_role(config, program, load_parameters(folder_of(config.run_dir), abstract), variables), scores)


@functools.partial(jax.jit, donate_argnums=0)
def _mixed(reference: Any, policy: Any, alpha: float) -> Any:
    def one(old: jax.Array, new: jax.Array) -> jax.Array:
        wide = jnp.promote_types(old.dtype, jnp.float32)
        return ((1.0 - alpha) * old.astype(wide) + alpha * new.astype(wide)).astype(old.dtype)

    return jax.tree.map(one, reference, policy)


def copy_plan(config: Config, program: Program) -> StatePlan:
    """Where a copy of the policy lies as the reference."""
    mesh = role_mesh(config, "reference", program.mesh)
    if mesh is program.mesh:
        return program.plan
    return plan_of(program.model, mesh, role_rules(config, "reference", program), program.precision)


def copy_role(config: Config, program: Program, params: Any, variables: Any) -> RoleModel:
    """A copy of the policy as the reference, moved to its mesh.

    Args:
      config: the run's.
      program: of the run.
      params: arrays that the step does not take.
      variables: the policy's.
    """
    plan = copy_plan(config, program)
    if plan is not program.plan:
        places = jax.tree.map(lambda leaf: leaf.sharding, (plan.abstract.params, plan.abstract.variables))
        params, variables = jax.device_put((params, variables), places)
    return RoleModel(
        "reference",
        program.forward if plan is program.plan else lambda function: make_forward(program.model, plan, function),
        params,
        jax.tree.map(jnp.copy, variables),
        mesh=plan.mesh,
        rules=plan.rules,
        program=program,
    )


def folder_of(run_dir: str) -> epath.Path:
    """Where a run keeps its frozen copy."""
    return layout.run_path(run_dir) / "reference"


def has_copy(run_dir: str) -> bool:
    """Whether a run keeps a frozen copy."""
    return bool(layout.finished_steps(layout.checkpoints_root(folder_of(run_dir))))


class OtherModel:
    """A model on disk as the reference.

    Args:
      role: the model, on its mesh.
      scores: what is computed with it.
    """

    def __init__(self, role: RoleModel, scores: Scores):
        self.role = role
        self._run = role.jit(scores)

    @property
    def params(self) -> Any:
        """Its parameters."""
        return self.role.params

    def __call__(self, batch: Any, params: Any, variables: Any) -> Added:
        return self._run(batch)


# -- precomputed -------------------------------------------------------------------------------------------------------


class ReferencedRows:
    """Rows with the reference's log-probabilities, once these are known.

    Args:
      rows: a stream, or an evaluation's; their order in `in_order` is that of the table.

    Attributes:
      table: name -> [rows], in the order of the sources; None: not known yet, rows are as they are.
    """

    def __init__(self, rows: TrainRows | EvalRows | MismatchedRows):
        self.plain, self.fingerprint = rows, rows.fingerprint
        self.buckets = getattr(rows, "buckets", ())
        self.table: dict[str, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.plain)

    def row_ids(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert not isinstance(self.plain, EvalRows)  # an evaluation's rows have no other order
        return self.plain.row_ids(indices)

    def batch_length(self, indices: np.ndarray) -> int | None:
        return self.plain.batch_length(indices)

    def rows(self, indices: np.ndarray) -> Batch:
        batch = self.plain.rows(indices)
        if self.table is None:
            return batch
        place = self.plain.places(indices)
        past = place >= len(self)
        for name, values in self.table.items():
            batch[name] = np.where(past, 0.0, values[np.where(past, 0, place)]).astype(values.dtype)
        return batch

    def in_order(self) -> EvalRows | MismatchedRows:
        """All rows once, in the order of the table."""
        return self.plain.in_order()


def compute_table(
    rows: EvalRows | MismatchedRows, program: Program, reference: Callable[[Any], Added], size: int
) -> dict[str, np.ndarray]:
    """One pass over rows: the reference's log-probabilities, name -> [rows] on the host of every process.

    Args:
      rows: in order.
      program: whose mesh is used.
      reference: of a batch; returns name -> [1, b].
      size: rows of a batch.
    """
    found: list[dict[str, np.ndarray]] = []
    with DataLoader(rows, global_batch_size=size, sharding=program.batch_sharding, prefetch=1) as loader:
        for index in range(-(-len(rows) // size)):
            logps = {name: x[0] for name, x in reference(loader[index]).items()}
            found.append(multihost_utils.process_allgather(logps, tiled=True))
            progress.report()
    return {name: np.concatenate([part[name] for part in found])[: len(rows)] for name in found[0]}


def model_digest(params: Any) -> str:
    """A digest of all weights: the same on every mesh, since sums of integers do not mind their order."""

    def one(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
        place = jnp.arange(bits.size, dtype=jnp.uint32).reshape(bits.shape)
        mixed = (bits ^ (bits >> 15)) * jnp.uint32(0x9E3779B1)
        return jnp.stack(
            [(mixed * (place * jnp.uint32(2) + 1)).sum(), (mixed ^ (place * jnp.uint32(0x85EBCA6B))).sum()]
        )

    sums = jax.device_get(jax.jit(lambda tree: jax.tree.map(one, tree))(arrays.flatten(params)))
    return hashlib.blake2b(repr({k: v.tolist() for k, v in sorted(sums.items())}).encode(), digest_size=16).hexdigest()


def table_path(cache_dir: str | None, *parts: object) -> Path:
    """Where the table of this model on these rows is kept between runs."""
    return cache_folder(cache_dir) / "reference" / f"{table_identity(*parts)}.npz"


def table_identity(*parts: object) -> str:
    """A digest of what a run's table was made of; the run's table has it beside its numbers."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def read_table(path: Any, names: tuple[str, ...], rows: int, identity: str) -> dict[str, np.ndarray] | None:
    """A table that is there, whole and of this identity, else None; process 0's on every process.

    The processes decide as one: who has no table would go into the pass that makes it, and wait there for the others.
    """
    table = _read_table(path, names, rows, identity) if processes.is_main() else None
    if not processes.agree(table is not None):
        return None
    if table is not None and jax.process_count() == 1:
        return table
    kind = np.float64 if jax.config.jax_enable_x64 else np.float32
    sent = table or {name: np.zeros(rows, kind) for name in names}
    return {name: np.asarray(processes.agree(sent[name].astype(kind, copy=False))) for name in names}


def _read_table(path: Any, names: tuple[str, ...], rows: int, identity: str) -> dict[str, np.ndarray] | None:
    try:
        with epath.Path(path).open("rb") as file, np.load(file, allow_pickle=False) as found:
            if str(found[_IDENTITY]) != identity:
                return None
            table = {name: found[name] for name in names}
    except _DAMAGED:
        return None
    return table if all(values.shape == (rows,) for values in table.values()) else None


def write_table(path: Any, table: dict[str, np.ndarray], identity: str) -> None:
    """Writes a table, by process 0.

    Raises:
      OSError: it can't be written.
    """
    if not processes.is_main():
        return
    path, content = epath.Path(path), io.BytesIO()
    np.savez(content, **table, **{_IDENTITY: np.asarray(identity)})  # type: ignore[arg-type]
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomic(path, content.getvalue())
