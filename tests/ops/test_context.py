import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.errors import ConfigError
from jtrain.observe.hlo import analyze
from jtrain.observe.partitioned import compile_and_partition
from jtrain.ops.context import ULYSSES_LENGTH, balanced_ways, context_method
from jtrain.ops.cross_entropy import cross_entropy

from .across import CHEAP, across, make_mesh

SHAPE = {"length": 4096, "heads": 32, "kv_heads": 8, "context": 8}

RULE = [
    ({}, "ulysses"),
    ({"length": ULYSSES_LENGTH}, "ulysses"),
    ({"length": 2 * ULYSSES_LENGTH}, "ring"),
    ({"context": 16}, "ring"),  # two query heads a device, but half a key-value head
    ({"context": 3}, "ring"),
    ({"tensor": 2}, "ring"),
    ({"tensor": 2, "context": 4}, "ulysses"),
    ({"method": "ulysses", "tensor": 2}, "ulysses"),  # key-value heads are repeated
    ({"method": "ulysses", "length": 2**20}, "ulysses"),
    ({"method": "ring"}, "ring"),
    ({"kernel": "splash", "length": 2**20}, "ulysses"),
    ({"kernel": "splash", "context": 16}, "ulysses"),
    ({"kernel": "xla", "context": 16}, "ring"),
]


@pytest.mark.parametrize(("changes", "expected"), RULE, ids=str)
def test_the_method_follows_heads_length_and_kernel(changes, expected):
    case = {"method": "auto", "kernel": "auto"} | SHAPE | changes
    assert context_method(case.pop("method"), case.pop("kernel"), **case) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"method": "ulysses", "context": 3},
            ["32 query heads = 32 over mesh.context=3", "2 (it may be 1, 2, 4"],
        ),
        (
            {"method": "ulysses", "context": 16, "tensor": 4},
            ["32 query heads / 4 (mesh.tensor) = 8 over mesh.context=16", "mesh.context: 8", "context.method: ring"],
        ),
        ({"kernel": "cudnn", "context": 64}, ["for model.attention: cudnn", "mesh.context: 32"]),
        ({"method": "ring", "kernel": "splash"}, ["'splash', which needs whole rows", "context.method: ulysses"]),
    ],
)
def test_what_can_not_be_is_refused_with_the_arithmetic_and_what_can(changes, words):
    case = {"method": "auto", "kernel": "auto"} | SHAPE | changes
    with pytest.raises(ConfigError) as refusal:
        context_method(case.pop("method"), case.pop("kernel"), **case)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_a_loss_orders_its_rows_for_a_ring_only():
    heads = {"length": 64, "heads": 4, "kv_heads": 4}
    assert balanced_ways("auto", **heads) == 1
    with across(make_mesh(context=4), "ring"):
        assert balanced_ways("auto", **heads) == 4
        assert balanced_ways("auto", **heads | {"length": 63}) == 1  # such rows are whole on every device
    with across(make_mesh(context=4), "auto"):
        assert balanced_ways("auto", **heads) == 1
        assert balanced_ways("auto", **heads | {"kv_heads": 2}) == 4


def test_logits_of_a_chunk_are_divided_and_nothing_of_the_row_is_gathered():
    b, length, d, vocab = 2, 64, 8, 510
    mesh = make_mesh(context=4)
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(0, 1, (b, length, d)).astype("f"), rng.normal(0, 1, (d, vocab)).astype("f")
    targets = rng.integers(0, vocab, (b, length))

    def loss(hidden, head):
        return cross_entropy(hidden, head, targets, chunk_size=32)[0]

    def divided(hidden, head):
        with across(mesh):
            return jax.value_and_grad(loss, argnums=(0, 1))(hidden, head)

    place = NamedSharding(mesh, PartitionSpec(None, "context"))
    hidden = jax.device_put(hidden, place)
    lowered = jax.jit(divided, compiler_options=CHEAP, out_shardings=(None, (place, None))).lower(hidden, head)
    compiled, text = compile_and_partition(lowered)
    shapes = [tuple(map(int, x.split(","))) for x in re.findall(r"\bf32\[([\d,]+)\]", compiled.as_text())]
    assert max(map(math.prod, shapes)) == b * (32 // 4) * vocab
    collectives = analyze(text, dict(mesh.shape)).collectives
    assert {c.op for c in collectives} == {"all-reduce"}  # the loss's figures, and the gradient of the head
    assert max(c.bytes for c in collectives) == 4 * d * vocab

    expected = jax.value_and_grad(loss, argnums=(0, 1))(np.asarray(hidden), head)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), compiled(hidden, head), expected)
