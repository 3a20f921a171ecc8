import jax
import jax.numpy as jnp
import numpy as np

from jtrain.ops.vocabulary import embedding_lookup, pad_vocabulary

from .meshes import on_mesh

TABLE = jnp.asarray(np.random.default_rng(0).normal(0, 1, (10, 4)), jnp.float32)
IDS = jnp.asarray([[1, 9, 1], [0, 1, 9]])


def test_lookup_and_its_gradient_are_those_of_a_one_hot_product_on_a_divided_table():
    weight = jnp.arange(24.0).reshape(2, 3, 4)
    one_hot = np.eye(10)[np.asarray(IDS)]

    def run(table):
        with on_mesh(2, 4):
            return jax.value_and_grad(lambda t: jnp.sum(embedding_lookup(t, IDS) * weight))(table)

    total, gradient = jax.jit(run)(TABLE)
    np.testing.assert_allclose(total, ((one_hot @ np.asarray(TABLE)) * np.asarray(weight)).sum(), rtol=1e-6)
    np.testing.assert_allclose(gradient, np.einsum("blv,bld->vd", one_hot, weight), rtol=1e-6)


def test_a_frequent_token_keeps_its_bfloat16_gradient():
    # 1,000 gradients of 1: summed in bfloat16 they would stop at 256.
    ids = jnp.zeros((10, 100), jnp.int32)
    gradient = jax.grad(lambda t: embedding_lookup(t, ids).astype(jnp.float32).sum())(TABLE.astype(jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16 and float(gradient[0, 0]) == 1000.0


def test_padding_is_zeros_up_to_a_multiple_of_the_ranks():
    def run(table):
        with on_mesh(1, 4):
            return pad_vocabulary(table, 0), pad_vocabulary(table.T, 1)

    rows, columns = jax.jit(run)(TABLE)
    assert rows.shape == (12, 4) and columns.shape == (4, 12)
    np.testing.assert_array_equal(rows[10:], 0.0)
    np.testing.assert_array_equal(rows[:10], TABLE)
    assert pad_vocabulary(TABLE, 0).shape == (10, 4)
