"""One of two processes that share a run directory and have a second place.

usage: backup_worker.py INDEX PORT RUN PLACE. Loses the run directory, damages a step; prints what it saw as JSON.
"""

import json
import os
import shutil
import sys

if __name__ == "__main__":  # before jax
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SHAPE = (64, 8)


def values(step):
    return np.arange(512, dtype=np.float32).reshape(SHAPE) + 1000 * step


def main():
    index, port, run, place = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index, coordinator_bind_address=f"127.0.0.1:{port}")
    from jtrain.checkpoint import Checkpoints, open_run_dir, peers
    from jtrain.checkpoint.backup import open_backup

    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("fsdp",)), PartitionSpec("fsdp"))
    abstract = {"w": jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=sharding)}
    saw = {"restored": [], "events": []}

    def opened():
        backup = open_backup(place, open_run_dir(run))
        saw["brought"] = backup.bring_back()
        return Checkpoints(run, backup=backup, on_event=lambda kind, _: saw["events"].append(kind))

    def restore():
        with opened() as checkpoints:
            state, meta, step = checkpoints.restore(abstract)
            shards = state["w"].addressable_shards
            equal = all(bool((np.asarray(shard.data) == values(step)[shard.index]).all()) for shard in shards)
            saw["restored"].append([step, meta, equal, saw["brought"]])

    with opened() as checkpoints:
        for step in (1, 2):
            state = {"w": jax.make_array_from_callback(SHAPE, sharding, lambda i, step=step: values(step)[i])}
            checkpoints.save(step, state, {"step": step})
            checkpoints.wait()
            checkpoints.wait_for_backup()
    peers.exchange("saved", None)
    if index == 0:
        shutil.rmtree(run)
    peers.exchange("removed", None)
    restore()
    peers.exchange("restored", None)
    if index == 0:
        path = os.path.join(run, "checkpoints", "2", "meta", "metadata")
        with open(path, "r+b") as file:
            file.write(b"!")
    peers.exchange("damaged", None)
    restore()
    print(json.dumps(saw), flush=True)


if __name__ == "__main__":
    main()
