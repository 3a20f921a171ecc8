import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jtrain.ops.cross_entropy import cross_entropy, cross_entropy_and_correct, cross_entropy_figures
from jtrain.ops.logical import logical_rules

from .meshes import AXES, RULES, on_mesh

B, L, D, V = 4, 16, 8, 510
RNG = np.random.default_rng(0)
HIDDEN = jnp.asarray(RNG.normal(0, 1, (B, L, D)), jnp.float32)
HEAD = jnp.asarray(RNG.normal(0, 1, (D, V)), jnp.float32)
TARGETS = jnp.asarray(np.where(RNG.random((B, L)) < 0.3, -100, RNG.integers(0, V, (B, L))), jnp.int32)


def by_hand(hidden, head, targets, smoothing=0.0, z_weight=0.0, softcap=None):
    """Loss sum and its gradients, float64, from all logits at once."""
    x, w = np.asarray(hidden, np.float64).reshape(-1, hidden.shape[-1]), np.asarray(head, np.float64)
    t = np.asarray(targets).reshape(-1)
    z = x @ w
    slope = 1.0
    if softcap is not None:
        slope = 1 / np.cosh(z / softcap) ** 2
        z = softcap * np.tanh(z / softcap)
    log_z = np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1)) + z.max(-1)
    wanted = np.full(z.shape, smoothing / z.shape[1])
    live = t != -100
    wanted[live, t[live]] += 1.0 - smoothing
    loss = (log_z - (wanted * z).sum(-1) + z_weight * log_z**2)[live].sum()
    p = np.exp(z - log_z[:, None])
    d_z = (p * (1 + 2 * z_weight * log_z[:, None]) - wanted) * live[:, None] * slope
    correct = (z.argmax(-1) == t)[live].sum()
    return loss, live.sum(), correct, (d_z @ w.T).reshape(hidden.shape), x.T @ d_z


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1},
        {"z_loss": 1e-2},
        {"chunk_size": 5},
        {"softcap": 2.0, "label_smoothing": 0.1, "z_loss": 1e-2},
    ],
    ids=["plain", "smoothing", "z_loss", "chunks of 5", "soft cap"],
)
def test_loss_and_gradients_equal_those_from_all_logits_in_float64(options):
    def loss(hidden, head):
        total, count, correct = cross_entropy_and_correct(hidden, head, TARGETS, **options)
        return total, (count, correct)

    (total, (count, correct)), (d_hidden, d_head) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        HIDDEN, HEAD
    )
    names = ("label_smoothing", "z_loss", "softcap")
    want = by_hand(HIDDEN, HEAD, TARGETS, *(options.get(name, 0.0 if name != "softcap" else None) for name in names))
    np.testing.assert_allclose(total, want[0], rtol=1e-6)
    assert (int(count), int(correct)) == want[1:3]
    np.testing.assert_allclose(d_hidden, want[3], atol=2e-5)
    np.testing.assert_allclose(d_head, want[4], atol=2e-5)


def test_the_loss_alone_is_the_loss_of_the_differentiated_function():
    alone = jax.jit(lambda h: cross_entropy(h, HEAD, TARGETS)[0])(HIDDEN)
    np.testing.assert_allclose(alone, by_hand(HIDDEN, HEAD, TARGETS)[0], rtol=1e-6)


def test_label_smoothing_equals_hugging_faces_golden_number():
    # transformers' LabelSmoother, epsilon 0.1; counting the ignored row would give 0.600241.
    logits = jnp.asarray([[[2.0, 0, 0], [0, 1, 0], [0, 0, 3]]])
    total, count = cross_entropy(logits, jnp.eye(3), jnp.asarray([[0, 1, -100]]), label_smoothing=0.1)
    assert float(total / count) == pytest.approx(0.495495, abs=1e-6)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2)])  # nine tokens: on two devices the vocabulary is padded
def test_the_entropy_is_that_of_the_distributions_at_live_places(sizes):
    generator = np.random.default_rng(3)
    hidden, head = generator.normal(size=(2, 6, 4)), 2 * generator.normal(size=(4, 9))
    targets = generator.integers(0, 9, (2, 6))
    targets[0, :3] = -100
    logits = hidden @ head
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    wanted = -(p * np.log(p)).sum(-1)[targets != -100].sum()

    def program(hidden, head, targets):
        with on_mesh(*sizes):
            figures = cross_entropy_figures(hidden, head, targets, z_loss=1e-3, entropy=True)
        return figures.loss, figures

    arguments = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32), jnp.asarray(targets)
    found = jax.jit(program)(*arguments)[1]  # without gradients, and with them
    differentiated = jax.jit(jax.value_and_grad(program, has_aux=True))(*arguments)[0][1]
    assert float(found.entropy) == pytest.approx(wanted, rel=1e-5)
    assert float(differentiated.entropy) == pytest.approx(wanted, rel=1e-5)
    assert float(cross_entropy_figures(*arguments).entropy) == 0.0


