"""One of two processes with four CPU devices each.

usage: two_process_worker.py INDEX PORT RUN. Saves, fails, restores; prints one JSON line of what it saw.
"""

import errno
import json
import os
import sys
import time

if __name__ == "__main__":  # before jax; the test that imports this has its own devices
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

SHAPE = (16, 8)


def values(step):
    return np.arange(128, dtype=np.float32).reshape(SHAPE) + 1000 * step


def main():
    index, port, run = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, index, coordinator_bind_address=f"127.0.0.1:{port}")
    from orbax.checkpoint._src.checkpointers import async_checkpointer

    from jtrain.checkpoint import Checkpoints, RunLease, finish, open_run_dir
    from jtrain.errors import ConfigError, StorageError

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    shardings = {
        "w": NamedSharding(mesh, PartitionSpec("fsdp", "tensor")),
        "replicated": NamedSharding(mesh, PartitionSpec()),
    }
    abstract = {k: jax.ShapeDtypeStruct(SHAPE, np.float32, sharding=s) for k, s in shardings.items()}

    def state(step):
        return {k: jax.make_array_from_callback(SHAPE, s, lambda i: values(step)[i]) for k, s in shardings.items()}

    def equal(restored, step):
        return all(
            bool((np.asarray(shard.data) == values(step)[shard.index]).all())
            for array in restored.values()
            for shard in array.addressable_shards
        )

    events, saw = [], {}
    opened = open_run_dir(run)
    saw["run_id"] = opened.run_id
    with RunLease(opened.path, opened.run_id):
        try:
            RunLease(opened.path).acquire()
        except ConfigError as error:
            saw["lock"] = error.message
        with Checkpoints(opened.path, on_event=lambda kind, _: events.append(kind)) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, state(step), {"step": step})
            checkpoints.wait()
            saw["durable"] = checkpoints.durable_step
            # one process can't write: all of them learn of it, and the next save makes up for it
            original = finish.write_manifest, finish.hash_files

            def fail(*_, **__):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            saw["failures"] = []
            for who, name in ((0, "write_manifest"), (1, "hash_files")):
                if index == who:
                    setattr(finish, name, fail)
                checkpoints.save(3, state(3), {"step": 3})
                try:
                    checkpoints.wait()
                except StorageError as error:
                    saw["failures"].append(error.message)
                finish.write_manifest, finish.hash_files = original
            # nor does anybody wait for one that can't write its arrays, while Orbax does
            seconds, futures = time.monotonic(), async_checkpointer.future.ChainedFuture.result
            if index == 1:
                async_checkpointer.future.ChainedFuture.result = fail
            checkpoints.save(3, state(3), {"step": 3})
            try:
                checkpoints.wait()
            except StorageError as error:
                saw["failures"].append(error.message)
            async_checkpointer.future.ChainedFuture.result = futures
            saw["seconds"] = time.monotonic() - seconds
            checkpoints.save(3, state(3), {"step": 3})
            checkpoints.wait()
            saw["steps"] = checkpoints.steps()
            restored, meta, _ = checkpoints.restore(abstract)
            saw["restored"] = [equal(restored, 3), meta]
            if index == 0:  # flip one bit of one file; whichever process has it in its share, all fall back
                path = opened.path / "checkpoints" / "3" / "meta" / "metadata"
                path.write_bytes(path.read_bytes().replace(b"3", b"2"))
            restored, meta, step = Checkpoints(opened.path).restore(abstract)
            saw["fallback"] = [equal(restored, 2), meta, step]
    saw["events"] = events
    print(json.dumps(saw), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
