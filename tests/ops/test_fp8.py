"""8-bit products against float64: rounding, scales, and the errors of values and gradients."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jtrain.ops.fp8 import FORWARD, GRADIENT, dot_general, fp8_products, rounded

DIMENSIONS = (((1,), (0,)), ((), ()))


def drawn(*shape, seed=0, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(0, scale, shape), jnp.float32)


@pytest.mark.parametrize("kind, numpy_type, largest", [
    (FORWARD, ml_dtypes.float8_e4m3fn, 448.0), (GRADIENT, ml_dtypes.float8_e5m2, 57344.0),
], ids=["e4m3", "e5m2"])  # fmt: skip
@pytest.mark.parametrize("amax", [1e-30, 3e-4, 448.0, 449.0, 57344.0, 1e20])
def test_a_tensor_is_rounded_to_eight_bits_under_a_power_of_two(kind, numpy_type, largest, amax):
    x = np.linspace(-1, 1, 101).astype(np.float32) * np.float32(amax)
    values, scale = rounded(jnp.asarray(x), kind, "native")
    scale = float(scale)
    assert np.log2(scale) == np.round(np.log2(scale))
    assert largest / 2 < np.abs(x).max() / scale <= largest  # the smallest that keeps the largest number
    np.testing.assert_array_equal(np.asarray(values).view(np.uint8), (x / scale).astype(numpy_type).view(np.uint8))
    emulated, same = rounded(jnp.asarray(x), kind, "emulate")
    assert emulated.dtype == jnp.float32 and float(same) == scale
    np.testing.assert_array_equal(emulated, np.asarray(values).astype(np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_stay_so_and_zeros_stay_zero(bad):
    values, scale = rounded(jnp.asarray([1.0, bad]), FORWARD, "emulate")
    assert not np.any(np.isfinite(values * scale))
    values, scale = rounded(jnp.zeros(3), GRADIENT, "emulate")
    assert not np.any(values * scale)


def test_a_product_is_within_the_rounding_of_both_operands():
    """e4m3 keeps 4 bits of a number: each operand is off by 2^-4 of itself at most, both together by 0.129."""
    a, b = drawn(24, 64), drawn(64, 32, seed=1)
    with fp8_products("emulate"):
        got = dot_general(a, b, DIMENSIONS, (FORWARD, FORWARD))
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    bound = np.abs(np.asarray(a, np.float64)) @ np.abs(np.asarray(b, np.float64)) * ((1 + 2.0**-4) ** 2 - 1)
    assert np.all(np.abs(got - exact) <= bound + 1e-3)
    assert np.abs(got - exact).max() > 1e-3  # it did round
    np.testing.assert_allclose(dot_general(a, b, DIMENSIONS, (FORWARD, FORWARD)), exact, rtol=1e-4, atol=1e-4)


def test_native_and_emulated_products_are_equal():
    """The scales are powers of two and the products exact in float32: only the order of the sum may differ."""
    a, b = drawn(24, 64).astype(jnp.bfloat16), drawn(64, 32, seed=1).astype(jnp.bfloat16)
    results = {}
    for mode in ("native", "emulate"):
        with fp8_products(mode):
            results[mode] = dot_general(a, b, DIMENSIONS, (FORWARD, GRADIENT)).astype(jnp.float32)
    np.testing.assert_allclose(results["native"], results["emulate"], rtol=2.0**-7, atol=1e-2)
