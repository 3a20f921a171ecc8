"""Quantised weights against plain NumPy, and their figures."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jtrain.ops.quantization import NF4, Int8Weight, Nf4Weight, block_axis, bytes_per_weight, quantize

# bitsandbytes 0.49, csrc/kernels.cu (nf4_dequantization_lut) and functional.py (get_4bit_type); QLoRA, appendix E.
PUBLISHED = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def weight(*shape, seed=0):
    return np.random.default_rng(seed).normal(0, 0.02, shape).astype(np.float32)


def nf4_of_numpy(matrix):
    """[n, m], blocks of 64 along the first axis: nearest value of the table, absmax in int8 around a column's mean."""
    table, (n, m) = np.array(PUBLISHED, np.float32), matrix.shape
    blocks = matrix.reshape(n // 64, 64, m)
    absmax = np.abs(blocks).max(1)
    code = np.abs(blocks[..., None] / absmax[:, None, :, None] - table).argmin(-1)
    mean = absmax.mean(0)
    step = np.abs(absmax - mean).max(0) / 127
    kept = np.round((absmax - mean) / step) * step + mean
    return (table[code] * kept[:, None]).reshape(n, m), code.reshape(n, m)


def test_the_table_is_the_published_one():
    assert list(NF4) == PUBLISHED
    # Appendix E: halves of the quantiles of a normal distribution, brought to [-1, 1], that share the zero.
    offset = 0.9677083
    positive = stats.norm.ppf(np.linspace(offset, 0.5, 9)[:-1])
    negative = -stats.norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
    values = np.sort([*positive, 0.0, *negative])
    np.testing.assert_allclose(NF4, values / values.max(), atol=2e-7)


def test_nf4_is_what_numpy_makes_of_the_definition():
    matrix = weight(256, 48)
    want, codes = nf4_of_numpy(matrix)
    got = Nf4Weight.quantize(jnp.asarray(matrix), 0)
    np.testing.assert_allclose(got.dequantize(jnp.float32), want, rtol=0, atol=2e-8)
    blocks = np.asarray(got.codes).reshape(4, 32, 48)
    np.testing.assert_array_equal(np.concatenate([blocks & 15, blocks >> 4], 1).reshape(256, 48), codes)


def test_int8_is_what_numpy_makes_of_the_definition():
    """One scale an output; the error is half a step."""
    kernel = weight(8, 4, 24)
    got = Int8Weight.quantize(jnp.asarray(kernel), 2)
    scale = np.abs(kernel).max((0, 1)) / 127
    np.testing.assert_array_equal(got.codes, np.round(kernel / scale))
    np.testing.assert_array_equal(got.scale, scale)
    assert np.all(np.abs(got.dequantize(jnp.float32) - kernel) <= scale / 2 * 1.0001)


@pytest.mark.parametrize("shape, axes, axis", [
    ((256, 512), ("embed", "mlp"), 0),
    ((512, 256), ("mlp", "embed"), 1),  # along D, which `tensor` never cuts
    ((96, 4, 32), ("embed", "heads", "head_dim"), 0),  # 48 is the largest even divisor of 96 up to 64
    ((3, 64), ("embed", "mlp"), 1),
])  # fmt: skip
def test_blocks_lie_along_any_axis_and_are_exact_for_values_of_the_table(shape, axes, axis):
    assert block_axis(shape, axes) == axis
    values = jnp.asarray(NF4, jnp.float32)[np.random.default_rng(0).integers(0, 16, shape)]
    values = jnp.where(
        jnp.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))]) % 2, values, 1
    )
    got = quantize("nf4", values * 0.25, axes, 1)
    np.testing.assert_allclose(got.dequantize(jnp.float32), values * 0.25, rtol=2e-7)


def test_blocks_of_zeros_stay_zero_and_an_odd_weight_is_refused():
    for kind in ("int8", "nf4"):
        assert not np.any(quantize(kind, jnp.zeros((64, 4)), ("embed", "mlp"), 1).dequantize(jnp.float32))
    with pytest.raises(ValueError, match=r"\[3, 5\] has no axis of even size"):
        quantize("nf4", jnp.zeros((3, 5)), ("embed", "mlp"), 1)


@pytest.mark.parametrize("kind, limit", [("nf4", 0.6), ("int8", 1.02)])
def test_bytes_of_a_weight(kind, limit):
    """QLoRA's own: 0.5 + 1/64 + 4/(64 * 256) = 0.516 bytes."""
    kernel = jax.ShapeDtypeStruct((512, 2048), jnp.float32)
    parts = jax.eval_shape(lambda w: quantize(kind, w, ("embed", "mlp"), 1), kernel)
    assert bytes_per_weight({name: getattr(parts, name) for name in parts.parts}, kernel.size) <= limit
