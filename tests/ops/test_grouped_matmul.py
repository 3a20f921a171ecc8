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


def test_rows_meet_the_kernel_of_their_group_and_rows_after_the_last_are_zero():
    with jax.enable_x64(True):
        x, kernels = operands(12, 6, 5)
        y = jax.jit(grouped_matmul)(x, kernels, SIZES)
        np.testing.assert_allclose(y, by_rows(x, kernels, SIZES), rtol=1e-13, atol=1e-13)
        assert (np.asarray(y)[10:] == 0).all()


def test_gradients_are_those_of_the_rows_and_nothing_comes_from_rows_after_the_last():
    with jax.enable_x64(True):
        x, kernels = operands(12, 6, 5)
        x[10:] = np.nan
        ct = np.random.default_rng(1).normal(size=(12, 5))
        # What a caller gives back for rows that are none may be anything but what is not a number.
        gx, gk = jax.jit(jax.grad(lambda x, k: (grouped_matmul(x, k, SIZES) * ct).sum(), argnums=(0, 1)))(x, kernels)
        group = np.repeat(np.arange(4), SIZES)
        expected = np.zeros_like(kernels)
        for n, g in enumerate(group):
            expected[g] += np.outer(x[n], ct[n])
            np.testing.assert_allclose(gx[n], kernels[g] @ ct[n], rtol=1e-12)
        np.testing.assert_allclose(gk, expected, rtol=1e-12, atol=1e-13)
        assert (np.asarray(gx)[10:] == 0).all()


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
        ("auto", "cpu", (128, 256), "float32", "ragged_dot"),
        ("auto", "gpu", (128, 256), "bfloat16", "ragged_dot"),
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
