import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.observe.hlo import analyze
from jtrain.observe.partitioned import compile_and_partition
from jtrain.ops.attention import attention
from jtrain.ops.logical import logical_rules
from jtrain.ops.ring_attention import ring_attention

from .across import CHEAP, RULES, across, assert_equal, definition, inputs, make_mesh, places, with_gradients

CASES = {
    "zigzag, 8 devices": {"mesh": {"context": 8}},
    "zigzag, blocks that do not divide a chunk, 3 devices": {"mesh": {"context": 3}, "length": 42, "block": 3},
    "zigzag, window, rows and heads divided": {"mesh": {"data": 2, "context": 2, "tensor": 2}, "window": 7},
    "zigzag, both ways": {"mesh": {"context": 4}, "causal": False},
    "zigzag, a row is one document": {"mesh": {"context": 4}, "segments": False},
    "natural order": {"mesh": {"context": 4}, "zigzag": False},
    "natural order, window that ends the ring early": {"mesh": {"context": 8}, "zigzag": False, "window": 9},
    "key-value heads that tensor does not divide": {"mesh": {"context": 2, "tensor": 4}},
}


@pytest.mark.parametrize("name", CASES)
def test_result_and_gradients_equal_the_definition_in_float64(name):
    case = {"length": 48, "block": 2, "zigzag": True, "causal": True, "window": None, "segments": True} | CASES[name]
    mesh, length = make_mesh(**case["mesh"]), case["length"]
    with jax.enable_x64(True):
        q, k, v, segments, d = inputs(2, length, 4, 2, 6)
        segments = segments if case["segments"] else None
        mask = {"causal": case["causal"], "window": case["window"]}
        order = places(length, mesh.shape["context"] if case["zigzag"] else 1)

        def ring(q, k, v):
            with across(mesh, zigzag=case["zigzag"]):
                given = None if segments is None else segments[:, order]
                options = {"segment_ids": given, "scale": 6**-0.5, "block": case["block"]}
                out = ring_attention(*(x[:, order] for x in (q, k, v)), **options, **mask)
            return out[:, np.argsort(order)]

        expected = with_gradients(lambda *a: definition(*a, segments, **mask), q, k, v, d)
        assert_equal(with_gradients(ring, q, k, v, d), expected, 1e-12)


def test_bfloat16_is_summed_in_float32():
    # 1,024 equal values of 1/3: a sum in bfloat16 would stop growing at 256 terms.
    mesh = make_mesh(context=2)
    x = jnp.zeros((1, 1024, 1, 8), jnp.bfloat16)
    v = jnp.full(x.shape, 1 / 3, jnp.bfloat16)

    def ring(q, k, v):
        with across(mesh, zigzag=True):
            return ring_attention(q, k, v, segment_ids=None, causal=True, window=None, scale=1.0, block=64)

    out, d_q, _, d_v = with_gradients(ring, x, x, v, jnp.ones(x.shape, jnp.bfloat16))
    assert (out.dtype, d_q.dtype, d_v.dtype) == (jnp.bfloat16,) * 3
    np.testing.assert_array_equal(out, v)
    # The first token is seen by all with weights 1, 1/2, ... 1/1024: the 1,024th harmonic number.
    want = np.sum(1 / np.arange(1, 1025))
    np.testing.assert_allclose(np.asarray(d_v, np.float32)[0, 0, 0], want, rtol=4e-3)


def test_the_dispatch_takes_the_ring_where_tokens_are_cut():
    mesh = make_mesh(context=4)
    q, k, v, segments, _ = inputs(1, 16, 2, 1, 4, np.float32)

    def ring(q, k, v):
        with across(mesh):
            return attention(q, k, v, segment_ids=segments)

    compiled = jax.jit(ring, compiler_options=CHEAP).lower(q, k, v).compile()
    assert {c.op for c in analyze(compiled.as_text(), dict(mesh.shape)).collectives} == {"collective-permute"}
    np.testing.assert_allclose(compiled(q, k, v), definition(q, k, v, segments), atol=1e-6)


# -- what it costs ----------------------------------------------------------------------------------------------------

B, L, H, K, DH, C, BLOCK = 2, 256, 4, 2, 8, 4, 8
N = L // C


@pytest.fixture(scope="module")
def programs():
    """Text of one device's forward and backward pass, of bfloat16 arrays that lie where they are used."""
    mesh = make_mesh(context=C)
    place = NamedSharding(mesh, PartitionSpec(None, "context"))

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def ring(q, k, v, segments):
        with across(mesh, zigzag=True):
            options = {"causal": True, "window": None, "scale": 1.0, "block": BLOCK}
            return ring_attention(q, k, v, segment_ids=segments, **options)

    def pull(q, k, v, segments):
        return jax.vjp(lambda q, k, v: ring(q, k, v, segments), q, k, v)[1]

    q, kv = array(B, L, H, DH), array(B, L, K, DH)
    arguments = (q, kv, kv, array(B, L, dtype=jnp.int32))
    kept = jax.tree.map(lambda x: array(*x.shape, dtype=x.dtype), jax.eval_shape(pull, *arguments))
    lowered = [
        jax.jit(ring, compiler_options=CHEAP).lower(*arguments),
        jax.jit(lambda pull, d: pull(d), compiler_options=CHEAP).lower(kept, q),
    ]
    return [compile_and_partition(program) for program in lowered]