def test_float64_is_kept():
    with jax.enable_x64(True):
        hidden, head = HIDDEN.astype(jnp.float64), HEAD.astype(jnp.float64)
        total, d_head = jax.jit(jax.value_and_grad(lambda w: cross_entropy(hidden, w, TARGETS, softcap=3.0)[0]))(head)
        want = by_hand(hidden, head, TARGETS, softcap=3.0)
        np.testing.assert_allclose(total, want[0], rtol=1e-13)
        np.testing.assert_allclose(d_head, want[4], atol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_loses_no_more_than_its_own_rounding(dtype):
    hidden, head = HIDDEN.astype(dtype), HEAD.astype(dtype)
    total, (d_hidden, d_head) = jax.jit(
        jax.value_and_grad(lambda h, w: cross_entropy(h, w, TARGETS)[0], argnums=(0, 1))
    )(hidden, head)
    want = by_hand(hidden, head, TARGETS)
    assert (total.dtype, d_hidden.dtype, d_head.dtype) == (jnp.float32, dtype, dtype)
    np.testing.assert_allclose(total, want[0], rtol=1e-6)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(d_hidden.astype(jnp.float32), want[3], atol=2 * eps * np.abs(want[3]).max())
    np.testing.assert_allclose(d_head.astype(jnp.float32), want[4], atol=2 * eps * np.abs(want[4]).max())


def test_small_float16_probabilities_reach_the_gradient():
    # Every wrong token has p = 1e-7 / 2, under float16's smallest number; with a head of ones they add up in hidden.
    v = 512
    hidden = jnp.asarray([[[16.8], [16.8]]], jnp.float16)
    head = jnp.zeros((1, v), jnp.float16).at[0, 0].set(1.0)
    d_head = jax.grad(lambda w: cross_entropy(hidden, w, jnp.zeros((1, 2), jnp.int32))[0])(head.astype(jnp.float16))
    want = 2 * 16.8 * math.exp(-16.8)
    assert float(d_head[0, 1]) == pytest.approx(want, rel=0.05)


def test_a_batch_without_targets_costs_nothing_and_is_finite():
    nothing = jnp.full((B, L), -100)
    total, gradient = jax.value_and_grad(lambda h: cross_entropy(h, HEAD, nothing)[0])(HIDDEN)
    assert float(total) == 0.0 and float(cross_entropy(HIDDEN, HEAD, nothing)[1]) == 0.0
    assert not np.asarray(gradient).any()


def test_no_buffer_of_tokens_by_vocabulary_exists_in_the_compiled_program():
    def largest(chunk_size):
        def loss(h, w):
            return cross_entropy(h, w, TARGETS, chunk_size=chunk_size)[0]

        text = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(HIDDEN, HEAD).compile().as_text()
        shapes = re.findall(r"\b(?:f32|bf16|pred|s32)\[([\d,]+)\]", text)
        return max(math.prod(map(int, shape.split(","))) for shape in shapes)

    # By default rows of two tokens and more make two chunks; the limit is set only by the chunk.
    assert largest(None) == B * L * V // 2
    assert largest(4) == B * 4 * V


@pytest.mark.parametrize("sizes", [(4, 1), (1, 4), (2, 4)], ids=["data=4", "tensor=4", "data=2,tensor=4"])
def test_a_mesh_changes_no_number(sizes):
    # 510 tokens on four ranks: the head is padded inside the program only.
    def run(hidden, head):
        with on_mesh(*sizes):
            return jax.value_and_grad(
                lambda h, w: cross_entropy(h, w, TARGETS, label_smoothing=0.1, softcap=2.0)[0], argnums=(0, 1)
            )(hidden, head)

    total, (d_hidden, d_head) = jax.jit(run)(HIDDEN, HEAD)
    want = by_hand(HIDDEN, HEAD, TARGETS, 0.1, softcap=2.0)
    np.testing.assert_allclose(total, want[0], rtol=1e-6)
    np.testing.assert_allclose(d_hidden, want[3], atol=2e-5)
    np.testing.assert_allclose(d_head, want[4], atol=2e-5)


def test_a_vocabulary_that_manual_axes_cut_changes_no_number():
    # As in a pipeline: a device has its own 128 of 510 tokens, two of the last one's are padding.
    devices = np.array(jax.devices()[:4]).reshape(1, 4)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 2)
    options = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 2.0}

    def local(hidden, head):
        with logical_rules(mesh, RULES, manual=AXES, sizes={"vocab": V}):
            return jax.value_and_grad(lambda *a: cross_entropy(*a, TARGETS, **options)[0], argnums=(0, 1))(hidden, head)

    columns = PartitionSpec(None, "tensor")
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), columns),
        out_specs=(PartitionSpec(), (PartitionSpec(), columns)),
        check_vma=False,
    )
    total, (d_hidden, d_head) = jax.jit(mapped)(HIDDEN, jnp.pad(HEAD, ((0, 0), (0, 2))))
    want = by_hand(HIDDEN, HEAD, TARGETS, 0.1, 1e-2, 2.0)
    np.testing.assert_allclose(total, want[0], rtol=1e-6)
    np.testing.assert_allclose(d_hidden, want[3], atol=2e-5)
    np.testing.assert_allclose(d_head[:, :V], want[4], atol=2e-5)


def test_data_ranks_meet_once_for_the_heads_gradient_and_not_once_a_chunk():
    def run(hidden, head, targets):
        with on_mesh(4, 1):
            return jax.grad(lambda w: cross_entropy(hidden, w, targets, chunk_size=4)[0])(head)

    with on_mesh(4, 1) as mesh:
        rows = NamedSharding(mesh, PartitionSpec("data"))
    inputs = (jax.device_put(HIDDEN, rows), HEAD, jax.device_put(TARGETS, rows))
    text = jax.jit(run).lower(*inputs).compile().as_text()
    reduces = [line for line in text.splitlines() if re.search(rf"f32\[(1,)?{D},{V}\].* all-reduce(-start)?\(", line)]
    assert len(reduces) == 1 and "while" not in reduces[0]
