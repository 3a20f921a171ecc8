import jax.numpy as jnp
import numpy as np

from jtrain.models.config import RopeScaling
from jtrain.models.rope import apply_rope, inverse_frequencies, rope_tables

from .build import small
from .oracle import rotate

CONFIG = small(head_dim=128, rope_theta=10_000.0)


def test_phases_at_position_16000_are_those_of_float64_also_under_bfloat16():
    positions = jnp.asarray([[0, 1, 16_000]])
    cos, sin = rope_tables(CONFIG, positions, jnp.dtype(jnp.bfloat16))
    exact = np.asarray(positions)[..., None] * 10_000.0 ** (-np.arange(0, 128, 2) / 128)
    assert cos.dtype == sin.dtype == jnp.float32
    # 16,000 radians have a float32 spacing of 1e-3.
    np.testing.assert_allclose(cos, np.cos(exact), atol=2e-3)
    np.testing.assert_allclose(sin, np.sin(exact), atol=2e-3)


def test_rotation_equals_turning_every_pair_of_channels_by_hand():
    x = np.random.default_rng(0).normal(0, 1, (1, 5, 2, 128))
    positions = np.array([0, 3, 1, 0, 700])
    turned = apply_rope(jnp.asarray(x, jnp.float32), rope_tables(CONFIG, jnp.asarray(positions[None]), jnp.float32))
    np.testing.assert_allclose(turned[0], rotate(x[0], positions, 10_000.0), atol=1e-4)
    assert (
        apply_rope(jnp.asarray(x, jnp.bfloat16), rope_tables(CONFIG, jnp.asarray(positions[None]), jnp.bfloat16)).dtype
        == jnp.bfloat16
    )


def test_scaling_keeps_fast_channels_stretches_slow_ones_and_blends_between():
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)
    plain, _ = inverse_frequencies(small(head_dim=128, rope_theta=500_000.0))
    scaled, factor = inverse_frequencies(small(head_dim=128, rope_theta=500_000.0, rope_scaling=scaling))
    assert factor == 1.0
    wavelength = 2 * np.pi / plain
    fast, slow = wavelength < 8192 / 4, wavelength > 8192
    between = ~fast & ~slow
    assert fast.any() and slow.any() and between.any()
    np.testing.assert_allclose(scaled[fast], plain[fast])
    np.testing.assert_allclose(scaled[slow], plain[slow] / 8)
    # Meta's reference code, llama-models, apply_scaling.
    smooth = (8192 / wavelength[between] - 1.0) / (4.0 - 1.0)
    np.testing.assert_allclose(scaled[between], (1 - smooth) * plain[between] / 8 + smooth * plain[between])
