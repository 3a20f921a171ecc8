"""Asks the compiler of a device that is not here for every option of the registry, and prints what it says, as JSON.

    python tests/parallel/xla_compile.py tpu | gpu [GPU_SPEC]

tpu needs libtpu, gpu the CUDA plugin of jaxlib and the text of a GpuTargetConfigProto.
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

from jax.experimental import topologies

from jtrain.parallel.xla import REGISTRY, Purpose, compiler_options, options_of_run, refusal


def main() -> None:
    platform = sys.argv[1]
    if platform == "tpu":
        topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    else:
        with open(sys.argv[2]) as file:
            spec = file.read()
        topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=spec, topology="1x1x2")
    device = topology.devices[0]
    purposes: dict[Purpose, bool] = dict.fromkeys(("overlap", "slices", "deterministic"), True)
    options = compiler_options(platform, **purposes)
    print(
        json.dumps(
            {
                "rows": [row.name for row in REGISTRY if row.platform == platform],
                "options": options,
                "refused": {n: said for n, v in options.items() if (said := refusal(device, ((n, v),)))},
                "unknown": refusal(device, (("xla_no_such_option", "true"),)),
                "of_run": options_of_run(device, {}, overlap=True, slices=True, deterministic=True),
            }
        )
    )


main()
