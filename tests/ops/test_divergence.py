"""Divergence from a teacher and the teacher's scores, against float64 from all logits at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.ops.divergence import TeacherTokens, divergence
from jtrain.ops.teacher_scores import teacher_scores

from .meshes import on_mesh

B, L, D, V, K = 4, 16, 8, 62, 5
RNG = np.random.default_rng(0)
HIDDEN = jnp.asarray(RNG.normal(0, 1, (B, L, D)), jnp.float32)
HEAD = jnp.asarray(RNG.normal(0, 1, (D, V)), jnp.float32)
TEACHER_HIDDEN = jnp.asarray(RNG.normal(0, 1, (B, L, 6)), jnp.float32)
TEACHER_HEAD = jnp.asarray(RNG.normal(0, 1, (6, V)), jnp.float32)
TARGETS = jnp.asarray(np.where(RNG.random((B, L)) < 0.3, -100, RNG.integers(0, V, (B, L))), jnp.int32)
WEIGHTS = jnp.asarray([0.0, 0.25, 0.5, 0.0], jnp.float32)
"""Of the cross-entropy, one a row."""


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def kl(log_p, log_q):
    p = np.exp(log_p)
    return np.where(p > 0, p * (log_p - log_q), 0).sum(-1)


def per_token(logits, log_p, beta, temperature, support=None, tail="bucket"):
    """The divergence by its definition, of the outcomes that there are."""
    log_q = log_softmax(logits / temperature)
    if support is not None:
        kept_p, kept_q = (np.take_along_axis(x, support, -1) for x in (log_p, log_q))
        if tail == "bucket":
            log_p, log_q = (
                np.concatenate([x, np.log1p(-np.exp(x).sum(-1, keepdims=True))], -1) for x in (kept_p, kept_q)
            )
        else:
            log_p, log_q = log_softmax(kept_p), log_softmax(kept_q)
    if beta in (0, 1):
        return kl(log_p, log_q) if beta == 0 else kl(log_q, log_p)
    log_m = np.log(beta * np.exp(log_p) + (1 - beta) * np.exp(log_q))
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def by_hand(beta, temperature=1.0, top_k=0, tail="bucket", softcap=None):
    """Loss and gradients by hidden and head: central differences of the definition, along the logits, in float64."""
    x, w, live = np.asarray(HIDDEN, np.float64), np.asarray(HEAD, np.float64), np.asarray(TARGETS) != -100
    teacher = np.asarray(TEACHER_HIDDEN, np.float64) @ np.asarray(TEACHER_HEAD, np.float64)
    log_p = log_softmax(teacher / temperature)
    support = np.argsort(-log_p, -1)[..., :top_k] if top_k else None
    wanted = np.where(live, TARGETS, 0)[..., None]
    weight = np.asarray(WEIGHTS, np.float64)[:, None]
    cap = (lambda z: z) if softcap is None else lambda z: softcap * np.tanh(z / softcap)

    def loss(raw):
        z = cap(raw)
        nll = -np.take_along_axis(log_softmax(z), wanted, -1)[..., 0]
        return ((1 - weight) * per_token(z, log_p, beta, temperature, support, tail) + weight * nll) * live

    z, step = x @ w, 1e-5
    d_z = np.stack([(loss(z + step * e) - loss(z - step * e)) / (2 * step) for e in np.eye(V)], -1)
    return loss(z).sum(), d_z @ w.T, np.einsum("bld,blv->dv", x, d_z)


def ours(beta, temperature=1.0, top_k=0, tail="bucket", softcap=None, chunk_size=None):
    def value(hidden, head):
        scores = teacher_scores(
            TEACHER_HIDDEN, TEACHER_HEAD, TARGETS, top_k=top_k, temperature=temperature, chunk_size=chunk_size
        )
        tokens = TeacherTokens(scores.logps, scores.ids, scores.rest)
        found = divergence(
            hidden, head, TARGETS, tokens, beta=beta, temperature=temperature, ce_weight=WEIGHTS, tail=tail,
            softcap=softcap, chunk_size=chunk_size,
        )  # fmt: skip
        return found.loss, (found, scores)

    quick = {"xla_backend_optimization_level": 0}
    graded = jax.jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True), compiler_options=quick)
    (loss, aux), gradients = graded(HIDDEN, HEAD)
    return (loss, *gradients), aux


@functools.cache
def alone(**options):
    """`ours` on one device."""
    return ours(**options)


CASES = [
    {"beta": 0.0},
    {"beta": 1.0, "temperature": 2.0, "softcap": 3.0},
    {"beta": 0.3, "temperature": 1.5, "chunk_size": 5},
    {"beta": 0.0, "top_k": K, "temperature": 0.7},
    {"beta": 1.0, "top_k": K, "chunk_size": 3},
    {"beta": 0.5, "top_k": K, "tail": "renormalise", "temperature": 1.5},
]


@pytest.mark.parametrize(
    "options", [pytest.param(c, marks=pytest.mark.grid if n == 4 else (), id=str(c)) for n, c in enumerate(CASES)]
)
def test_loss_and_gradients_are_those_of_the_definition_in_float64(options):
    want = by_hand(**{name: value for name, value in options.items() if name != "chunk_size"})
    got, _ = alone(**options)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for a, b in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_figures_are_those_of_all_logits():
    _, (found, scores) = alone(**CASES[1])
    live = np.asarray(TARGETS) != -100
    z = np.asarray(HIDDEN, np.float64) @ np.asarray(HEAD, np.float64)
    teacher = np.asarray(TEACHER_HIDDEN, np.float64) @ np.asarray(TEACHER_HEAD, np.float64)
    z = 3.0 * np.tanh(z / 3.0)
    log_q, log_p = log_softmax(z), log_softmax(teacher)
    chosen = np.where(live, TARGETS, 0)[..., None]
    want = {
        "count": live,
        "kl": kl(log_softmax(teacher / 2), log_softmax(z / 2)),
        "nll": -np.take_along_axis(log_q, chosen, -1)[..., 0],
        "entropy": -(np.exp(log_q) * log_q).sum(-1),
        "correct": z.argmax(-1) == TARGETS,
        "agreement": z.argmax(-1) == teacher.argmax(-1),
    }
    for name, values in want.items():
        np.testing.assert_allclose(getattr(found, name), (values * live).sum(), rtol=2e-6, err_msg=name)
    np.testing.assert_allclose(scores.nll, -np.take_along_axis(log_p, chosen, -1)[..., 0] * live, atol=1e-5)
    np.testing.assert_allclose(scores.entropy, -(np.exp(log_p) * log_p).sum(-1) * live, atol=1e-5)


def test_as_many_tokens_as_there_are_is_all_of_them():
    for a, b in zip(alone(beta=0.0, top_k=V)[0], alone(**CASES[0])[0], strict=True):
        np.testing.assert_array_equal(a, b)


def test_equals_of_the_least_kept_token_count_to_the_rest():
    head = jnp.zeros((6, V)).at[0, 0].set(1.0)
    scores = teacher_scores(TEACHER_HIDDEN, head, TARGETS, top_k=3)
    known = jnp.exp(scores.logps).sum(-1) + jnp.exp(scores.rest)
    np.testing.assert_allclose(known, 1.0, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "options"),
    [((2, 2), CASES[2]), ((1, 4), CASES[3])],
    ids=["rows and vocabulary", "a vocabulary that is padded, top 5"],
)
def test_a_mesh_changes_nothing(shape, options):
    wanted, (figures, _) = alone(**options)
    with on_mesh(*shape):
        got, (found, _) = ours(**options)
    for a, b in zip((*got, *found), (*wanted, *figures), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-5)  # sums of 64 tokens up to 4 large, in float32


@pytest.mark.parametrize("options", [{"beta": 1.5}, {"temperature": 0.0}, {"softcap": -1.0}], ids=str)
def test_numbers_out_of_their_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        divergence(HIDDEN, HEAD, TARGETS, TeacherTokens(jnp.zeros((B, L, V))), **options)
