"""Two known aborts of XLA, each in a process of its own: an upgrade that mends or worsens them is seen here.

Every program first compiles a near relative that must work, so that a failure of another kind is not taken for the
abort. When a test fails, read its message: it says what in jtrain may go, or must be looked at anew.
"""

import os
import signal
import subprocess
import sys

import jaxlib
import pytest

ABORTS = {"0.10": True, "0.12": True}
"""jaxlib -> whether it aborts (both canaries alike so far)."""

PSUM = """
def summed(dtype):
    add = jax.shard_map(
        lambda x: jax.lax.psum(x, "pipeline"),
        mesh=mesh, in_specs=P("pipeline"), out_specs=P(), axis_names={"pipeline"}, check_vma=False,
    )
    x = jax.ShapeDtypeStruct((2, 4), dtype, sharding=NamedSharding(mesh, P("pipeline", "tensor")))
    jax.jit(add).lower(x).compile()

summed(jnp.float32)
print("relative compiled", flush=True)
summed(jnp.bfloat16)
print("compiled")
"""

EMBEDDING = """
def embed(columns):
    def region(table, ids):
        inside = jax.sharding.get_abstract_mesh()
        ids = jax.lax.with_sharding_constraint(ids, NamedSharding(inside, P("fsdp")))
        x = jnp.take(table, ids, axis=0)
        return jax.lax.psum((x**2).sum(), "pipeline")

    loss = jax.shard_map(
        region, mesh=mesh, in_specs=(P("pipeline"), P()), out_specs=P(), axis_names={"pipeline"}, check_vma=False
    )
    place = NamedSharding(mesh, P("pipeline", columns))
    table = jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=place)
    ids = jax.ShapeDtypeStruct((8, 4), jnp.int32, sharding=NamedSharding(mesh, P("fsdp")))
    jax.jit(jax.grad(loss)).lower(table, ids).compile()

embed(None)
print("relative compiled", flush=True)
embed("fsdp")
print("compiled")
"""

START = """
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((2, 2, 2), ("pipeline", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
"""


def run(program: str) -> subprocess.CompletedProcess:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    command = [sys.executable, "-c", START + program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def check(done: subprocess.CompletedProcess, said: str, where: str) -> None:
    version = ".".join(jaxlib.__version__.split(".")[:2])
    if version not in ABORTS:
        pytest.fail(f"jaxlib {version} is new: add it to ABORTS; it ended with {done.returncode}\n{done.stderr[-500:]}")
    assert done.stdout.startswith("relative compiled"), f"not the known fault\n{done.stdout}{done.stderr[-2000:]}"
    if ABORTS[version]:
        assert done.returncode == -signal.SIGABRT, f"jaxlib {version} no longer aborts: {where}\n{done.stderr[-2000:]}"
        assert said in done.stderr, f"it aborts for another reason than before: {where}\n{done.stderr[-2000:]}"
    else:
        assert done.returncode == 0, f"jaxlib {version} aborts again: {where}\n{done.stderr[-2000:]}"


def test_a_bf16_sum_over_a_manual_axis_of_a_partly_automatic_region():
    where = "jtrain.ops.collectives.sum_over takes such sums in float32 on CPU, and need not where they compile"
    check(run(PSUM), "Invalid binary instruction opcode copy", where)


def test_an_embedding_and_its_ids_divided_by_automatic_fsdp_in_a_manual_pipeline():
    where = (
        "jtrain.parallel.pipeline keeps fsdp manual beside the pipeline; automatic fsdp may be tried where it compiles"
    )
    check(run(EMBEDDING), "spmd_partitioner_util.cc", where)
