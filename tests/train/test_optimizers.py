import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jtrain.config.schema import OptimizerConfig
from jtrain.errors import ConfigError
from jtrain.train.optimizers import decay_multiples, make_optimizer, muon_dimensions, parameter_paths, trainable_mask

PARAMS = {
    "layers": {"q": np.full((2, 4, 3), 0.5, np.float32), "norm": np.ones((2, 4), np.float32)},
    "embed": np.full((5, 4), -0.25, np.float32),
}
NAMES = {
    "layers": {"q": ("layers", "embed", "heads"), "norm": ("layers", "norm")},
    "embed": ("vocab", "embed"),
}


def gradients(step: int) -> dict:
    generator = np.random.default_rng(step)
    return jax.tree.map(lambda p: generator.normal(size=p.shape).astype(np.float32), PARAMS)


def run(config: OptimizerConfig, steps: int = 3, learning_rate: float = 0.1):
    tx = make_optimizer(config, lambda k: learning_rate * k, PARAMS, NAMES)
    params, state = jax.tree.map(jnp.asarray, PARAMS), tx.init(PARAMS)
    for step in range(steps):
        updates, state = tx.update(gradients(step), state, params)
        params = optax.apply_updates(params, updates)
    return params


def by_hand(rule, steps: int = 3, decay: float = 0.0, learning_rate: float = 0.1):
    """Each leaf in float64: p -= lr_k (rule(g, memory, k) + decay p), without decay on the norm."""

    def leaf(path, p):
        p, memory = np.float64(p), {}
        for step in range(steps):
            g = np.float64(dict(jax.tree_util.tree_flatten_with_path(gradients(step))[0])[path])
            wd = 0.0 if "norm" in jax.tree_util.keystr(path) else decay
            p = p - learning_rate * (step + 1) * (rule(g, memory, step + 1) + wd * p)
        return p

    return jax.tree_util.tree_map_with_path(leaf, PARAMS)


def close(a, b, tolerance: float = 1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def test_adamw_is_the_formula_of_loshchilov_and_hutter():
    def rule(g, memory, k):
        memory["m"] = 0.9 * memory.get("m", 0.0) + 0.1 * g
        memory["v"] = 0.95 * memory.get("v", 0.0) + 0.05 * g * g
        return memory["m"] / (1 - 0.9**k) / (np.sqrt(memory["v"] / (1 - 0.95**k)) + 1e-8)

    close(run(OptimizerConfig(name="adamw", weight_decay=0.1)), by_hand(rule, decay=0.1))


def test_lion_is_the_sign_of_the_interpolated_momentum():
    def rule(g, memory, k):
        m = memory.get("m", 0.0)
        memory["m"] = 0.95 * m + 0.05 * g
        return np.sign(0.9 * m + 0.1 * g)

    close(run(OptimizerConfig(name="lion", weight_decay=0.1)), by_hand(rule, decay=0.1))


def test_sgd_has_momentum():
    def rule(g, memory, k):
        memory["m"] = 0.9 * memory.get("m", 0.0) + g
        return memory["m"]

    close(run(OptimizerConfig(name="sgd", weight_decay=0.0)), by_hand(rule))


def test_muon_makes_the_matrices_of_each_layer_nearly_orthogonal_and_leaves_the_rest_to_adam():
    config = OptimizerConfig(name="muon", weight_decay=0.0)
    muon, adam = run(config, steps=1), run(OptimizerConfig(name="adamw", weight_decay=0.0), steps=1)
    for layer in range(2):
        update = (PARAMS["layers"]["q"][layer] - np.asarray(muon["layers"]["q"][layer])) / 0.1
        # Five Newton-Schulz iterations bring singular values to 0.7 ... 1.2; the scale is 0.2 sqrt(max(4, 3)).
        singular = np.linalg.svd(update, compute_uv=False) / (0.2 * 2.0)
        assert (singular > 0.5).all() and (singular < 1.3).all()
    np.testing.assert_array_equal(muon["embed"], adam["embed"])
    np.testing.assert_array_equal(muon["layers"]["norm"], adam["layers"]["norm"])


def test_muon_takes_the_model_dimension_as_one_side_of_a_matrix():
    names = {"q": ("layers", "embed", "heads", "head_dim"), "o": ("layers", "heads", "head_dim", "embed"), "b": None}
    shapes = {"q": np.zeros((2, 8, 2, 3)), "o": np.zeros((2, 2, 3, 8)), "b": np.zeros(3)}
    found = muon_dimensions(shapes, names)
    assert found["q"] == optax.contrib.MuonDimensionNumbers((1,), (2, 3))
    assert found["o"] == optax.contrib.MuonDimensionNumbers((1, 2), (3,))
    assert found["b"] is None


def test_adafactor_differs_from_the_others_and_moves_every_parameter():
    after = run(OptimizerConfig(name="adafactor", weight_decay=0.0))
    jax.tree.map(lambda a, b: np.testing.assert_array_less(0, np.abs(a - b).max()), after, PARAMS)


def test_the_first_matching_decay_rule_counts():
    rules = [("layers/.*", 0.5), ("embed", 0.0), (".*", 1.0)]
    assert decay_multiples(PARAMS, rules) == {"layers": {"q": 0.5, "norm": 0.5}, "embed": 0.0}


def test_a_parameter_that_no_decay_rule_covers_is_named():
    with pytest.raises(ConfigError, match="'layers/norm'"):
        decay_multiples(PARAMS, [("embed", 1.0), ("layers/q", 1.0)])


def test_freezing_matches_whole_paths_and_refuses_a_pattern_without_effect():
    assert trainable_mask(PARAMS, ["layers/.*"]) == {"layers": {"q": False, "norm": False}, "embed": True}
    assert parameter_paths(PARAMS) == ["embed", "layers/norm", "layers/q"]
    with pytest.raises(ConfigError, match="'layer' matches no parameter"):
        trainable_mask(PARAMS, ["layer"])
    with pytest.raises(ConfigError, match="freezes every parameter"):
        trainable_mask(PARAMS, [".*"])