def sent(program):
    """(operation, axes, bytes of one message) -> messages that a device sends."""
    found = {}
    for collective, count in analyze(program[1], {"data": 1, "context": C, "tensor": 1}).collectives.items():
        key = (collective.op, collective.axes, collective.wire_bytes)
        found[key] = found.get(key, 0) + count
    return found


KV, IDS = 2 * B * N * K * DH, 4 * B * N
"""Bytes of the keys (or values) of one device, and of its segment ids."""


def test_keys_and_values_make_one_hop_less_than_there_are_devices(programs):
    assert sent(programs[0]) == {
        ("collective-permute", ("context",), KV): 2 * (C - 1),  # keys, values
        ("collective-permute", ("context",), IDS): C - 1,
    }


def test_in_the_backward_pass_the_gradients_of_keys_and_values_go_round_too(programs):
    assert sent(programs[1]) == {
        ("collective-permute", ("context",), KV): 2 * (C - 1),
        ("collective-permute", ("context",), IDS): C - 1,
        # In float32, and one hop more: they come home.
        ("collective-permute", ("context",), 2 * KV): 2 * C,
    }


def test_pairs_of_chunks_that_do_not_see_each_other_are_not_computed(programs):
    blocks = L // (2 * C) // BLOCK  # of a chunk
    diagonal = 2 * blocks * (blocks + 1) // 2 + blocks**2  # both chunks with themselves, and the late with the early
    pairs = diagonal + (C - 1) * 2 * blocks**2
    product = 2 * B * H * BLOCK * BLOCK * DH
    assert [analyze(text).flops for _, text in programs] == [2 * pairs * product, 5 * pairs * product]
    # A c-th of the causal triangle, plus half a block a row.
    assert pairs * BLOCK**2 * C == L * (L + BLOCK) // 2


def test_no_scores_of_more_than_a_block_exist(programs):
    for text in (compiled.as_text() for compiled, _ in programs):
        shapes = [math.prod(map(int, x.split(","))) for x in re.findall(r"\b(?:f32|bf16|pred)\[([\d,]+)\]", text)]
        assert max(shapes) <= 2 * B * N * max(H, 2 * K) * DH  # stacked keys and values, or queries, of one device
        assert f"{N},{N}" not in text


def test_what_is_kept_for_the_backward_pass_does_not_grow_with_the_ring():
    def kept(ways):
        mesh = make_mesh(context=ways)

        def ring(q, k, v):
            with across(mesh, zigzag=True):
                return ring_attention(q, k, v, segment_ids=None, causal=True, window=None, scale=1.0)

        q, kv = jnp.zeros((B, L, H, DH)), jnp.zeros((B, L, K, DH))
        pull = jax.eval_shape(lambda *a: jax.vjp(ring, *a)[1], q, kv, kv)
        return sorted(x.shape for x in jax.tree.leaves(pull))

    q, kv = (B, L, H, DH), (B, L, K, DH)
    assert kept(2) == kept(8) == sorted([q, kv, kv, q, (B, L, H)])


# -- inside of other regions, and refusals ----------------------------------------------------------------------------


def test_a_ring_inside_of_a_manual_region_over_other_axes():
    # As in a stage of a pipeline: rows are manual outside, and gradients are taken inside.
    mesh = make_mesh(data=2, context=2, tensor=2)
    q, k, v, segments, d = inputs(4, 16, 4, 2, 4, np.float32)

    sinks = np.linspace(-1, 1, 4).astype(np.float32)

    def region(q, k, v, segments, d):
        with across(mesh), logical_rules(mesh, RULES, manual=("data",)):
            out, pull = jax.vjp(lambda *a: attention(*a[:3], segment_ids=segments, sinks=a[3]), q, k, v, sinks)
            *gradients, d_sinks = pull(d)
            return out, *gradients, d_sinks[None]

    rows = PartitionSpec("data")
    mapped = jax.shard_map(region, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"data"}, check_vma=False)
    *found, d_sinks = jax.jit(mapped, compiler_options=CHEAP)(q, k, v, segments, d)
    expected = with_gradients(lambda *a: definition(*a[:3], segments, sinks=a[3]), q, k, v, sinks, d)
    assert_equal((*found, d_sinks.sum(0)), expected, 2e-6)


def test_rows_in_the_order_of_another_number_of_devices_are_refused():
    mesh = make_mesh(context=2)
    x = jnp.zeros((1, 16, 1, 2))
    with (
        across(make_mesh(context=4), zigzag=True),
        logical_rules(mesh, RULES),
        pytest.raises(ValueError, match="4 dev"),
    ):
        ring_attention(x, x, x, segment_ids=None, causal=True, window=None, scale=1.0)
