import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.errors import ConfigError
from jtrain.ops.grouped_matmul import chosen_expert_kernel, grouped_matmul

SIZES = np.array([3, 0, 5, 2], np.int32)  # an empty group, and two rows of twelve after the last


def by_rows(x, kernels, sizes):
    """Row by row, in NumPy."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    return np.stack([x[n] @ kernels[group[n]] if n < len(group) else np.zeros(kernels.shape[2]) for n in range(len(x))])


def operands(rows, inner, outer, dtype=np.float64):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, inner)).astype(dtype), rng.normal(size=(4, inner, outer)).astype(dtype)


@pytest.mark.parametrize("kernel", ["blocks", "ragged_dot"])
def test_rows_meet_the_kernel_of_their_group_and_rows_after_the_last_are_zero(kernel):
    with jax.enable_x64(True):
        x, kernels = operands(12, 6, 5)
        y = jax.jit(functools.partial(grouped_matmul, kernel=kernel))(x, kernels, SIZES)
        np.testing.assert_allclose(y, by_rows(x, kernels, SIZES), rtol=1e-13, atol=1e-13)
        assert (np.asarray(y)[10:] == 0).all()


@pytest.mark.parametrize("kernel", ["blocks", "ragged_dot"])
def test_gradients_are_those_of_the_rows_and_nothing_comes_from_rows_after_the_last(kernel):
    with jax.enable_x64(True):
        x, kernels = operands(12, 6, 5)
        x[10:] = np.nan
        ct = np.random.default_rng(1).normal(size=(12, 5))

        def loss(x, kernels):
            return (grouped_matmul(x, kernels, SIZES, kernel=kernel) * ct).sum()

        gx, gk = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, kernels)
        group = np.repeat(np.arange(4), SIZES)
        expected = np.zeros_like(kernels)
        for n, g in enumerate(group):
            expected[g] += np.outer(x[n], ct[n])
            np.testing.assert_allclose(gx[n], kernels[g] @ ct[n], rtol=1e-12)
        np.testing.assert_allclose(gk, expected, rtol=1e-12, atol=1e-13)
        assert (np.asarray(gx)[10:] == 0).all()


def test_blocks_agree_with_ragged_dot_where_groups_are_longer_and_shorter_than_a_block():
    with jax.enable_x64(True):
        sizes = np.array([70, 0, 1, 129], np.int32)  # of 220 rows: blocks of 64
        x, kernels = operands(220, 6, 5)

        def run(kernel):
            def loss(x, kernels):
                return (grouped_matmul(x, kernels, sizes, kernel=kernel) ** 2).sum()

            return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, kernels)

        for found, expected in zip(jax.tree.leaves(run("blocks")), jax.tree.leaves(run("ragged_dot")), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)


def test_blocks_keep_no_row_once_a_group():
    # XLA:CPU's ragged_dot holds every row once a group; a loop over blocks holds them once.
    x, kernels = jax.ShapeDtypeStruct((4096, 64), jnp.float32), jax.ShapeDtypeStruct((16, 64, 64), jnp.float32)

    def temporary(kernel):
        def loss(x, kernels, sizes):
            return (grouped_matmul(x, kernels, sizes, kernel=kernel) ** 2).sum()

        sizes = jax.ShapeDtypeStruct((16,), jnp.int32)
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, kernels, sizes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    rows = 4096 * 64 * 4
    assert temporary("blocks") < 8 * rows
    assert temporary("ragged_dot") > 16 * rows


def test_megablox_agrees_with_ragged_dot_forward_and_backward():
    sizes = np.array([100, 0, 60, 40], np.int32)
    x, kernels = operands(230, 128, 256, np.float32)
    x, kernels = jnp.asarray(x), jnp.asarray(kernels)
    ct = jnp.asarray(np.random.default_rng(1).normal(size=(230, 256)), jnp.float32)

    def run(kernel):
        def loss(x, kernels):
            y = grouped_matmul(x, kernels, sizes, kernel=kernel, interpret=kernel == "megablox")
            return (y * ct).sum(), y

        grads, y = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, kernels)
        return y, *grads

    for found, expected in zip(run("megablox"), run("ragged_dot"), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("asked", "platform", "sizes", "dtype", "chosen"),
    [
        ("auto", "cpu", (128, 256), "float32", "blocks"),
        ("auto", "gpu", (128, 256), "bfloat16", "blocks"),
        ("auto", "tpu", (128, 256), "bfloat16", "megablox"),
        ("auto", "tpu", (128, 200), "bfloat16", "ragged_dot"),
        ("auto", "tpu", (128, 256), "float16", "ragged_dot"),
        ("ragged_dot", "tpu", (128, 256), "bfloat16", "ragged_dot"),
        ("megablox", "tpu", (128, 256), "float32", "megablox"),
    ],
)
def test_the_kernel_follows_platform_shape_and_type(asked, platform, sizes, dtype, chosen):
    assert chosen_expert_kernel(asked, platform=platform, sizes=sizes, dtype=dtype) == chosen


@pytest.mark.parametrize(
    ("platform", "sizes", "why"), [("cpu", (128, 128), "not on cpu"), ("tpu", (128, 96), "128, 96")]
)
def test_a_kernel_that_cannot_run_is_refused_with_the_reason(platform, sizes, why):
    with pytest.raises(ConfigError, match=why):
        chosen_expert_kernel("megablox", platform=platform, sizes=sizes, dtype="float32")
