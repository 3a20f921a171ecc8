"""What a pipeline sends: every weight is gathered once and its gradient scattered once, whatever the micro-batches."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.parity.census import census, decoder_program

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "remat": "full",
}
LENGTH = 16  # short: no activation is as large as a weight


def taken(mesh, shape=None, rows=8, **section):
    program, _ = decoder_program(mesh, SHAPE | (shape or {}), length=LENGTH, rows=rows, pipeline=section)
    return program, census(program, length=LENGTH)


def divided(program, axis):
    """Bytes on a device, once whole over `axis`, of every parameter that `axis` divides; a rising list."""
    found = []
    for leaf in jax.tree.leaves(program.plan.abstract.params):
        axes = [
            name for entry in leaf.sharding.spec if entry for name in ((entry,) if isinstance(entry, str) else entry)
        ]
        if axis in axes:
            local = int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
            found.append(local * program.mesh.shape[axis])
    return sorted(found)


def expanded(calls):
    return sorted(c.bytes for c, n in calls.items() for _ in range(n))


@pytest.mark.parametrize(
    ("mesh", "section"),
    [
        ({"pipeline": 2, "fsdp": 2}, {"microbatches": 4}),
        pytest.param({"pipeline": 2, "fsdp": 4}, {"microbatches": 2}, marks=pytest.mark.grid),
        pytest.param({"pipeline": 4, "fsdp": 2}, {"microbatches": 4, "residuals": "save"}, marks=pytest.mark.grid),
        pytest.param({"pipeline": 2, "fsdp": 2, "tensor": 2}, {"microbatches": 4}, marks=pytest.mark.grid),
    ],
    ids=str,
)
def test_one_gather_and_one_scatter_a_weight_and_step(mesh, section):
    program, counted = taken(mesh, **section)
    weights = divided(program, "fsdp")
    assert len(weights) >= 9
    assert expanded(counted.calls(op="all-gather", axis="fsdp")) == weights, counted.table()
    assert expanded(counted.calls(op="reduce-scatter", axis="fsdp")) == weights, counted.table()
    least = min(weights)
    over_rows = [c for c in counted.calls(axis="fsdp", least=least) if c.in_loop]
    assert not over_rows, counted.table()
    over_stages = [c for c in counted.calls(axis="pipeline", least=least) if c.op in ("all-gather", "all-to-all")]
    assert not over_stages, counted.table()


@pytest.mark.parametrize(
    ("shape", "section"),
    [
        pytest.param({}, {"virtual_stages": 2, "microbatches": 4}, marks=pytest.mark.grid),
        ({"num_hidden_layers": 3}, {"microbatches": 4}),
    ],
    ids=str,
)
def test_where_stages_do_not_cut_what_is_stored_one_exchange_goes_there_and_one_comes_back(shape, section):
    program, counted = taken({"pipeline": 2, "fsdp": 2}, shape, **section)
    params = program.plan.abstract.params
    names = jax.tree.structure(params).flatten_up_to(program.model.names)
    turned = [
        leaf
        for leaf, axes in zip(jax.tree.leaves(params), names, strict=True)
        if any(
            "pipeline" in str(entry) and axes[i] not in ("layers", "vocab")
            for i, entry in enumerate(leaf.sharding.spec)
        )
    ]
    assert len(turned) >= 7
    exchanges = counted.calls(op="all-to-all", axis="pipeline")
    assert not any(c.in_loop for c in exchanges)
    assert sum(exchanges.values()) == 2 * len(turned), counted.table()
    gathers, scatters = (counted.calls(op=op, axis="fsdp") for op in ("all-gather", "reduce-scatter"))
    assert sum(gathers.values()) == sum(scatters.values()) == len(divided(program, "fsdp")), counted.table()


def test_activations_travel_once_a_tick():
    """Forward and backward each send a chunk's boundary once at every tick of their phase."""
    program, counted = taken({"pipeline": 2, "data": 1}, microbatches=4, rows=8, schedule="1f1b")
    boundary = 2 * LENGTH * SHAPE["hidden_size"] * 4  # rows of a micro-batch x tokens x width, float32
    schedule = program.pipeline.tables(1)
    ticks = sum((end - start) * (forward + backward) for start, end, forward, backward in schedule.phases)
    sent = counted.calls(op="collective-permute", axis="pipeline")
    assert sum(sent.values()) == ticks == 2 * (4 + 2 - 1)
    assert {c.bytes for c in sent} == {boundary}
