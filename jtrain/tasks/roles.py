"""Models beside the policy, each on the mesh of its role: the policy's, its devices laid out another way, or others.

Batches move from mesh to mesh by `jax.device_put`, and so do the results; parameters are arguments of every program.

Legend: A micro-batches, b rows of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jtrain.config.role_rules import check_roles, devices_of_role, has_mesh, mesh_of, meshes, role_section
from jtrain.config.schema import Config
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import CheckpointError, ConfigError, DataError
from jtrain.models.config import DecoderConfig
from jtrain.parallel import processes
from jtrain.parallel.mesh import data_ranks, describe, make_mesh
from jtrain.parallel.sharding import Rules, batch_sharding, make_rules
from jtrain.tasks.decoder import check_language_model
from jtrain.tasks.loading import load_opened
from jtrain.tasks.opened import Opened, open_model
from jtrain.train.program import Program
from jtrain.train.step import make_forward

_PROBE = "The quick brown fox, 1234 times: naïve 東京 (x == y);\n"


def role_mesh(config: Config, role: str, mesh: Mesh) -> Mesh:
    """The mesh of a role; `mesh` where the config says nothing.

    Args:
      config: the run's.
      role: reference or teacher.
      mesh: the policy's.

    Raises:
      ConfigError: its axes do not multiply to its devices; devices of its own in a run of several processes.
    """
    if not has_mesh(config, role):
        return mesh
    own = role_section(config, role).devices
    if own == "shared":
        return make_mesh(mesh_of(config, role), devices=list(mesh.devices.flat))
    if jax.process_count() > 1:
        raise ConfigError(
            f"roles.{role}.devices: {own} in a run of {jax.process_count()} processes, each of which takes part in "
            "every program",
            "Leave it out (shared): the model then lies on the policy's devices, laid out as its axes say.",
        )
    devices = processes.devices_of(config)
    return make_mesh(mesh_of(config, role), devices=devices[devices_of_role(config, role, len(devices))])


def role_rules(config: Config, role: str, program: Program) -> Rules:
    """The table of logical axes on a role's mesh: the run's, without stages where the mesh is another."""
    return make_rules(config.sharding.rules) if has_mesh(config, role) else program.rules


def check_meshes(config: Config, rows: int) -> None:
    """Sees that every role's mesh is one, and divides micro-batches of `rows` rows.

    Raises:
      ConfigError: it is not so.
    """
    if meshes(config):
        check_roles(config, len(processes.devices_of(config)), rows)


def described(config: Config, mesh: Mesh) -> list[str]:
    """The roles with a mesh that is not `mesh`, the policy's, as a run's summary says it: `reference on tensor=8`."""
    lines = []
    for role in meshes(config):
        found = role_mesh(config, role, mesh)
        ids = sorted(device.id for device in found.devices.flat)
        own = "" if role_section(config, role).devices == "shared" else f" of its own (devices {ids[0]} to {ids[-1]})"
        lines.append(f"{role} on {describe(found)}{own}")
    return lines


def row_multiple(config: Config, mesh: Mesh) -> int:
    """The least number of rows that `mesh`, the policy's, and the meshes of all roles divide."""
    return math.lcm(data_ranks(mesh), *(data_ranks(role_mesh(config, role, mesh)) for role in meshes(config)))


