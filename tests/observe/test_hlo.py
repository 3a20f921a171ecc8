"""Expected figures are arithmetic on the program's shapes: 2·m·k·n FLOPs a product, counted by hand."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.observe.hlo import analyze

PRODUCT = 2 * 8 * 16 * 16
"""FLOPs of an [8, 16] by [16, 16] product."""


def text_of(function, *shapes, dtype=jnp.float32):
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)).compile().as_text()


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


@pytest.fixture(scope="module")
def sharded_step(mesh):
    """Loss and gradients of 5 scanned, rematerialised layers [16, 64] and [64, 16] over data 2, fsdp 2, tensor 2."""

    def sharding(*spec):
        return NamedSharding(mesh, P(*spec))

    def loss(weights, x):
        def layer(h, w):
            h = lax.with_sharding_constraint(jax.nn.relu(h @ w[0]), sharding(("data", "fsdp"), None, "tensor"))
            return lax.with_sharding_constraint(h @ w[1], sharding(("data", "fsdp"), None, None)), None

        h, _ = lax.scan(jax.checkpoint(layer), x, weights)
        return (h**2).sum()

    weights = (
        jax.ShapeDtypeStruct((5, 16, 64), jnp.float32, sharding=sharding(None, "fsdp", "tensor")),
        jax.ShapeDtypeStruct((5, 64, 16), jnp.float32, sharding=sharding(None, "tensor", "fsdp")),
    )
    x = jax.ShapeDtypeStruct((8, 32, 16), jnp.float32, sharding=sharding(("data", "fsdp")))
    text = jax.jit(jax.value_and_grad(loss)).lower(weights, x).compile().as_text()
    return analyze(text, dict(mesh.shape))


def test_the_flops_of_a_sharded_scanned_step_are_those_of_one_device(sharded_step):
    # A device has 2 rows of 32 tokens and 64/2 features. A layer does 2 products forward, 1 again (the second isn't
    # needed by its own backward pass) and 4 backward.
    assert sharded_step.flops == 5 * (2 + 1 + 4) * 2 * (2 * 32) * 16 * 32
    assert sharded_step.unknown_loops == () and not sharded_step.opaque


def test_the_collectives_of_a_sharded_step_are_told_apart_by_axis_and_counted_by_layer(sharded_step):
    calls = Counter()
    for collective, count in sharded_step.collectives.items():
        if collective.in_loop:
            calls[collective.op, collective.axes] += count
    assert calls == {
        # Two weights, gathered forward and again backward.
        ("all-gather", ("fsdp",)): 5 * 4,
        # The row-parallel product forward, the column-parallel one backward.
        ("all-reduce", ("tensor",)): 5 * 2,
        # Both gradients in one.
        ("all-reduce", ("data", "fsdp")): 5,
    }
    gathers = [c for c in sharded_step.collectives if c.op == "all-gather"]
    # [16, 64/2] in float32; a device sends its half.
    assert {(c.bytes, c.wire_bytes, c.group_size) for c in gathers} == {(16 * 32 * 4, 16 * 32 * 4 // 2, 2)}
    # 2·(g-1)/g of [2, 32, 16] over tensor; of two [16, 32] gradients (and one scalar loss) over data and fsdp.
    assert sharded_step.wire_bytes_by_axis() == {
        "fsdp": 20 * 1024,
        "tensor": 10 * 2 * 32 * 16 * 4,
        "data+fsdp": 5 * 2 * (2 * 16 * 32 * 4) * 3 // 4 + 6,
    }


def test_a_collective_names_the_line_it_comes_from(sharded_step):
    sources = [c.source for c in sharded_step.collectives]
    assert all(re.search(r"test_hlo\.py:\d+$", source) for source in sources)


def test_nested_loops_multiply():
    def function(x, w):
        inner = lambda h, _: (h @ w, None)
        outer = lambda h, _: (lax.scan(inner, h @ w, None, length=4)[0], None)
        return lax.scan(outer, x, None, length=3)[0]

    assert analyze(text_of(function, (8, 16), (16, 16))).flops == 3 * (4 + 1) * PRODUCT


@pytest.mark.parametrize("annotated", [True, False])
@pytest.mark.parametrize(
    ("start", "condition", "step", "trips"),
    [
        (0, lambda i: i < 10, 1, 10),
        (1, lambda i: i < 10, 1, 9),
        (0, lambda i: i <= 10, 1, 11),
        (0, lambda i: i < 11, 2, 6),
        (3, lambda i: jnp.int32(20) > i, 5, 4),
        (9, lambda i: i > 0, -2, 5),
        (9, lambda i: i >= 0, -3, 4),
        (0, lambda i: i != 12, 3, 4),
        (7, lambda i: i < 3, 1, 0),
    ],
)
def test_a_loop_is_counted_from_its_start_limit_and_step(start, condition, step, trips, annotated):
    def function(x, w):
        body = lambda c: (c[0] + step, c[1] @ w)
        return lax.while_loop(lambda c: condition(c[0]), body, (jnp.int32(start), x))[1]

    text = text_of(function, (8, 16), (16, 16))
    if not annotated:
        text = text.replace("known_trip_count", "other")
    cost = analyze(text)
    assert (cost.flops, cost.unknown_loops) == (trips * PRODUCT, ())


def test_a_loop_that_depends_on_data_is_counted_once_and_named():
    def function(x, w):
        return lax.while_loop(lambda h: h.sum() < 1e3, lambda h: h @ w, x)

    cost = analyze(text_of(function, (8, 16), (16, 16)))
    assert cost.flops == PRODUCT and len(cost.unknown_loops) == 1


def test_of_a_conditional_the_costlier_branch_counts():
    def function(x, w):
        return lax.cond(x[0, 0] > 0, lambda: x @ w @ w @ w, lambda: x @ w)

    assert analyze(text_of(function, (8, 16), (16, 16))).flops == 3 * PRODUCT


def test_a_collective_in_a_branch_is_marked(mesh):
    def function(x):
        return lax.cond(x[0, 0] > 0, lambda: lax.psum(x, "data"), lambda: x) + lax.psum(x.sum(), "data")

    mapped = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    found = analyze(text_of(mapped, (64, 16)), dict(mesh.shape)).collectives
    assert Counter({(c.bytes, c.conditional): n for c, n in found.items()}) == {(64 * 16 * 4, True): 1, (4, False): 1}


def test_a_scanned_layer_reads_its_own_weights_not_the_stack():
    def function(x, weights):
        return lax.scan(lambda h, w: (h @ w, None), x, weights)[0]

    few, many = (analyze(text_of(function, (8, 64), (n, 64, 64))).bytes_accessed for n in (4, 16))
    # At the least 64·64·4 bytes of weights and two times 8·64·4 of activations a layer. Were the whole stack read by
    # each layer, 16 layers would cost 16 times as much as 4.
    assert 16 * (64 * 64 + 2 * 8 * 64) * 4 <= many <= 5 * few


def test_a_scanned_layer_writes_its_own_result_not_the_stack():
    def function(x):
        return lax.scan(lambda h, _: (h * 2, h + 1), x, None, length=64)[1]

    # A layer reads and writes a few times 64 numbers; the stack that it writes into has 64 times that.
    assert analyze(text_of(function, (64,))).bytes_accessed <= 64 * 8 * (64 * 4) + 2 * 64 * 64 * 4


def test_explicit_collectives_are_recognised(mesh):
    def exchange(a):
        a = lax.ppermute(a, "data", [(0, 1), (1, 0)])
        a = lax.all_to_all(a, "tensor", 0, 1, tiled=True)
        a = lax.psum_scatter(a, ("data", "tensor"), scatter_dimension=0, tiled=True)
        return lax.all_gather(a, "fsdp", tiled=True)

    function = jax.shard_map(exchange, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    cost = analyze(text_of(function, (8, 8)), dict(mesh.shape))
    # [8, 8] is permuted, becomes [4, 16], scattered over 4 devices to [1, 16], gathered over 2 to [2, 16].
    assert {(c.op, c.axes, c.bytes, c.wire_bytes) for c in cost.collectives} == {
        ("collective-permute", ("data",), 256, 256),
        ("all-to-all", ("tensor",), 256, 128),
        ("reduce-scatter", ("data", "tensor"), 256, 192),
        ("all-gather", ("fsdp",), 128, 64),
    }
    assert not any(c.in_loop for c in cost.collectives)


HEADER = "HloModule m, is_scheduled=true, num_partitions=4\n\n"


def test_asynchronous_collectives_count_once_and_are_marked():
    text = HEADER + (
        "ENTRY %main (p: f32[8,4]) -> f32[32,4] {\n"
        "  %p = f32[8,4]{1,0} parameter(0)\n"
        "  %s = (f32[8,4]{1,0}, f32[32,4]{1,0}) all-gather-start(%p), channel_id=1, replica_groups=[1,4]<=[4],"
        ' dimensions={0}, metadata={op_name="g" source_file="model.py" source_line=12}\n'
        "  ROOT %d = f32[32,4]{1,0} all-gather-done(%s)\n"
        "}\n"
    )
    ((collective, count),) = analyze(text, {"fsdp": 4}).collectives.items()
    assert count == 1 and collective.asynchronous and collective.source == "model.py:12"
    assert (collective.bytes, collective.wire_bytes) == (32 * 4 * 4, 24 * 4 * 4)


def test_an_asynchronous_copy_reads_once_writes_once_and_computes_nothing():
    text = HEADER + (
        "ENTRY %main (p: f32[8,4]) -> f32[8,4] {\n"
        "  %p = f32[8,4]{1,0} parameter(0)\n"
        '  %b = f32[8,4]{1,0} custom-call(), custom_call_target="AllocateBuffer"\n'
        "  %s = (f32[8,4]{1,0:S(1)}, f32[8,4]{1,0}, u32[]{:S(2)}) copy-start(%p)\n"
        "  ROOT %d = f32[8,4]{1,0:S(1)} copy-done(%s)\n"
        "}\n"
    )
    cost = analyze(text)
    # 8·4 float32 read and written, and a handle of 4 bytes.
    assert cost.bytes_accessed == 2 * 128 + 4 and not cost.opaque


def test_a_collective_that_starts_in_one_fusion_and_ends_in_another_counts_once():
    text = HEADER + (
        "%start (a: bf16[8,4]) -> bf16[32,4] {\n"
        "  %a = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)\n"
        "  ROOT %g = bf16[32,4]{1,0:T(8,128)(2,1)} all-gather(%a), channel_id=7, replica_groups={{0,1,2,3}}\n"
        "}\n\n"
        "%done (b: bf16[8,4]) -> bf16[32,4] {\n"
        "  %b = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)\n"
        "  ROOT %h = bf16[32,4]{1,0:T(8,128)(2,1)} all-gather(%b), channel_id=7, replica_groups={{0,1,2,3}}\n"
        "}\n\n"
        "ENTRY %main (p: bf16[8,4]) -> bf16[32,4] {\n"
        "  %p = bf16[8,4]{1,0:T(8,128)(2,1)} parameter(0)\n"
        "  %f = bf16[32,4]{1,0:T(8,128)(2,1)} fusion(%p), kind=kCustom, calls=%start\n"
        "  ROOT %e = bf16[32,4]{1,0:T(8,128)(2,1)} fusion(%p), kind=kCustom, calls=%done\n"
        "}\n"
    )
    ((collective, count),) = analyze(text, {"fsdp": 4}).collectives.items()
    assert count == 1 and collective.asynchronous and collective.bytes == 32 * 4 * 2


def test_an_all_reduce_of_which_each_device_keeps_its_slice_is_a_reduce_scatter():
    text = HEADER + (
        "%all-reduce-scatter (a: f32[8,4], i: s32[]) -> f32[2,4] {\n"
        "  %a = f32[8,4]{1,0} parameter(0)\n"
        "  %i = s32[] parameter(1)\n"
        "  %r = f32[8,4]{1,0} all-reduce(%a), channel_id=3, replica_groups=[1,4]<=[4], to_apply=%add\n"
        "  ROOT %s = f32[2,4]{1,0} dynamic-slice(%r, %i, %i), dynamic_slice_sizes={2,4}\n"
        "}\n\n"
        "ENTRY %main (p: f32[8,4], i: s32[]) -> f32[2,4] {\n"
        "  %p = f32[8,4]{1,0} parameter(0)\n"
        "  %i = s32[] parameter(1)\n"
        "  ROOT %f = f32[2,4]{1,0} fusion(%p, %i), kind=kCustom, calls=%all-reduce-scatter\n"
        "}\n"
    )
    ((collective, _),) = analyze(text, {"fsdp": 4}).collectives.items()
    assert (collective.op, collective.bytes, collective.wire_bytes) == ("reduce-scatter", 128, 96)
    assert not collective.asynchronous


def test_a_kernel_whose_flops_are_unknown_is_listed_as_often_as_it_runs():
    text = HEADER + (
        "%body (t: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {\n"
        "  %t = (s32[], f32[8,4]{1,0}) parameter(0)\n"
        "  %i = s32[] get-tuple-element(%t), index=0\n"
        "  %x = f32[8,4]{1,0} get-tuple-element(%t), index=1\n"
        '  %k = f32[8,4]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"a": {\n'
        '  "b": 1\n'
        "}\n"
        "}}\n"
        "  %one = s32[] constant(1)\n"
        "  %n = s32[] add(%i, %one)\n"
        "  ROOT %r = (s32[], f32[8,4]{1,0}) tuple(%n, %k)\n"
        "}\n\n"
        "%condition (t: (s32[], f32[8,4])) -> pred[] {\n"
        "  %t = (s32[], f32[8,4]{1,0}) parameter(0)\n"
        "  %i = s32[] get-tuple-element(%t), index=0\n"
        "  %limit = s32[] constant(6)\n"
        "  ROOT %c = pred[] compare(%i, %limit), direction=LT\n"
        "}\n\n"
        "ENTRY %main (p: f32[8,4]) -> f32[8,4] {\n"
        "  %p = f32[8,4]{1,0} parameter(0)\n"
        "  %zero = s32[] constant(0)\n"
        "  %t = (s32[], f32[8,4]{1,0}) tuple(%zero, %p)\n"
        "  %w = (s32[], f32[8,4]{1,0}) while(%t), condition=%condition, body=%body\n"
        "  ROOT %o = f32[8,4]{1,0} get-tuple-element(%w), index=1\n"
        "}\n"
    )
    cost = analyze(text)
    assert cost.opaque == {"tpu_custom_call": 6} and cost.unknown_loops == ()
    # Each run of the kernel reads and writes [8, 4] in float32, and the counter's add reads two numbers and writes one.
    assert cost.bytes_accessed == 6 * (2 * 128 + 3 * 4)


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        analyze("nothing")
