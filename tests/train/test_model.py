import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jtrain.errors import ConfigError
from jtrain.train.model import functional_model


class Parts(nnx.Module):
    """A named parameter, a list of layers, batch statistics and two random streams."""

    def __init__(self, rngs: nnx.Rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(1.0), ("embed", "mlp"))
        self.kernel = nnx.Param(jnp.ones((2, 4)), out_sharding=("embed", "mlp"))
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, kernel_init=init, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.drops = nnx.List([nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])

    def __call__(self, x):
        x = x @ self.kernel[...]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x), [drop(jnp.ones(64)) for drop in self.drops]


@pytest.fixture(scope="module")
def split():
    return functional_model(Parts)


@pytest.fixture(scope="module")
def values(split):
    return split.init(jax.random.key(0))


def masks(split, values, rng):
    module = split.merge(*values, rng)
    module.train()
    return [np.asarray(mask) for mask in module(jnp.ones((3, 2)))[1]]


def test_values_are_plain_nested_dicts_with_text_as_keys(split, values):
    params, variables = values
    assert set(params) == {"kernel", "layers", "norm"}
    assert set(params["layers"]) == {"0", "1"}
    assert set(variables) == {"norm"}  # no random state
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(lambda leaf: leaf.shape, split.params)


def test_names_of_axes_are_those_the_model_gave(split):
    assert split.names["kernel"] == ("embed", "mlp")
    assert split.names["layers"]["1"]["kernel"] == ("embed", "mlp")
    assert split.names["layers"]["0"]["kernel"] is None


def test_a_merged_module_computes_with_the_values_it_was_given(split, values):
    params, variables = values
    doubled = split.merge(jax.tree.map(lambda x: 2 * x, params), variables)
    doubled.eval()
    np.testing.assert_array_equal(doubled.kernel[...], 2 * np.ones((2, 4)))
    np.testing.assert_array_equal(doubled.layers[1].kernel[...], 2 * params["layers"]["1"]["kernel"])


def test_variables_that_a_forward_pass_has_changed_are_read_back(split, values):
    module = split.merge(*values, jax.random.key(1))
    module.train()
    module(jnp.ones((3, 2)))
    changed = split.variables_of(module)
    assert jax.tree.structure(changed) == jax.tree.structure(values[1])
    assert not np.allclose(changed["norm"]["mean"], values[1]["norm"]["mean"])


def test_random_streams_follow_the_key_and_their_place_alone(split, values):
    first, second = masks(split, values, jax.random.key(1))
    assert not np.array_equal(first, second)
    again = masks(split, values, jax.random.key(1))
    np.testing.assert_array_equal(first, again[0])
    np.testing.assert_array_equal(second, again[1])
    assert not np.array_equal(first, masks(split, values, jax.random.key(2))[0])


def test_a_function_of_rngs_is_a_model_and_draws_the_same_numbers(values):
    made = functional_model(lambda rngs: Parts(rngs)).init(jax.random.key(0))[0]
    jax.tree.map(np.testing.assert_array_equal, made, values[0])


def test_a_modules_own_values_are_the_initial_ones():
    with nnx.use_eager_sharding(False):  # Flax's own: named axes outside a mesh
        module = Parts(nnx.Rngs(7))
    expected = np.asarray(module.layers[0].kernel[...])
    params, _ = functional_model(module).init(jax.random.key(0))
    np.testing.assert_array_equal(params["layers"]["0"]["kernel"], expected)


@pytest.mark.parametrize(
    ("model", "message"),
    (("llama", "is not a Flax NNX module"), (lambda rngs: nnx.Dropout(0.5, rngs=rngs), "has no nnx.Param")),
)
def test_what_is_no_model_is_refused(model, message):
    with pytest.raises(ConfigError, match=message):
        functional_model(model)
