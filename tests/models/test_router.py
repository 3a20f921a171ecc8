import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.models.router import RouterFigures, balance_step, route

from .build import small


def test_the_bias_moves_by_the_rate_towards_even_loads_and_rests_where_they_are():
    bias = jnp.array([[0.0, 0.5, -0.5, 0.0], [0.1, 0.1, 0.1, 0.1]])
    load = jnp.array([[6, 2, 4, 4], [5, 5, 5, 5]], jnp.int32)
    moved, figures = balance_step(bias, load, 0.01)
    np.testing.assert_allclose(moved, [[-0.01, 0.51, -0.5, 0.0], [0.1] * 4], atol=1e-7)
    assert figures["expert_load_max"] == 1.5
    assert balance_step(None, load, 0.0)[0] is None


def test_a_bias_decides_on_the_choice_and_has_no_part_in_the_weight():
    config = small(num_experts=4, num_experts_per_tok=2, scoring_func="sigmoid", routed_scaling_factor=3.0)
    logits = jnp.array([[[2.0, 1.0, 0.0, -1.0]]])
    plain = route(config, logits, None)
    np.testing.assert_array_equal(plain.expert, [[[0, 1]]])
    biased = route(config, logits, jnp.array([0.0, 0.0, 0.0, 9.0]))
    np.testing.assert_array_equal(biased.expert, [[[3, 0]]])
    scores = 1 / (1 + np.exp(-np.array([-1.0, 2.0])))
    np.testing.assert_allclose(biased.weight[0, 0], 3.0 * scores / scores.sum(), rtol=1e-6)
    np.testing.assert_allclose(biased.share, plain.share)


def test_equal_scores_go_to_the_lower_numbers():
    routing = route(small(num_experts=4, num_experts_per_tok=3), jnp.zeros((1, 2, 4)), None)
    np.testing.assert_array_equal(routing.expert, [[[0, 1, 2]] * 2])


@pytest.mark.parametrize("norm", [True, False])
def test_softmax_weights_are_the_chosen_probabilities_with_or_without_their_sum(norm):
    config = small(num_experts=4, num_experts_per_tok=2, norm_topk_prob=norm)
    logits = np.array([[[0.5, 2.0, -1.0, 1.0]]])
    p = np.exp(logits[0, 0]) / np.exp(logits).sum()
    expected = p[[1, 3]] / (p[[1, 3]].sum() if norm else 1.0)
    np.testing.assert_allclose(route(config, jnp.asarray(logits), None).weight[0, 0], expected, rtol=1e-6)


def test_figures_of_layers_add_up_and_loads_stay_apart():
    config = small(num_experts=4, num_hidden_layers=3, first_k_dense_replace=1)
    total = RouterFigures.zeros(config, 2, jnp.dtype("float32"))
    assert total.load.shape == (2, 2, 4)
    one = RouterFigures(jnp.ones(2), 2 * jnp.ones(2), jnp.arange(8.0).reshape(2, 4), jnp.zeros(2))
    total = total.add(jnp.int32(1), one).add(jnp.int32(0), one).add(jnp.int32(1), one)
    np.testing.assert_array_equal(total.balance, [3, 3])
    np.testing.assert_array_equal(total.load, np.arange(8.0).reshape(2, 1, 4) * np.array([1, 2])[:, None])
