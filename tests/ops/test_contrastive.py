"""The contrastive losses against float64 numpy: values, derivatives, chunks, equal texts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.ops.contrastive import MAX_LOG_SCALE, contrastive, contrastive_loss, surrogate

B, D = 7, 5
KEYS = np.array([0, 1, 2, 0, 4, 2, 0])


def unit(seed):
    x = np.random.default_rng(seed).normal(size=(B, D))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def in_numpy(kind, image, text, log_scale, bias, equal_texts):
    """The summed loss from the papers' formulas."""
    z = np.exp(log_scale) * image @ text.T
    one = KEYS[:, None] == KEYS[None] if equal_texts else np.eye(B, dtype=bool)
    if kind == "siglip":
        sign = np.where(one, 1.0, -1.0)
        return np.log1p(np.exp(-sign * (z + bias))).sum()
    share = one / one.sum(1, keepdims=True)
    rows = z - np.log(np.exp(z).sum(1, keepdims=True))
    columns = z - np.log(np.exp(z).sum(0, keepdims=True))
    return -0.5 * (share * (rows + columns)).sum()


def slope(function, x, at, step=1e-5):
    """Central difference by one number."""
    above, below = x.copy(), x.copy()
    above[at] += step
    below[at] -= step
    return (function(above) - function(below)) / (2 * step)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
@pytest.mark.parametrize("equal_texts", [False, True])
def test_value_and_derivatives_are_those_of_the_formulas_in_any_chunks(kind, equal_texts):
    image, text, scale, bias = unit(0), unit(1), np.array(1.2), np.array(-0.7)
    keys = jnp.stack([jnp.asarray(KEYS)] * 2, axis=1)
    of = lambda *x: in_numpy(kind, *x, equal_texts)
    for chunk in (3, 1024):
        function = jax.value_and_grad(
            lambda i, t, s, b, chunk=chunk: contrastive_loss(kind, i, t, s, b, keys, equal_texts, chunk)[0],
            (0, 1, 2, 3),
        )
        value, slopes = jax.jit(function)(*(jnp.float32(x) for x in (image, text, scale, bias)))
        np.testing.assert_allclose(value, in_numpy(kind, image, text, scale, bias, equal_texts), rtol=2e-6)
        for at in ((0, 0), (5, 3)):
            np.testing.assert_allclose(slopes[0][at], slope(lambda x: of(x, text, scale, bias), image, at), atol=2e-5)
            np.testing.assert_allclose(slopes[1][at], slope(lambda x: of(image, x, scale, bias), text, at), atol=2e-5)
        np.testing.assert_allclose(slopes[2], slope(lambda x: of(image, text, x, bias), scale, ()), atol=2e-5)
        np.testing.assert_allclose(slopes[3], slope(lambda x: of(image, text, scale, x), bias, ()), atol=2e-5)


def test_the_nearest_of_all_counts_and_an_equal_text_is_as_good_as_the_own():
    # Text 1 is what image 0 is nearest to; it is equal to text 0 in the second reading of the keys.
    image = jnp.asarray([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    text = jnp.asarray([[0.6, 0.8], [1.0, 0.0], [0.0, 1.0]])
    different, equal = jnp.asarray([[0, 0], [1, 1], [2, 2]]), jnp.asarray([[0, 0], [0, 0], [2, 2]])
    zero = jnp.zeros(())
    for chunk in (2, 3):
        pairs, _ = contrastive("clip", image, text, zero, zero, different, chunk=chunk)
        assert pairs.image_to_text.tolist() == [False, False, False]
        pairs, _ = contrastive("siglip", image, text, zero, zero, equal, chunk=chunk)
        assert pairs.image_to_text.tolist() == [True, False, False]  # image 1 is nearest to text 2, image 2 to text 0
        assert pairs.text_to_image.tolist() == [
            False,
            True,
            False,
        ]  # text 0 to image 2, 1 to 0 (which has an equal one)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_parts_of_a_batch_have_the_gradients_of_the_whole(kind):
    weights = jnp.float32(np.random.default_rng(3).normal(size=(D, D)))
    inputs, text = jnp.float32(unit(0)), jnp.float32(unit(1))
    keys, scale, bias = jnp.stack([jnp.asarray(KEYS)] * 2, axis=1), jnp.float32(1.0), jnp.float32(-1.0)

    def whole(w, scale, bias):
        return contrastive_loss(kind, jnp.tanh(inputs @ w), text @ w, scale, bias, keys)[0]

    def parts(w, scale, bias):
        fixed = jax.lax.stop_gradient((jnp.tanh(inputs @ w), text @ w, scale, bias))
        pairs, slopes = contrastive(kind, *fixed, keys)
        total = 0.0
        for rows in (slice(0, 3), slice(3, B)):
            image, words = jnp.tanh(inputs[rows] @ w), text[rows] @ w
            share = (rows.stop - rows.start) / B
            mine = slopes._replace(
                image=slopes.image[rows],
                text=slopes.text[rows],
                log_scale=slopes.log_scale * share,
                bias=slopes.bias * share,
            )
            total += surrogate(pairs.loss[rows].sum(), mine, image, words, scale, bias)
        return total

    one, many = (jax.jit(jax.value_and_grad(f, (0, 1, 2)))(weights, scale, bias) for f in (whole, parts))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_clips_scale_ends_at_100_and_can_come_back():
    image = jnp.eye(4)
    over, keys = jnp.float32(MAX_LOG_SCALE + 1), jnp.stack([jnp.arange(4)] * 2, axis=1)
    run = jax.value_and_grad(lambda text, s: contrastive_loss("clip", image, text, s, jnp.zeros(()), keys)[0], 1)
    value, d = run(image, over)  # all is right: a larger scale would lower the loss
    assert float(value) == pytest.approx(4 * np.log1p(3 * np.exp(-100)), abs=1e-6) and float(d) == 0.0
    value, d = run(image[::-1], over)  # all is wrong: a smaller one would
    assert float(value) == pytest.approx(4 * 100, rel=1e-5) and float(d) > 0