class RoleModel:
    """A model that is not trained, on the mesh of its role, called with batches that lie on the policy's.

    Args:
      role: for messages.
      forward: jits `function(module, *arguments)` on the role's mesh as `forward(params, variables, *arguments)`.
      params, variables: nested dicts of arrays on the role's mesh.
      mesh, rules: of the role, and its table of logical axes.
      program: the policy's.
    """

    def __init__(
        self,
        role: str,
        forward: Callable[[Callable[..., Any]], Callable[..., Any]],
        params: Any,
        variables: Any,
        *,
        mesh: Mesh,
        rules: Rules,
        program: Program,
    ):
        self.role, self.mesh = role, mesh
        self.params, self.variables = params, variables
        self.forward, self.rules, self._program = forward, rules, program

    def jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Jits `function(module, batch, *arguments)`, traced on the role's mesh, as `call(batch, *arguments)`.

        `batch` and the arguments are trees of arrays of the policy's mesh (or of the host), and so are the results:
        arrays [A, b, ...] with their rows divided over the data-parallel ranks where these divide b, others whole on
        every device. The parameters are those that `params` holds when it is called.

        Raises:
          ConfigError: (by the call) the role's data-parallel ranks do not divide the rows of the batch.
        """
        forward, program = self.forward(function), self._program
        if self.mesh is program.mesh:
            return lambda batch, *arguments: forward(self.params, self.variables, batch, *arguments)

        def call(batch: Any, *arguments: Any) -> Any:
            rows, ranks = {x.shape[1] for x in jax.tree.leaves(batch) if x.ndim > 1}, _ways(self.mesh, self.rules)
            if any(n % ranks for n in rows):
                raise ConfigError(
                    f"roles.{self.role}: {describe(self.mesh)} divides rows {ranks} ways, and a batch has {max(rows)}",
                    f"Make the rows a multiple of {ranks}, or divide the model by tensor, which divides no rows.",
                )
            moved = spread((batch, *arguments), self.mesh, self.rules)
            return spread(forward(self.params, self.variables, *moved), program.mesh, program.rules)

        return call


def spread(tree: Any, mesh: Mesh, rules: Rules) -> Any:
    """Arrays on a mesh: [A, b, ...] with their rows divided where the mesh divides b, others whole on every device."""
    rows, whole = batch_sharding(mesh, rules), NamedSharding(mesh, PartitionSpec())

    def one(x: Any) -> jax.Array:
        return jax.device_put(x, rows if x.ndim > 1 and x.shape[1] % _ways(mesh, rules) == 0 else whole)

    return jax.tree.map(one, tree)


def _ways(mesh: Mesh, rules: Rules) -> int:
    """In how many parts the rows of a batch are divided."""
    return math.prod(mesh.shape[axis] for axis in rules["batch"])


def open_role(path: str, field: str) -> Opened:
    """Looks at a model that a field of the config names.

    Raises:
      ConfigError, CheckpointError: what `open_model` raises, with the name of the field.
    """
    try:
        return open_model(path)
    except (ConfigError, CheckpointError) as error:
        raise type(error)(f"{field}: {error.message}", error.remedy) from error


def load_role(
    config: Config,
    role: str,
    path: str,
    program: Program,
    *,
    shape: DecoderConfig,
    tokenizer: Tokenizer,
    field: str = "",
) -> RoleModel:
    """A model on disk on the mesh of a role, in the type that the run computes in.

    Args:
      config: the run's.
      role: reference or teacher.
      path: what `load_model` takes.
      program: of the run.
      shape, tokenizer: the policy's.
      field: that names the path, for messages.

    Raises:
      DataError: it has another tokenizer than the policy, or a table of tokens of another size.
      ConfigError, CheckpointError: there is no such model, it is no language model, or it is damaged.
    """
    named = f"{field or role}: {path}"
    opened = open_role(path, field or role)
    check_language_model(opened.decoder, named)
    _check_tokens(config, named, opened, shape, tokenizer)
    mesh = role_mesh(config, role, program.mesh)
    dtype = jnp.dtype(program.precision.compute_dtype).name
    loaded = load_opened(opened, dtype=dtype, mesh=mesh, rules=role_rules(config, role, program))
    return RoleModel(
        role,
        lambda function: make_forward(loaded.model, loaded.plan, function),
        loaded.params,
        loaded.variables,
        mesh=mesh,
        rules=loaded.rules,
        program=program,
    )


def _check_tokens(config: Config, named: str, opened: Opened, shape: DecoderConfig, tokenizer: Tokenizer) -> None:
    """Sees that a model has the policy's tokens.

    Raises:
      DataError: another tokenizer, or another size of the vocabulary: a table may be padded beyond its tokenizer.
    """
    remedy = "Name a model with the policy's tokenizer: the same tokens are scored by both."
    theirs, size = opened.tokenizer(), opened.decoder.vocab_size
    alike = theirs is not None and theirs.encode_batch([_PROBE]) == tokenizer.encode_batch([_PROBE])
    if theirs is not None and not alike:
        raise DataError(f"{named} has another tokenizer than the policy: the same text has other tokens", remedy)
    if size == shape.vocab_size:
        return
    if theirs is not None and theirs.vocab_size == tokenizer.vocab_size:  # the tables alone differ
        remedy = (
            f"Write model.vocab_size: {size}: the tokenizer is the same, and then the table of tokens is as large."
            if config.model.path is None
            else "The tokenizer is the same: bring both tables to one size, with transformers' "
            f"resize_token_embeddings({max(size, shape.vocab_size)})."
        )
    raise DataError(f"{named} has a vocabulary of {size}, the policy one of {shape.vocab_size}", remedy)
