import pytest

from jtrain.errors import ConfigError
from jtrain.ops.context import ULYSSES_LENGTH, balanced_ways, context_method

from .across import across, make_mesh

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
