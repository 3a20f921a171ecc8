"""Meshes of the models beside the policy (`roles`): their numbers, and what they can't be combined with."""

from __future__ import annotations

from jtrain.config.mesh_rules import BATCH_AXES, data_ranks, mesh_numbers, mesh_text, resolve_mesh
from jtrain.config.preference_rules import ALONE, UNPAIRED
from jtrain.config.schema import Config, MeshConfig
from jtrain.config.task_sections import RoleConfig, RolesConfig
from jtrain.errors import ConfigError

ROLES = tuple(RolesConfig.model_fields)
"""The models that may lie beside the policy. Their devices, where they have their own, end the run's in this order."""
_AXES = ("data", "fsdp", "tensor", "expert")


def role_section(config: Config, role: str) -> RoleConfig:
    """What the config says of a role."""
    section: RoleConfig = getattr(config.roles, role)
    return section


def has_mesh(config: Config, role: str) -> bool:
    """Whether a role has a mesh that is not the policy's."""
    return role_section(config, role) != RoleConfig()


def meshes(config: Config) -> list[str]:
    """The roles with a mesh that is not the policy's."""
    return [role for role in ROLES if has_mesh(config, role)]


def policy_sizes(config: Config, n_devices: int) -> dict[str, int]:
    """Size of every axis of the policy's mesh, on the devices that roles leave it.

    Args:
      config: the config.
      n_devices: devices of the run.

    Raises:
      ConfigError: the axes do not multiply to these devices; see also `own_devices`.
    """
    taken = own_devices(config, n_devices)
    fields = [f"roles.{role}.devices" for role in meshes(config) if role_section(config, role).devices != "shared"]
    return resolve_mesh(config.mesh, n_devices - taken, taken=taken, by=" and ".join(fields))


def own_devices(config: Config, n_devices: int) -> int:
    """Devices of the run that roles have for themselves.

    Raises:
      ConfigError: none is left for the policy, or the run is one that can't give devices away.
    """
    taken = 0
    for role in meshes(config):
        devices = role_section(config, role).devices
        if devices == "shared":
            continue
        field = f"roles.{role}.devices: {devices}"
        if (config.distributed.num_processes or 1) > 1:
            raise ConfigError(
                f"{field} with distributed.num_processes: {config.distributed.num_processes}: every process takes part "
                "in every program, and has devices of both meshes in none",
                "Leave it out (shared): the model then lies on the policy's devices, laid out as its axes say.",
            )
        if config.mesh.slices > 1:
            raise ConfigError(
                f"{field} with mesh.slices: {config.mesh.slices}: the slices would be of different sizes",
                "Leave it out: the policy's devices are shared then.",
            )
        taken += devices
        if taken >= n_devices:
            raise ConfigError(
                f"{field} of {n_devices} devices leaves the policy none",
                f"Write a number below {n_devices}, or leave it out: the policy's devices are shared then."
                if n_devices > 1
                else "Leave it out: the policy's devices are shared then.",
            )
    return taken


def devices_of_role(config: Config, role: str, n_devices: int) -> slice:
    """Where the devices that a role has for itself stand among those of the run: at their end, in the order of `ROLES`.

    Raises:
      ConfigError: see `own_devices`.
    """
    begin = n_devices - own_devices(config, n_devices)
    for other in ROLES:
        size = role_section(config, other).devices
        if size != "shared":
            if other == role:
                return slice(begin, begin + size)
            begin += size
    raise ValueError(f"{role} has no devices of its own")


def mesh_of(config: Config, role: str) -> MeshConfig:
    """The section of a role as a section `mesh`."""
    section = role_section(config, role)
    given = {axis: size for axis in _AXES if (size := getattr(section, axis)) is not None}
    return MeshConfig(**{"data": -1, **given}, slices=config.mesh.slices)


def role_sizes(config: Config, role: str, n_devices: int) -> dict[str, int]:
    """Size of every mesh axis of a role that has a mesh, -1 filled in.

    Args:
      config: the config.
      role: one of `ROLES`.
      n_devices: devices of the run.

    Raises:
      ConfigError: the axes do not multiply to its devices; the message names the nearest legal meshes.
    """
    devices, name = role_section(config, role).devices, f"roles.{role}"
    if devices != "shared":
        return resolve_mesh(mesh_of(config, role), devices, name=name, devices=f"{name}.devices")
    return resolve_mesh(mesh_of(config, role), n_devices - own_devices(config, n_devices), name=name, devices=None)


def check_roles(config: Config, n_devices: int, rows: int) -> None:
    """Sees that every role's mesh is one, and takes the policy's batches.

    Args:
      config: the config.
      n_devices: devices of the run.
      rows: of a micro-batch, over all data-parallel ranks.

    Raises:
      ConfigError: it is not so.
    """
    for role in meshes(config):
        sizes = role_sizes(config, role, n_devices)
        ranks = data_ranks(sizes)
        if rows % ranks:
            named = {axis: size for axis, size in sizes.items() if axis in BATCH_AXES}
            raise ConfigError(
                f"roles.{role}: {mesh_text(named)} divides rows {ranks} ways, and a micro-batch has {rows}",
                f"Write roles.{role}: {mesh_text(dict.fromkeys(sizes, 1) | {'tensor': ranks})}, which divides no rows, "
                f"or make the rows of a micro-batch a multiple of {ranks}.",
            )


def check_role_options(config: Config) -> None:
    """What is wrong with roles on any number of devices, and what would be without effect.

    Raises:
      ConfigError: a size that is none; a reference's mesh in a run without a reference of its own.
    """
    for role in meshes(config):
        mesh_numbers(mesh_of(config, role), f"roles.{role}")
    if not has_mesh(config, "reference"):
        return
    section, lora = config.dpo, config.model.lora
    kind = section.loss_type[0]
    if kind in ALONE and kind not in UNPAIRED:
        raise ConfigError(f"roles.reference with dpo.loss_type: {kind}, which has no reference", "Leave it out.")
    if lora.rank and not lora.path and not config.checkpoint.init_from and section.ref_model is None:
        raise ConfigError(
            f"roles.reference with model.lora.rank: {lora.rank}: the reference is the policy without its adapters, on "
            "its mesh and without a copy",
            "Leave it out; or name dpo.ref_model, a model by itself.",
        )
