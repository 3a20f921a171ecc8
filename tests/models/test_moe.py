"""The layer against a token-by-token NumPy oracle in float64, on one device and on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jtrain.models.moe import MixtureOfExperts
from jtrain.observe.hlo import analyze
from jtrain.ops.logical import logical_rules
from jtrain.parallel.sharding import RULES

from .build import jit, mesh, small

E, K, D, ROWS, LENGTH = 8, 2, 16, 8, 16
SEGMENTS = np.ones((ROWS, LENGTH), np.int32)
SEGMENTS[0, 10:] = 0
SEGMENTS[3, :] = 0  # a row of padding
BIAS = np.linspace(-0.3, 0.3, E).astype(np.float32)
rng = np.random.default_rng(0)
X = rng.normal(size=(ROWS, LENGTH, D))
COTANGENT = rng.normal(size=X.shape)
ROW_WEIGHTS = np.arange(1.0, ROWS + 1)

SOFTMAX = {}
QWEN = {"norm_topk_prob": False, "num_experts_per_tok": 3, "activation": "geglu"}
DEEPSEEK = {"scoring_func": "sigmoid", "n_shared_experts": 2, "routed_scaling_factor": 2.5, "biased": True}
PLAIN = {"activation": "gelu", "biased": True}
KINDS = {"softmax": SOFTMAX, "unnormalised": QWEN, "sigmoid, shared, biased": DEEPSEEK, "no gate, biased": PLAIN}


def layer(**changes):
    """Graph, float64 parameters, config and bias."""
    biased, dtype = changes.pop("biased", False), changes.pop("dtype", "float64")
    config = small(**{"num_experts": E, "moe_intermediate_size": 8} | changes)
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(MixtureOfExperts(config, jax.random.split(jax.random.key(0), 7), jnp.dtype(dtype)))
    return graph, nnx.to_pure_dict(state), config, BIAS if biased else None


# -- the oracle -------------------------------------------------------------------------------------------------------


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


def expert(config, kernels, x):
    up = x @ kernels["up_proj"]
    if config.activation == "gelu":
        return gelu(up) @ kernels["down_proj"]
    act = silu if config.activation == "swiglu" else gelu
    return (act(x @ kernels["gate_proj"]) * up) @ kernels["down_proj"]


def oracle(config, params, bias, x=X):
    """Output, balance losses, z losses and loads, token by token."""
    y = np.zeros_like(x)
    balance, z, loads = np.zeros(ROWS), np.zeros(ROWS), np.zeros((ROWS, E))
    for b in range(ROWS):
        shares = []
        for t in np.flatnonzero(SEGMENTS[b]):
            logits = x[b, t] @ params["router"]
            z[b] += np.log(np.exp(logits).sum()) ** 2
            scores = 1 / (1 + np.exp(-logits))
            if config.scoring_func == "softmax":
                scores = np.exp(logits) / np.exp(logits).sum()
            shares.append(scores / scores.sum())
            chosen = np.argsort(-(scores if bias is None else scores + bias))[: config.num_experts_per_tok]
            weights = scores[chosen] / (scores[chosen].sum() if config.norm_topk_prob else 1)
            for e, w in zip(chosen, weights, strict=True):
                kernels = {name: kernel[e] for name, kernel in params["experts"].items()}
                y[b, t] += config.routed_scaling_factor * w * expert(config, kernels, x[b, t])
                loads[b, e] += 1
            if config.n_shared_experts:
                y[b, t] += expert(config, params["shared_experts"], x[b, t])
        if shares:
            f = loads[b] / len(shares) / config.num_experts_per_tok
            balance[b] = E * (f * np.mean(shares, axis=0)).sum()
            z[b] /= len(shares)
    return y, balance, z, loads


def objective(config, params, bias, x):
    y, balance, z, _ = oracle(config, params, bias, x)
    return (y * COTANGENT * (SEGMENTS > 0)[..., None]).sum() + (balance * ROW_WEIGHTS).sum() + 0.1 * z.sum()


# -- the layer --------------------------------------------------------------------------------------------------------


def outcome(kind, on=None, **changes):
    """Gradients of `objective` in parameters and input, and what the layer returned, with padding set to zero."""
    graph, params, _, bias = layer(**KINDS[kind], **changes)

    def loss(params, x):
        y, figures = nnx.merge(graph, params)(x, SEGMENTS, bias)
        y = y * (SEGMENTS > 0)[..., None]
        total = (y * COTANGENT).sum() + (figures.balance * ROW_WEIGHTS).sum() + 0.1 * figures.z.sum()
        return total, (y, figures)

    def run(params, x):
        gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
        if on is None:
            return gradient(params, x)
        with logical_rules(mesh(**on), RULES):
            return gradient(params, x)

    return jax.device_get(jit(run)(params, X))


@functools.cache
def reference(kind):
    with jax.enable_x64(True):
        return outcome(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_gets_the_weighted_sum_of_its_experts_and_rows_their_figures(kind):
    with jax.enable_x64(True):
        _, params, config, bias = layer(**KINDS[kind])
        y, balance, z, loads = oracle(config, jax.device_get(params), bias)
        found, figures = reference(kind)[1]
    np.testing.assert_allclose(found, y, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(figures.balance, balance, rtol=1e-12)
    np.testing.assert_allclose(figures.z, z, rtol=1e-12)
    np.testing.assert_array_equal(figures.load, loads)
    assert not figures.dropped.any()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_differences_of_the_oracle(kind):
    with jax.enable_x64(True):
        _, params, config, bias = layer(**KINDS[kind])
        params, x = jax.tree.map(np.array, jax.device_get(params)), X.copy()
        grads, gx = reference(kind)[0]
    step = 1e-5
    draw = np.random.default_rng(2)
    for target, gradient in zip([*jax.tree.leaves(params), x], [*jax.tree.leaves(grads), gx], strict=True):
        index = (1, 4, 7) if target is x else tuple(draw.integers(0, n) for n in target.shape)
        values = []
        for sign in (1, -1):
            kept = target[index]
            target[index] = kept + sign * step
            values.append(objective(config, params, bias, x))
            target[index] = kept
        np.testing.assert_allclose(gradient[index], (values[0] - values[1]) / (2 * step), rtol=1e-5, atol=1e-7)


LAYOUTS = [
    {"expert": 8},
    {"data": 2, "expert": 4},
    {"tensor": 4},
    {"fsdp": 2, "tensor": 2, "expert": 2},
    {"context": 2, "tensor": 2, "expert": 2},
]
MORE = [("softmax", {"expert": 2}), ("softmax", {"data": 2, "tensor": 4})]
MORE += [("sigmoid, shared, biased", on) for on in (*LAYOUTS[:3], {"expert": 2}, {"data": 2, "tensor": 4})]


def errors(found, expected):
    def one(a, b):
        return np.abs(a - b).max() / max(np.abs(b).max(), 1e-300) if b.any() else np.abs(a).max()

    return jax.tree.leaves(jax.tree.map(one, found, expected))


@pytest.mark.parametrize(
    ("kind", "on"),
    [
        *(("softmax", on) for on in LAYOUTS),
        *(("sigmoid, shared, biased", on) for on in LAYOUTS[3:]),
        *(pytest.param(*case, marks=pytest.mark.grid) for case in MORE),
    ],
    ids=str,
)
def test_a_mesh_changes_neither_result_nor_gradient(kind, on):
    with jax.enable_x64(True):
        found = outcome(kind, on)
        assert max(errors(found, reference(kind))) < 1e-10
        assert np.abs(found[0][0]["router"]).max() > 1e-3


def test_inside_a_manual_region_the_other_axes_are_opened_and_gradients_stay_right():
    # What a pipeline does: its region is manual over pipeline, data and fsdp, and takes the gradient inside.
    on = mesh(data=2, tensor=2, expert=2)
    manual = ("pipeline", "data", "fsdp")
    graph, params, _, _ = layer(dtype="float32")

    def local(params, x, segments, cotangent):
        def loss(params, x):
            y, figures = nnx.merge(graph, params)(x, segments, None)
            return (y * cotangent).sum() + figures.balance.sum()

        with logical_rules(on, RULES, manual=manual):
            grads, gx = jax.grad(loss, argnums=(0, 1))(params, x)
        return jax.lax.psum(grads, manual), gx

    whole, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")
    region = jax.shard_map(
        local, mesh=on, in_specs=(whole, rows, rows, rows), out_specs=(whole, rows), axis_names=set(manual),
        check_vma=False,
    )  # fmt: skip
    x, cotangent = X.astype(np.float32), COTANGENT.astype(np.float32)
    found = jax.device_get(jit(region)(params, x, SEGMENTS, cotangent))

    def alone(params, x):
        y, figures = nnx.merge(graph, params)(x, SEGMENTS, None)
        return (y * cotangent).sum() + figures.balance.sum()

    expected = jax.device_get(jit(jax.grad(alone, argnums=(0, 1)))(params, x))
    assert max(errors(found, expected)) < 2e-6


def test_an_f_that_tensor_does_not_divide_divides_the_tokens():
    with jax.enable_x64(True):
        odd = {"moe_intermediate_size": 9}
        assert max(errors(outcome("softmax", {"tensor": 4}, **odd), outcome("softmax", **odd))) < 1e-10


def test_no_token_is_lost_where_all_choose_one_expert():
    with jax.enable_x64(True):
        graph, params, config, _ = layer()
        crowd = np.zeros(E, np.float32)
        crowd[5], crowd[2] = 20.0, 10.0  # every token goes to expert 5, then 2

        def run(params):
            with logical_rules(mesh(data=2, expert=4), RULES):
                return nnx.merge(graph, params)(X, SEGMENTS, crowd)

        y, figures = jax.device_get(jit(run)(params))
        expected, _, _, loads = oracle(config, jax.device_get(params), crowd)
        np.testing.assert_allclose(y * (SEGMENTS > 0)[..., None], expected, rtol=1e-11, atol=1e-12)
        np.testing.assert_array_equal(figures.load, loads)
        assert figures.load.sum() == figures.load[:, [2, 5]].sum() == K * (SEGMENTS > 0).sum()


# -- capacity ---------------------------------------------------------------------------------------------------------


def test_a_capacity_keeps_first_choices_then_earlier_tokens_and_counts_the_rest():
    with jax.enable_x64(True):
        graph, params, config, _ = layer(expert_capacity_factor=0.5)
        y, figures = jit(lambda p: nnx.merge(graph, p)(X, SEGMENTS, None))(params)
        params = jax.device_get(params)
        places = 2  # ceil(0.5 * 16 tokens * 2 choices / 8 experts)
        for b in range(ROWS):
            taken, dropped, expected = np.zeros(E, int), 0, np.zeros((LENGTH, D))
            scores = np.exp(X[b] @ params["router"])
            scores /= scores.sum(-1, keepdims=True)
            chosen = np.argsort(-scores, axis=-1)[:, :K]
            for choice in range(K):
                for t in np.flatnonzero(SEGMENTS[b]):
                    e = chosen[t, choice]
                    if taken[e] == places:
                        dropped += 1
                        continue
                    taken[e] += 1
                    kernels = {name: kernel[e] for name, kernel in params["experts"].items()}
                    expected[t] += scores[t, e] / scores[t, chosen[t]].sum() * expert(config, kernels, X[b, t])
            np.testing.assert_allclose(y[b][SEGMENTS[b] > 0], expected[SEGMENTS[b] > 0], rtol=1e-11, atol=1e-12)
            assert figures.dropped[b] == dropped
        assert figures.dropped.sum() > 20


def test_a_capacity_that_holds_everything_is_dropless():
    with jax.enable_x64(True):
        assert max(errors(outcome("softmax", expert_capacity_factor=float(E)), reference("softmax"))) < 1e-12


@pytest.mark.parametrize("on", [{"expert": 4, "data": 2}, {"fsdp": 2, "tensor": 2, "expert": 2}], ids=str)
def test_what_is_dropped_does_not_depend_on_the_mesh(on):
    with jax.enable_x64(True):
        tight = {"expert_capacity_factor": 0.75}
        found, expected = outcome("softmax", on, **tight), outcome("softmax", **tight)
        assert expected[1][1].dropped.sum() > 0
        assert max(errors(found, expected)) < 1e-10


def test_a_capacity_is_refused_where_the_tokens_of_a_row_are_apart():
    with jax.enable_x64(True), pytest.raises(ValueError, match="context divides the tokens of a row"):
        outcome("softmax", {"context": 2}, expert_capacity_factor=1.0)


# -- what is exchanged ------------------------------------------------------------------------------------------------


def test_with_a_capacity_the_axis_carries_the_least_that_there_is():
    ways, factor = 4, 1.0
    graph, params, _, _ = layer(expert_capacity_factor=factor, dtype="float32")
    on = mesh(expert=ways)

    def loss(params, x):
        with logical_rules(on, RULES):
            return (nnx.merge(graph, params)(x, SEGMENTS, None)[0] ** 2).sum()

    place = functools.partial(jax.sharding.NamedSharding, on)
    x = jax.ShapeDtypeStruct(X.shape, np.float32, sharding=place(jax.sharding.PartitionSpec("expert")))
    kernel = place(jax.sharding.PartitionSpec("expert"))
    whole = place(jax.sharding.PartitionSpec())
    abstract = jax.tree.map_with_path(
        lambda path, a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole if "router" in str(path) else kernel),
        params,
    )
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(abstract, x).compile()
    cost = analyze(compiled.as_text(), dict(on.shape))
    sent = sum(c.wire_bytes * n for c, n in cost.collectives.items() if c.op == "all-to-all")
    # Each device has 2 rows of 16 tokens with 2 choices each: so many vectors of D float32 leave for the experts and
    # come back, forward and backward; the share of a device's own experts stays.
    least = 4 * (ROWS // ways) * LENGTH * K * factor * D * 4 * (ways - 1) / ways
    assert least <= sent <= 1.10 * least
