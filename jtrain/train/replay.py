"""Makes the update of a repro bundle again, and tells what came of it."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.checkpoint.checkpoints import Checkpoints
from jtrain.errors import CheckpointError
from jtrain.train.bundle import FLAGS, plain, read_bundle, versions
from jtrain.train.checksums import Checksums
from jtrain.train.nonfinite import first_nonfinite
from jtrain.train.program import Program
from jtrain.train.session import random_platform
from jtrain.train.spikes import complete_numbers


def replay(program: Program, folder: epath.PathLike) -> dict[str, Any]:
    """Makes the update of a bundle again, from its state and its batch.

    Args:
      program: of the bundle's config, on any mesh; figures are equal to the last bit on the same mesh and devices.
      folder: RUN/bundles/step-N.

    Returns:
      step, batch, reason; `steps`: a list of {loss, grad_norm, finite, spike, recorded, equal}; `state`: {recorded,
      found, equal}, the digest of what was read; `nonfinite`: where numbers first stop being finite; `changed`: what is
      not as it was where the bundle was written.

    Raises:
      CheckpointError: the bundle is damaged, or of another model.
    """
    said, rows = read_bundle(folder)
    plan, checksums = program.plan, Checksums(program.plan)
    with Checkpoints(folder, read_only=True) as checkpoints:

        def state() -> Any:
            read = checkpoints.restore(plan.abstract, said["step"] - 1, optional=("across", "numbers"))[0]
            return complete_numbers(read, plan.window, plan.shardings.step)

        before = state()
        digest = checksums.digest(checksums(before))
        if (batches := int(before.step) + int(before.skipped)) != said["batch"]:
            raise CheckpointError(
                f"{os.fspath(folder)}: the state is that before batch {batches}, not {said['batch']}",
                "copy the bundle again from the run",
            )
        batch = {name: _put(values, program.batch_sharding) for name, values in rows.items()}
        places = first_nonfinite(program, before, batch)
        _, metrics = program.train_step(before, batch)
    made = jax.device_get({name: metrics[name] for name in ("loss", "grad_norm", "finite", "spike") if name in metrics})
    figures = {name: plain(made[name]) for name in ("loss", "grad_norm")}
    recorded = said["figures"]
    verdict = {name: bool(made[name]) for name in ("finite", "spike") if name in made}
    return {
        "step": said["step"],
        "batch": said["batch"],
        "reason": said["reason"],
        "steps": [figures | verdict | {"recorded": recorded, "equal": figures == recorded}],
        "state": {"recorded": said["state"], "found": digest, "equal": digest == said["state"]},
        "nonfinite": [place._asdict() for place in places],
        "changed": _changed(said, program),
    }


def _put(values: np.ndarray, sharding: NamedSharding) -> jax.Array:
    own = NamedSharding(sharding.mesh, PartitionSpec(*tuple(sharding.spec)[: values.ndim]))
    return jax.make_array_from_callback(values.shape, own, lambda index: values[index])


def _changed(said: dict[str, Any], program: Program) -> dict[str, list[Any]]:
    """Name -> [then, now]."""
    devices = program.mesh.devices.flat
    now: dict[str, Any] = {
        "mesh": dict(program.mesh.shape),
        "devices": {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)},
        "processes": jax.process_count(),
        "flags": {name: os.environ[name] for name in FLAGS if name in os.environ},
        "random": random_platform(),
        "versions": versions(),
    }
    return {name: [said[name], value] for name, value in now.items() if said[name] != value}
