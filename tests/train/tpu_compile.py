"""Compiles a training step for a TPU that is not here, and prints what the compiler says of its memory, as JSON.

    python tests/train/tpu_compile.py TOPOLOGY JSON

JSON: {"config": {...}, "shape": {...}}. Needs libtpu (`pip install 'jtrain[tpu]'`), no TPU.
"""

import json
import os
import sys

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jtrain.config import load_config
from jtrain.models.decoder import Decoder
from jtrain.models.presets import preset
from jtrain.tasks.pretrain import pretrain_loss
from jtrain.train.program import build_program, mesh_and_batch


def main() -> None:
    topology, given = sys.argv[1], json.loads(sys.argv[2])
    devices = list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    config, mesh, batch = mesh_and_batch(load_config(given["config"], env={}), devices)
    shape = preset(**given["shape"])
    program = build_program(
        config, lambda rngs: Decoder(shape, rngs), pretrain_loss(), mesh=mesh, batch=batch, max_steps=100
    )
    rows = (batch.accumulation, batch.rows)
    tokens = jax.ShapeDtypeStruct((*rows, config.max_length), jnp.int32, sharding=program.batch_sharding)
    arrays = dict.fromkeys(("input_ids", "labels", "segment_ids", "position_ids"), tokens)
    arrays["row"] = jax.ShapeDtypeStruct(rows, jnp.int32, sharding=program.batch_sharding)
    traced = program.train_step.trace(program.plan.abstract, arrays)
    compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    print(
        json.dumps(
            {
                "argument_bytes": memory.argument_size_in_bytes,
                "host_argument_bytes": memory.host_argument_size_in_bytes,
                "temporary_bytes": memory.temp_size_in_bytes,
                "host_temporary_bytes": memory.host_temp_size_in_bytes,
                "peak_bytes": memory.peak_memory_in_bytes,
                "host_buffers": text.count("S(5)"),
                "splash": text.count("splash"),
                "gmm": text.count("gmm"),
                "ragged_all_to_all": text.count(" ragged-all-to-all-start("),
            }
        )
    )


main()
