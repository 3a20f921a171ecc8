import jax
import jax.numpy as jnp
import numpy as np

from jtrain.models.dropout import dropout, dropout_keys, flat_index
from jtrain.ops.zigzag import token_index, zigzag_order

RNG = jax.random.key(0)
ROWS = jnp.asarray([5, 0, 9])


def test_a_key_is_a_function_of_step_place_and_global_row_alone():
    embedding, layers = dropout_keys(RNG, 2, ROWS)
    assert embedding.shape == (3,) and layers.shape == (2, 2, 3)
    more_embedding, more_layers = dropout_keys(RNG, 3, ROWS[::-1])
    assert bool((embedding == more_embedding[::-1]).all())
    assert bool((layers == more_layers[:2, :, ::-1]).all())
    every = jax.random.key_data(jnp.concatenate([embedding, layers.reshape(-1)]))
    assert len(np.unique(np.asarray(every), axis=0)) == 3 * 5


def test_a_mask_follows_its_row_and_keeps_the_mean():
    keys = dropout_keys(RNG, 1, ROWS)[0]
    y = np.asarray(dropout(jnp.ones((3, 64, 256)), 0.25, keys))
    # 49,152 draws: the standard error of the share is 0.2 %.
    assert abs((y == 0).mean() - 0.25) < 0.01
    np.testing.assert_allclose(y[y != 0], 1 / 0.75, rtol=1e-6)
    np.testing.assert_array_equal(dropout(jnp.ones((1, 64, 256)), 0.25, keys[2:])[0], y[2])
    assert not np.array_equal(y[0], y[1])


def test_bfloat16_is_scaled_in_float32():
    y = dropout(jnp.full((1, 8, 8), 3.0, jnp.bfloat16), 0.1, dropout_keys(RNG, 1, ROWS[:1])[0])
    assert y.dtype == jnp.bfloat16 and float(y.max()) == float(jnp.bfloat16(3.0 / 0.9))


def test_in_zigzag_order_a_token_keeps_its_mask():
    keys = dropout_keys(RNG, 1, ROWS)[0]
    x = jnp.asarray(np.random.default_rng(0).normal(0, 1, (3, 24, 5)), jnp.float32)
    plain = dropout(x, 0.4, keys)
    with zigzag_order(3):
        index = token_index(24)
        np.testing.assert_array_equal(dropout(x[:, index], 0.4, keys), plain[:, index])
        other = jax.random.split(jax.random.key(0, impl="rbg"), 1)  # bits of another generator are permuted
        permuted = dropout(x[:1, index], 0.4, other)
    np.testing.assert_array_equal(permuted, dropout(x[:1], 0.4, other)[:, index])


def test_the_index_of_an_element_of_a_long_row_has_64_bits():
    token = np.array([0, 1, 65_535, 65_536, 2**20 - 1, 2**31 - 1])
    for width in (1, 7, 16_384, 65_535):
        high, low = (np.asarray(word).astype(np.uint64) for word in flat_index(jnp.asarray(token, jnp.int32), width))
        np.testing.assert_array_equal((high << np.uint64(32)) | low, token[:, None] * width + np.arange(width))
