import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.observe.hlo import analyze
from jtrain.observe.partitioned import compile_and_partition
from jtrain.ops.attention import attention
from jtrain.ops.splash import splash_attention
from jtrain.ops.ulysses import ulysses_attention

from .across import CHEAP, across, assert_equal, definition, inputs, make_mesh, with_gradients

CASES = {
    "four key-value heads on two devices": {"mesh": {"context": 2}, "heads": (8, 4)},
    "two key-value heads repeated for four devices": {"mesh": {"context": 4}, "heads": (8, 2)},
    "rows and heads divided, window": {"mesh": {"data": 2, "context": 2, "tensor": 2}, "heads": (8, 4), "window": 5},
    "three devices, both ways": {"mesh": {"context": 3}, "heads": (6, 2), "causal": False},
}


@pytest.mark.parametrize("name", CASES)
def test_result_and_gradients_equal_the_definition_in_float64(name):
    case = {"causal": True, "window": None} | CASES[name]
    mesh, mask = make_mesh(**case["mesh"]), {"causal": case["causal"], "window": case["window"]}
    with jax.enable_x64(True):
        q, k, v, segments, d = inputs(2, 24, *case["heads"], 4)

        def ulysses(q, k, v):
            with across(mesh, "ulysses"):
                return attention(q, k, v, segment_ids=segments, **mask)

        expected = with_gradients(lambda *a: definition(*a, segments, **mask), q, k, v, d)
        assert_equal(with_gradients(ulysses, q, k, v, d), expected, 1e-12)


def test_a_kernel_of_whole_rows_runs_on_every_device():
    mesh = make_mesh(context=2)
    q, k, v, segments, d = inputs(1, 128, 4, 2, 8, np.float32)
    options = {"causal": True, "window": None, "scale": 8**-0.5, "interpret": True}

    def splash(q, k, v, segments, *_):
        return splash_attention(q, k, v, segment_ids=segments, **options)

    def ulysses(q, k, v):
        with across(mesh, "ulysses"):
            return ulysses_attention(q, k, v, segment_ids=segments, local=splash)

    expected = with_gradients(lambda *a: definition(*a, segments), q, k, v, d)
    assert_equal(with_gradients(ulysses, q, k, v, d), expected, 1e-5)


def test_everything_is_exchanged_once_there_and_once_back():
    mesh = make_mesh(context=4)
    b, length, heads, kv_heads, size = 2, 32, 8, 4, 16
    place = NamedSharding(mesh, PartitionSpec(None, "context"))

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def ulysses(q, k, v, segments):
        with across(mesh, "ulysses"):
            return attention(q, k, v, segment_ids=segments)

    kv = array(b, length, kv_heads, size)
    arguments = (array(b, length, heads, size), kv, kv, array(b, length, dtype=jnp.int32))
    text = compile_and_partition(jax.jit(ulysses, compiler_options=CHEAP).lower(*arguments))[1]
    sent = {}
    for collective, count in analyze(text, dict(mesh.shape)).collectives.items():
        sent[collective.op] = sent.get(collective.op, 0) + collective.wire_bytes * count
    # A device keeps a quarter of what it has and sends the rest; segment ids are gathered.
    token = 2 * size * (2 * heads + 2 * kv_heads)
    assert sent == {"all-to-all": b * length // 4 * token * 3 // 4, "all-gather": b * length * 4 * 3 // 4}


def test_rows_in_zigzag_order_are_refused():
    q, k, v, _, _ = inputs(1, 16, 2, 2, 4, np.float32)
    with across(make_mesh(context=2), "ulysses", zigzag=True), pytest.raises(ValueError, match="natural order"):
        attention(q, k, v)
