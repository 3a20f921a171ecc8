"""What `jtrain doctor` asks of jax, in a process of its own: `python -m jtrain.cli.doctor_probe devices | state`.

The request is JSON on standard input, the answer a line of JSON. `devices`: what is there. `state`: sizes of the run's
state on its mesh, over as many CPU devices in place of the real ones; nothing is allocated.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from jtrain.errors import JtrainError

_LAUNCHERS = ("SLURM_", "OMPI_", "PMI", "TPU_WORKER", "MEGASCALE_", "JTRAIN_")
"""Beginnings of variables by which a process finds others: this one is alone."""

_OF_THE_STATE = (
    "run_dir", "max_length", "global_batch_size", "per_device_batch_size", "gradient_accumulation_steps", "precision",
    "model", "data", "mesh", "context", "pipeline", "sharding", "dcn", "optimizer", "checkpoint",
)  # fmt: skip
"""What a decoder and its optimizer are made from, the same for every task: the rest is left at its default."""


def devices(request: Mapping[str, Any]) -> dict[str, Any]:
    """Platform, kinds, count, and memory of this process's devices."""
    import jax

    if request["platforms"]:
        jax.config.update("jax_platforms", request["platforms"])
    if request["cpus"]:
        jax.config.update("jax_num_cpu_devices", request["cpus"])
    found = jax.local_devices()
    stats = [device.memory_stats() or {} for device in found]
    limits = [s["bytes_limit"] for s in stats if "bytes_limit" in s]
    used = [s.get("bytes_in_use", 0) for s in stats if "bytes_limit" in s]
    return {
        "platform": found[0].platform,
        "kinds": Counter(device.device_kind for device in found),
        "count": len(found),
        "version": getattr(found[0].client, "platform_version", "").splitlines()[0:1],
        "memory": min(limits, default=None),
        "used": max(used, default=0),
    }


def state(request: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters, bytes of a checkpoint, and bytes of state and gradients on a device."""
    from jtrain.checkpoint import arrays
    from jtrain.cli.explanation import trainer_without_data
    from jtrain.config import load_config
    from jtrain.parallel.sharding import bytes_per_device

    given = request["config"]
    fields = {name: given[name] for name in _OF_THE_STATE if name in given}
    changes = {
        "accelerator": "cpu",
        "devices": request["devices"],
        "compile_cache": "",
        "overlap": "off",
        "sharding": {**fields["sharding"], "offload_optimizer": False, "offload_parameters": False},
        "data": {"tokenizer": fields["data"]["tokenizer"]},
    }
    if fields["precision"] in ("fp8-mixed", "auto"):
        changes["precision"] = "bf16-mixed"  # the same state
    config = load_config({**fields, **changes}, env={})
    plan = trainer_without_data(config).plan
    parameters = arrays.flatten(plan.abstract.params)
    return {
        "parameters": sum(leaf.size for leaf in parameters.values()),
        "checkpoint_bytes": arrays.size_bytes(arrays.flatten(plan.abstract).values()),
        "state_bytes": bytes_per_device(plan.abstract),
        "gradient_bytes": bytes_per_device(plan.abstract.params),
    }


def main(what: str) -> int:
    """Answers one request; a mistake in the config is an answer, too: `failure` and `remedy`."""
    request = json.load(sys.stdin)
    for name in [name for name in os.environ if name.startswith(_LAUNCHERS)] if what == "state" else []:
        del os.environ[name]
    try:
        print(json.dumps({"devices": devices, "state": state}[what](request)), flush=True)
    except JtrainError as error:
        print(json.dumps({"failure": error.message, "remedy": error.remedy}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
