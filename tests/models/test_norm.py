import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jtrain.models.norm import Norm

from .build import small
from .oracle import layer_norm, rms_norm

X = np.random.default_rng(0).normal(1.0, 3.0, (2, 3, 16)).astype(np.float32)
SCALE = np.linspace(0.5, 1.5, 16, dtype=np.float32)


def build(kind: str) -> Norm:
    with nnx.use_eager_sharding(False):
        norm = Norm(small(norm=kind, norm_eps=0.1), jnp.dtype("float32"))
    norm.scale[...] = jnp.asarray(SCALE)
    if kind == "layernorm":
        norm.bias[...] = jnp.asarray(SCALE) - 1.0
    return norm


def test_rmsnorm_equals_its_formula():
    np.testing.assert_allclose(build("rmsnorm")(jnp.asarray(X)), rms_norm(X, SCALE, 0.1), rtol=1e-5)


def test_layernorm_equals_its_formula():
    expected = layer_norm(X.astype(np.float64), SCALE, SCALE - 1.0, 0.1)
    np.testing.assert_allclose(build("layernorm")(jnp.asarray(X)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_bfloat16_is_normalised_in_float32_and_returned_as_bfloat16(kind):
    x = jnp.asarray(X, jnp.bfloat16)
    y = build(kind)(x)
    exact = build(kind)(x.astype(jnp.float32))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, exact.astype(jnp.bfloat16))
