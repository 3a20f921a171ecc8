"""Soft caps, sinks, windows that differ by layer, and values of another size: every kernel, one device and several."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.errors import ConfigError
from jtrain.ops.attention import WindowChoice, attention, chosen_kernel
from jtrain.ops.cudnn import cudnn_attention
from jtrain.ops.ring_attention import ring_attention
from jtrain.ops.splash import splash_attention
from jtrain.ops.window import simplified
from jtrain.ops.xla_attention import xla_attention

from .across import CHEAP, across, assert_equal, definition, inputs, make_mesh, places, with_gradients
from .meshes import on_mesh

CAP = 1.5  # scores are about 1: it bends them
SIZES = (5, None)


def forms(b=2, length=24, heads=4, kv_heads=2, sizes=(6, 4), dtype=np.float64):
    """q, k, v, sinks, segment ids and the cotangent of the result; values are of another size."""
    q, k, _, segments, _ = inputs(b, length, heads, kv_heads, sizes[0], dtype)
    rng = np.random.default_rng(1)
    v = rng.normal(0, 1, (b, length, kv_heads, sizes[1])).astype(dtype)
    d = rng.normal(0, 1, (b, length, heads, sizes[1])).astype(dtype)
    return q, k, v, np.linspace(-1, 2, heads).astype(dtype), segments, d


@functools.cache
def _definition(segmented, with_sinks, softcap, scale):
    def both(q, k, v, sinks, segments, window, d):
        def function(q, k, v, sinks):
            options = {"window": window, "softcap": softcap, "scale": scale}
            return definition(q, k, v, segments, sinks=sinks if with_sinks else None, **options)

        out, pull = jax.vjp(function, q, k, v, sinks)
        return out, *pull(d)

    return jax.jit(both, compiler_options=CHEAP)


def expected(q, k, v, sinks, segments, d, *, window=None, softcap=None, with_sinks=True, scale=None):
    """The result and the gradients of q, k, v and sinks, by the definition."""
    compiled = _definition(segments is not None, with_sinks, softcap, scale)
    return compiled(q, k, v, sinks, segments, q.shape[1] if window is None else window, d)


@pytest.mark.parametrize(
    ("options", "with_sinks"),
    [({}, False), ({"softcap": CAP}, False), ({"window": 5}, True), ({"softcap": CAP, "window": 5}, True)],
    ids=["values of another size", "soft cap", "sinks", "all"],
)
def test_result_and_gradients_equal_the_definition_in_float64(options, with_sinks):
    with jax.enable_x64(True):
        q, k, v, sinks, segments, d = forms()

        def function(q, k, v, sinks):
            return attention(q, k, v, segment_ids=segments, sinks=sinks if with_sinks else None, **options)

        want = expected(q, k, v, sinks, segments, d, with_sinks=with_sinks, **options)
        assert_equal(with_gradients(function, q, k, v, sinks, d), want, 1e-12)


def test_layers_of_a_scan_choose_their_windows():
    with jax.enable_x64(True):
        q, k, v, sinks, segments, d = forms()

        def layers(q, k, v, sinks):
            def body(total, index):
                options = {"window": WindowChoice(SIZES, index), "softcap": CAP, "sinks": sinks, "scale": 0.4}
                blocks = xla_attention(q, k, v, segment_ids=segments, causal=True, **options, block=7)
                return total + (index + 1) * blocks, None

            return jax.lax.scan(body, jnp.zeros(d.shape), jnp.arange(2))[0]

        each = [expected(q, k, v, sinks, segments, d, window=size, softcap=CAP, scale=0.4) for size in SIZES]
        want = jax.tree.map(lambda local, whole: local + 2 * whole, *each)
        assert_equal(with_gradients(layers, q, k, v, sinks, d), want, 1e-12)


def test_a_fully_drowned_softmax_stays_finite():
    q, k, v, _, segments, _ = forms(dtype=np.float32)
    out, *gradients = with_gradients(
        lambda q, sinks: attention(q, k, v, segment_ids=segments, sinks=sinks, softcap=CAP),
        q, jnp.full(4, 1e4, jnp.float32), np.ones((2, 24, 4, 4), np.float32),
    )  # fmt: skip
    assert all(np.isfinite(x).all() for x in (out, *gradients))
    np.testing.assert_array_equal(out, 0)


MESHES = {
    "ring in zig-zag order": ({"context": 2, "tensor": 2}, "ring", True),
    "ring in natural order": ({"data": 2, "context": 4}, "ring", False),
    "ulysses": ({"data": 2, "context": 2, "tensor": 2}, "ulysses", False),
}


@pytest.mark.parametrize("name", MESHES)
def test_on_several_devices_too(name):
    sizes, method, zigzag = MESHES[name]
    mesh = make_mesh(**sizes)
    with jax.enable_x64(True):
        q, k, v, sinks, segments, d = forms()
        order = places(24, mesh.shape["context"] if zigzag else 1)

        def cut(window, q, k, v, sinks):
            with across(mesh, method, zigzag=zigzag):
                given = {"segment_ids": segments[:, order], "window": window, "softcap": CAP, "sinks": sinks}
                if method == "ring":
                    out = ring_attention(*(x[:, order] for x in (q, k, v)), **given, causal=True, scale=0.4, block=2)
                else:
                    out = attention(q, k, v, **given, scale=0.4)
            return out[:, np.argsort(order)]

        def both(q, k, v, sinks, index, d):
            out, pull = jax.vjp(functools.partial(cut, WindowChoice(SIZES, index)), q, k, v, sinks)
            return out, *pull(d)

        compiled = jax.jit(both, compiler_options=CHEAP)
        for index, window in enumerate(SIZES):
            want = expected(q, k, v, sinks, segments, d, window=window, softcap=CAP, scale=0.4)
            assert_equal(compiled(q, k, v, sinks, index, d), want, 1e-12)


@pytest.mark.parametrize("kernel", [splash_attention, cudnn_attention], ids=["splash", "cudnn"])
def test_kernels_that_run_on_every_device_of_a_mesh(kernel, monkeypatch):
    # Splash is interpreted; of cuDNN's attention the arithmetic is done by XLA: what is shown is how it is called.
    plain = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, **k: plain(*a, **k | {"implementation": "xla"}))
    splash = kernel is splash_attention
    softcap, sizes = CAP if splash else None, (40, None)
    q, k, v, sinks, _, d = forms(length=128, sizes=(24, 16), dtype=np.float32)
    segments = np.repeat(np.array([[1, 2, 3, 3], [1, 1, 1, 0]], np.int32), 32, axis=1)

    @functools.partial(jax.jit, compiler_options=CHEAP)
    def both(q, k, v, sinks, index, d):
        def function(q, k, v, sinks):
            more = {"softcap": CAP, "sinks": sinks, "interpret": True} if splash else {}
            options = {"segment_ids": segments, "causal": True, "window": WindowChoice(sizes, index), "scale": 0.2}
            with on_mesh(2, 2):
                return kernel(q, k, v, **options, **more)

        out, pull = jax.vjp(function, q, k, v, sinks)
        return out, *pull(d)

    for index, window in enumerate(sizes):
        want = expected(q, k, v, sinks, segments, d, window=window, softcap=softcap, with_sinks=splash, scale=0.2)
        assert_equal(both(q, k, v, sinks, index, d), want, 1e-5)


def test_what_a_choice_of_kernels_keeps_for_the_backward_pass_is_one_kernels():
    q = jnp.zeros((1, 128, 2, 128))

    def kept(window):
        def function(q, k, v):
            options = {"segment_ids": None, "causal": True, "window": window, "scale": 1.0}
            return splash_attention(q, k, v, **options, interpret=True)

        leaves = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(function, *a)[1], q, q, q))
        return sum(x.size for x in leaves if x.size >= q.size // 128 and x.dtype == jnp.float32)

    assert kept(WindowChoice((40, None), jnp.int32(0))) <= kept(None)


CASES = [
    ("auto", "tpu", {"softcap": 30.0, "sinks": True}, "splash"),
    ("auto", "gpu", {"softcap": 30.0}, "xla"),
    ("auto", "gpu", {"sinks": True}, "xla"),
    ("auto", "gpu", {"value_dim": 64}, "cudnn"),
    ("auto", "gpu", {"value_dim": 192}, "xla"),
    ("cudnn", "gpu", {"softcap": 30.0}, "attn_logit_softcapping is 30"),
    ("cudnn", "gpu", {"sinks": True}, "no attention sinks"),
    ("cudnn", "gpu", {"value_dim": 192}, "these have 192"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_follows_the_form_of_the_softmax(case):
    kernel, where, form, words = case
    options = {"platform": where, "length": 256, "head_dim": 96, "dtype": jnp.dtype(jnp.bfloat16)} | form
    if words in ("xla", "splash", "cudnn"):
        assert chosen_kernel(kernel, **options) == words
    else:
        with pytest.raises(ConfigError, match=words):
            chosen_kernel(kernel, **options)


def test_a_window_that_reaches_as_far_as_a_row_is_none():
    assert simplified(24, 24) is None and simplified(23, 24) == 23
    assert simplified(WindowChoice((24, None, 100), jnp.int32(1)), 24) is None
    choice = simplified(WindowChoice((None, 5, 30, 5), jnp.int32(3)), 24)
    assert choice.sizes == (None, 5) and choice.index == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": WindowChoice((3, None), 0), "causal": False}, "causal"),
        ({"window": 0}, "at least one token"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"sinks": np.zeros(2)}, "for 4 query heads"),
    ],
)
def test_what_can_not_be_is_refused(options, words):
    q, k, v, *_ = forms(dtype=np.float32)
    with pytest.raises(ValueError, match=words):
        attention(q, k, v, **options)
