import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.ops.token_scores import token_scores

from .meshes import on_mesh

B, L, D, V = 4, 16, 8, 510
RNG = np.random.default_rng(0)
HIDDEN = jnp.asarray(RNG.normal(0, 1, (B, L, D)), jnp.float32)
HEAD = jnp.asarray(RNG.normal(0, 1, (D, V)), jnp.float32)
TARGETS = jnp.asarray(np.where(RNG.random((B, L)) < 0.3, -100, RNG.integers(0, V, (B, L))), jnp.int32)
WEIGHT = jnp.asarray(RNG.normal(0, 1, (B, L)), jnp.float32)
"""Cotangents of the log-probabilities: every token has its own."""


def by_hand(softcap=None):
    """Scores, and gradients of sum(WEIGHT * logps), in float64 from all logits at once."""
    x, w = np.asarray(HIDDEN, np.float64), np.asarray(HEAD, np.float64)
    t, weight = np.asarray(TARGETS), np.asarray(WEIGHT, np.float64)
    z = x @ w
    slope = 1.0
    if softcap is not None:
        slope = 1 / np.cosh(z / softcap) ** 2
        z = softcap * np.tanh(z / softcap)
    top = z.max(-1, keepdims=True)
    logp = z - top - np.log(np.exp(z - top).sum(-1, keepdims=True))
    p, live = np.exp(logp), t != -100
    wanted = np.eye(V)[np.where(live, t, 0)]
    scores = {
        "logps": (logp * wanted).sum(-1),
        "entropy": -(p * logp).sum(-1),
        "mean_logits": z.mean(-1),
        "correct": z.argmax(-1) == t,
        "log_sum_sq_probs": np.log((p**2).sum(-1)),
    }
    d_z = (wanted - p) * (weight * live)[..., None] * slope
    return {name: x * live for name, x in scores.items()}, d_z @ w.T, np.einsum("bld,blv->dv", x, d_z)


def ours(hidden, head, **options):
    def weighed(hidden, head):
        scores = token_scores(hidden, head, TARGETS, **options)
        return (scores.logps * WEIGHT).sum(), scores

    (_, scores), gradients = jax.jit(jax.value_and_grad(weighed, argnums=(0, 1), has_aux=True))(hidden, head)
    return scores._asdict(), *gradients


def compare(got, want, tolerance=2e-5):
    for name, values in want[0].items():
        np.testing.assert_allclose(got[0][name], values, atol=tolerance, err_msg=name)
    np.testing.assert_allclose(got[1], want[1], atol=tolerance)
    np.testing.assert_allclose(got[2], want[2], atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "chunk_size": 5}], ids=["plain", "soft cap, chunks of 5"])
def test_scores_and_gradients_equal_those_from_all_logits_in_float64(options):
    compare(ours(HIDDEN, HEAD, **options), by_hand(options.get("softcap")))


def test_a_mesh_that_cuts_rows_and_vocabulary_changes_nothing():
    with on_mesh(2, 2):
        compare(ours(HIDDEN, HEAD), by_hand())


def test_a_vocabulary_that_the_mesh_does_not_divide_is_padded_and_the_padding_scores_nothing():
    with on_mesh(1, 4):
        compare(ours(HIDDEN, HEAD), by_hand())


def test_a_soft_cap_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="softcap is 0"):
        token_scores(HIDDEN, HEAD, TARGETS, softcap=0.0)
