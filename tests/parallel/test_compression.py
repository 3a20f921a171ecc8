"""Compressed sums against plain ones, in float64: what is sent and what is owed is all there is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.parallel.compression import INT8_BLOCK, Bfloat16, Int8, MatrixShape, matrix_shape, sum_coded, sum_low_rank

CODECS = {"bf16": (Bfloat16(), 2.0**-8), "int8": (Int8(), 1 / 127)}
"""Codec, and the largest error of one rounding relative to the largest magnitude of its block."""


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def addends(members, shape, seed=0, steps=None):
    size = (members, *shape) if steps is None else (steps, members, *shape)
    return np.random.default_rng(seed).normal(size=size) * np.logspace(-3, 1, shape[-1])


@functools.cache
def members_of(codec):
    return jax.jit(jax.vmap(lambda x, error: sum_coded(x, error, "slices", codec), axis_name="slices"))


def coded(codec, x, error):
    """`sum_coded` on all members at once; the sum of every member, so that they can be compared."""
    return jax.tree.map(np.asarray, members_of(codec)(x, error))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(("members", "shape"), [(2, (3, 400)), (4, (7, 11)), (3, (5,)), (4, (3,)), (2, (1,))])
def test_a_coded_sum_is_the_sum_within_its_roundings(name, members, shape):
    codec, rounding = CODECS[name]
    x = addends(members, shape)
    total, _ = coded(codec, x, None)
    # One rounding of every addend and one of the sum; a block's scale is at most the largest magnitude of all.
    bound = rounding / 2 * (np.abs(x).max() * members + np.abs(x).sum(0).max()) * 1.01
    np.testing.assert_allclose(total[0], x.sum(0), rtol=0, atol=bound)
    for member in range(1, members):
        np.testing.assert_array_equal(total[member], total[0])


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("members", [2, 4])
def test_with_error_feedback_nothing_is_lost_over_the_steps(name, members):
    codec, rounding = CODECS[name]
    x = addends(members, (3, 50), steps=40)
    error, sent = jnp.zeros_like(x[0]), 0.0
    for step in x:
        total, error = coded(codec, step, error)
        sent = sent + total[0]
    np.testing.assert_allclose(sent + error.sum(0), x.sum((0, 1)), rtol=1e-12, atol=1e-12)
    # What is owed stays of the size of a step's rounding; it does not grow with the steps.
    assert np.abs(error).max() < 4 * rounding * members * np.abs(x).max()
    without = sum(coded(codec, step, None)[0][0] for step in x)
    assert np.abs(sent - x.sum((0, 1))).mean() < 0.5 * np.abs(without - x.sum((0, 1))).mean()


def test_int8_scales_every_block_by_itself():
    small, large = np.full(INT8_BLOCK, 1e-6), np.full(INT8_BLOCK, 1e6)
    x = np.concatenate([small, large])[None]
    values = Int8().decode(Int8().encode(jnp.asarray(x)), x.shape[1], jnp.float64)
    np.testing.assert_allclose(values, x, rtol=1e-6)  # the scale is float32


def test_int8_has_no_float_on_the_wire_and_few_bytes():
    codec = Int8()
    code = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct((2, 1 << 16), jnp.float32))
    assert code.dtype == jnp.int8
    assert code.size * 3.9 < 4 * 2 * (1 << 16)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_seen_in_the_sum(name, bad):
    x = addends(2, (300,))
    x[1, 7] = bad
    total, _ = coded(CODECS[name][0], x, jnp.zeros_like(x))
    assert not np.isfinite(total[:, 7]).any()


def test_zeros_stay_zeros():
    total, error = coded(Int8(), np.zeros((2, 600)), np.zeros((2, 600)))
    assert not total.any()
    assert not error.any()


# PowerSGD


def low_rank(x, error, sketch, shape):
    run = jax.vmap(
        lambda x, error: sum_low_rank(x, error, sketch, "slices", shape), axis_name="slices", out_axes=(None, 0, None)
    )
    return jax.tree.map(np.asarray, run(x, error))


@pytest.mark.parametrize(
    ("shape", "stacked", "expected"),
    [
        ((16, 2048, 32, 64), 1, MatrixShape(16, 2048, 2048)),  # a query projection of 16 layers
        ((16, 32, 64, 2048), 1, MatrixShape(16, 2048, 2048)),
        ((16, 8, 2048, 8192), 2, MatrixShape(128, 2048, 8192)),  # 8 experts
        ((128256, 2048), 0, MatrixShape(1, 128256, 2048)),
        ((16, 2048), 1, None),  # norms: a vector a layer
        ((2048,), 0, None),
        ((), 0, None),
        ((2, 6, 6), 1, None),  # rank 4: 4 * 12 = 48 factors for 36 elements
        ((2, 6, 16), 1, MatrixShape(2, 6, 16)),  # 88 for 96
    ],
)
def test_a_parameter_is_cut_into_matrices_where_that_saves(shape, stacked, expected):
    assert matrix_shape(shape, 4, stacked) == expected


def test_a_sum_of_low_rank_is_found_exactly_in_the_second_step():
    generator = np.random.default_rng(0)
    left, right = generator.normal(size=(2, 3, 20, 2)), generator.normal(size=(2, 3, 2, 30))
    x = left @ right  # [S, N, I, J]: each of rank 2, their sum of rank 4
    shape = MatrixShape(3, 20, 30)
    sketch = generator.normal(size=shape.sketch(4))
    for _ in range(2):
        total, _, sketch = low_rank(x, None, sketch, shape)
    np.testing.assert_allclose(total, x.sum(0), rtol=1e-9, atol=1e-9)


def test_a_step_is_the_projection_on_the_orthonormal_left_factor():
    x = addends(3, (2, 6, 9))
    shape = MatrixShape(2, 6, 9)
    sketch = np.random.default_rng(1).normal(size=shape.sketch(2))
    total, error, after = low_rank(x, np.zeros_like(x), sketch, shape)
    for n in range(2):
        p, _ = np.linalg.qr(x.sum(0)[n] @ sketch[n])
        np.testing.assert_allclose(total[n], p @ p.T @ x.sum(0)[n], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(error[:, n], x[:, n] - p @ p.T @ x[:, n], rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(p @ after[n].T, total[n], rtol=1e-10, atol=1e-12)


def test_low_rank_errors_are_sent_later():
    x = addends(2, (1, 24, 24), seed=3)  # full rank, and the same in every step
    shape = MatrixShape(1, 24, 24)
    sketch = np.random.default_rng(1).normal(size=shape.sketch(4))
    error, sent = np.zeros_like(x), 0.0
    misses = []
    for step in range(1, 61):
        total, error, sketch = low_rank(x, error, sketch, shape)
        sent = sent + total
        np.testing.assert_allclose(sent + error.sum(0), step * x.sum(0), rtol=1e-9, atol=1e-9)
        misses.append(np.linalg.norm(sent / step - x.sum(0)) / np.linalg.norm(x.sum(0)))
    assert misses[-1] < 0.15 * misses[0]
    once, _, _ = low_rank(x, None, sketch, shape)
    assert misses[-1] < 0.5 * np.linalg.norm(once - x.sum(0)) / np.linalg.norm(x.sum(0))


def test_a_matrix_without_gradient_does_not_stop_the_iteration():
    shape = MatrixShape(1, 12, 12)
    sketch = np.random.default_rng(1).normal(size=shape.sketch(2))
    _, _, sketch = low_rank(np.zeros((2, 1, 12, 12)), None, sketch, shape)
    x = np.random.default_rng(2).normal(size=(2, 1, 12, 2)) @ np.ones((2, 1, 2, 12))
    for _ in range(3):
        total, _, sketch = low_rank(x, None, sketch, shape)
    np.testing.assert_allclose(total, x.sum(0), rtol=1e-9, atol=1e-9)
