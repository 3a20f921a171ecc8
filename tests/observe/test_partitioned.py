"""The partitioned program of a small sharded function, against what its shapes need."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.observe.hlo import analyze
from jtrain.observe.partitioned import compile_and_partition


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))


def lowered(mesh):
    """Five scanned layers: a kernel [16, 16] in bfloat16 is gathered, its gradient summed and cut."""
    place = NamedSharding(mesh, P(None, "fsdp"))

    def loss(kernels, x):
        def layer(h, kernel):
            kernel = jax.lax.with_sharding_constraint(kernel, NamedSharding(mesh, P()))
            return jax.lax.with_sharding_constraint(h @ kernel, NamedSharding(mesh, P("fsdp"))), None

        return jax.lax.scan(layer, x, kernels)[0].astype(jnp.float32).sum()

    kernels = jax.ShapeDtypeStruct((5, 16, 16), jnp.bfloat16, sharding=place)
    x = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))
    return jax.jit(jax.grad(loss), out_shardings=place).lower(kernels, x)


def test_collectives_keep_their_type_and_a_sum_that_is_cut_is_a_reduce_scatter(mesh):
    compiled, text = compile_and_partition(lowered(mesh))
    cost = analyze(text, dict(mesh.shape))
    assert cost.unknown_loops == ()
    kernel = 16 * 16 * 2  # bytes
    found = {}
    for collective, count in cost.collectives.items():
        key = (collective.op, collective.axes, collective.bytes, collective.in_loop)
        found[key] = found.get(key, 0) + count
    assert found[("reduce-scatter", ("fsdp",), kernel, True)] == 5
    assert found[("all-gather", ("fsdp",), kernel, True)] in (5, 10)
    assert {op for op, *_ in found} <= {"reduce-scatter", "all-gather"}
    assert compiled.memory_analysis().argument_size_in_bytes > 0


def test_a_program_in_the_cache_is_compiled_all_the_same(mesh, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        texts = [compile_and_partition(lowered(mesh))[1] for _ in range(2)]
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert all("partition-id" in text for text in texts)
    assert jax.config.jax_enable_compilation_cache


def test_a_program_of_one_device_is_read_as_it_is_compiled():
    compiled, text = compile_and_partition(jax.jit(lambda x: x + 1).lower(jnp.ones(3)))
    assert text == compiled.as_text()
