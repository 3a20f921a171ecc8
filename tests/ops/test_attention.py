import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.errors import ConfigError
from jtrain.ops.attention import attention, chosen_kernel, platform
from jtrain.ops.splash import splash_attention
from jtrain.ops.xla_attention import xla_attention

from .meshes import on_mesh

RNG = np.random.default_rng(0)
SEGMENTS = np.array([[1] * 4 + [2] * 7 + [0] * 2, [1] * 13], np.int32)


def inputs(b=2, length=13, heads=4, kv_heads=2, size=6):
    shapes = [(b, length, heads, size), (b, length, kv_heads, size), (b, length, kv_heads, size)]
    return [jnp.asarray(RNG.normal(0, 1, shape), jnp.float32) for shape in shapes]


def by_hand(q, k, v, segments, *, causal=True, window=None, scale=None):
    """float64, from the definition: one row, head and token at a time."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    b, length, heads, size = q.shape
    group = heads // k.shape[2]
    out = np.zeros(q.shape)
    for i, h, t in np.ndindex(b, heads, length):
        seen = [
            s
            for s in range(length)
            if segments[i, s] == segments[i, t] and (not causal or s <= t) and (window is None or t - s < window)
        ]
        scores = np.array([q[i, t, h] @ k[i, s, h // group] for s in seen]) * (size**-0.5 if scale is None else scale)
        weights = np.exp(scores - scores.max())
        out[i, t, h] = weights / weights.sum() @ v[i, seen, h // group]
    return out


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 3}, {"causal": False}, {"scale": 0.3}],
    ids=["causal", "window", "both ways", "scale"],
)
def test_attention_equals_the_definition_in_float64(options):
    q, k, v = inputs()
    out = attention(q, k, v, segment_ids=jnp.asarray(SEGMENTS), **options)
    np.testing.assert_allclose(out, by_hand(q, k, v, SEGMENTS, **options), atol=2e-6)


def test_without_segment_ids_a_row_is_one_document():
    q, k, v = inputs()
    np.testing.assert_allclose(attention(q, k, v), by_hand(q, k, v, np.ones((2, 13))), atol=2e-6)


def test_queries_in_blocks_give_the_same_numbers_and_gradients():
    # 13 tokens in blocks of 4: four blocks, the last one with three rows of padding.
    q, k, v = inputs()
    options = {"segment_ids": jnp.asarray(SEGMENTS), "causal": True, "window": None, "scale": 0.4}

    def loss(block):
        return jax.jit(
            jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(xla_attention(*a, **options, block=block))), (0, 1, 2))
        )(q, k, v)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=3e-6), loss(4), loss(512))


def test_long_rows_make_no_buffer_of_length_by_length():
    shape = jax.ShapeDtypeStruct((1, 2048, 1, 8), jnp.float32)
    gradient = jax.grad(lambda q, k, v: attention(q, k, v, kernel="xla").sum(), (0, 1, 2))
    assert "2048,2048" not in jax.jit(gradient).lower(shape, shape, shape).as_text().replace("x", ",")


@pytest.mark.parametrize("window", [None, 40], ids=["causal", "window"])
def test_splash_equals_xla_on_a_mesh_with_its_gradients(window):
    # Rows on two devices, heads on two: every device runs the kernel (interpreted) on its own part. Heads of 24 are
    # padded to whole lanes.
    q, k, v = inputs(2, 128, 4, 2, 24)
    segments = jnp.asarray(np.repeat([[1, 2, 3, 3], [1, 1, 1, 0]], 32, axis=1))
    options = {"segment_ids": segments, "causal": True, "window": window, "scale": 0.2}

    def gradients(function, **more):
        return jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(function(*a, **options, **more))), (0, 1, 2))(q, k, v)

    def splash():
        with on_mesh(2, 2):
            return gradients(splash_attention, interpret=True)

    plain = jax.jit(lambda: gradients(xla_attention))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5), jax.jit(splash)(), plain)


CASES = [
    ("auto", "cpu", 128, 64, "bfloat16", "xla"),
    ("auto", "tpu", 4096, 64, "bfloat16", "splash"),
    ("auto", "tpu", 100, 64, "bfloat16", "xla"),
    ("auto", "gpu", 4096, 128, "bfloat16", "cudnn"),
    ("auto", "cuda", 4096, 128, "float16", "cudnn"),
    ("auto", "gpu", 4096, 128, "float32", "xla"),
    ("auto", "gpu", 4096, 256, "bfloat16", "xla"),
    ("auto", "gpu", 4095, 128, "bfloat16", "xla"),
    ("xla", "tpu", 4096, 128, "bfloat16", "xla"),
    ("splash", "tpu", 256, 128, "float32", "splash"),
    ("cudnn", "gpu", 256, 128, "bfloat16", "cudnn"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_follows_platform_shape_and_type(case):
    kernel, where, length, size, dtype, expected = case
    chosen = chosen_kernel(kernel, platform=where, length=length, head_dim=size, dtype=jnp.dtype(dtype))
    assert chosen == expected


@pytest.mark.parametrize(
    ("kernel", "where", "length", "dtype", "word"),
    [
        ("splash", "cpu", 128, "float32", "this is cpu"),
        ("splash", "tpu", 100, "float32", "these have 100"),
        ("cudnn", "tpu", 128, "bfloat16", "this is tpu"),
        ("cudnn", "gpu", 128, "float32", "float32"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused_with_the_reason(kernel, where, length, dtype, word):
    with pytest.raises(ConfigError, match=word):
        chosen_kernel(kernel, platform=where, length=length, head_dim=64, dtype=jnp.dtype(dtype))


def test_the_platform_is_that_of_the_mesh_in_force():
    assert platform() == "cpu"
    with on_mesh(2, 1):
        assert platform() == "cpu"
    with pytest.raises(ConfigError, match="splash runs on TPU"):
        attention(*inputs(), kernel="splash")


def test_a_window_that_looks_both_ways_is_refused():
    with pytest.raises(ValueError, match="causal"):
        attention(*inputs(), causal=False, window=3)
