import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from jtrain.ops import expert_exchange
from jtrain.ops.expert_exchange import capacity_of, capacity_slots, dropless, inverse, sort_by_expert, take_rows

RANKS, EXPERTS, TOKENS, K, D = 4, 8, 6, 2, 3
rng = np.random.default_rng(0)
X = rng.normal(size=(RANKS * TOKENS, D)).astype(np.float32)
SPREAD = rng.integers(0, EXPERTS + 1, (RANKS, TOKENS * K)).astype(np.int32)  # EXPERTS: goes nowhere
CROWD = np.full_like(SPREAD, 5)
EMPTY = np.full_like(SPREAD, EXPERTS)


def test_assignments_stand_in_the_order_of_their_experts_and_then_of_their_numbers():
    source, sizes = sort_by_expert(np.array([2, 0, 3, 2, 0], np.int32), 3)
    np.testing.assert_array_equal(source, [1, 4, 0, 3, -1])
    np.testing.assert_array_equal(sizes, [2, 0, 2])
    np.testing.assert_array_equal(inverse(source, 5), [2, 0, -1, 3, 1])


def test_rows_are_taken_by_index_and_their_gradients_come_back_to_where_they_were():
    source = np.array([3, -1, 0, 1], np.int32)  # two copies of each of two rows: the third assignment goes nowhere
    x, ct = jnp.asarray(X[:2]), jnp.asarray(rng.normal(size=(4, D)), jnp.float32)
    y, vjp = jax.vjp(lambda x: take_rows(x, source, inverse(source, 4), 2), x)
    np.testing.assert_array_equal(y, [x[1], np.zeros(D), x[0], x[0]])
    np.testing.assert_allclose(vjp(ct)[0], [ct[2] + ct[3], ct[0]], rtol=1e-6)


def exchanged(expert, *, ragged):
    """Every assignment's result where expert e of all multiplies by e + 1, and the gradient of its square."""
    mesh = Mesh(np.array(jax.devices()[:RANKS]), ("expert",), axis_types=(AxisType.Auto,))

    def rank(x, expert):
        mine = EXPERTS // RANKS
        first = jax.lax.axis_index("expert") * mine

        def compute(x_RD, sizes_G):
            factor = jnp.repeat(first + jnp.arange(mine) + 1.0, sizes_G, total_repeat_length=x_RD.shape[0])
            return x_RD * factor[:, None]

        return dropless(x, expert.reshape(-1), EXPERTS, compute, "expert", RANKS, ragged=ragged)

    spec = PartitionSpec("expert")
    run = jax.shard_map(rank, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    return jax.jit(lambda x: (run(x, expert), jax.grad(lambda x: (run(x, expert) ** 2).sum())(x)))(X)


def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """`jax.lax.ragged_all_to_all` by its definition, which XLA:CPU has not; `recv_sizes` must be what is sent."""
    everything = jax.lax.all_gather((operand, input_offsets, send_sizes, output_offsets), axis_name)
    here = jax.lax.axis_index(axis_name)
    place = jnp.arange(output.shape[0])
    for source in range(RANKS):
        operands, starts, sizes, targets = (a[source] for a in everything)
        size = jnp.minimum(sizes[here], recv_sizes[source])
        inside = (place >= targets[here]) & (place < targets[here] + size)
        rows = operands[jnp.clip(starts[here] + place - targets[here], 0, operands.shape[0] - 1)]
        output = jnp.where(inside[:, None], rows, output)
    return output


@pytest.mark.parametrize("way", ["dense", "ragged"])
@pytest.mark.parametrize("expert", [SPREAD, CROWD, EMPTY], ids=["spread", "crowd", "empty"])
def test_every_assignment_meets_its_expert_and_comes_home(expert, way, monkeypatch):
    if way == "ragged":
        monkeypatch.setattr(expert_exchange.jax.lax, "ragged_all_to_all", emulated)
    y, gradient = exchanged(expert, ragged=way == "ragged")
    factor = np.where(expert < EXPERTS, expert + 1.0, 0.0).reshape(-1, K)
    np.testing.assert_allclose(y, (X[:, None] * factor[..., None]).reshape(-1, D), rtol=1e-6)
    np.testing.assert_allclose(gradient, 2 * X * (factor**2).sum(1, keepdims=True), rtol=1e-5)


def test_a_capacity_is_an_even_share_times_the_factor_rounded_up():
    assert capacity_of(16, 2, 8, 1.0) == 4
    assert capacity_of(16, 2, 8, 1.1) == 5
    assert capacity_of(16, 2, 8, 100.0) == 16  # no expert gets a token twice
    assert capacity_of(4, 1, 64, 1.0) == 1


def test_slots_go_to_first_choices_and_then_to_earlier_tokens():
    # Three tokens of two choices, and one of padding; expert 0 has room for two.
    expert = np.array([[[1, 0], [0, 2], [0, 1], [3, 3]]], np.int32)
    np.testing.assert_array_equal(capacity_slots(expert, 3, 2), [[[0, -1], [0, 0], [1, 1], [-1, -1]]])
