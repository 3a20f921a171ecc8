"""Adapters beside projections: against float64, against the model without them, and merged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jtrain.errors import ConfigError
from jtrain.models.decoder import Decoder
from jtrain.models.lora import ADAPTER, Lora, add_lora, merge, plain_parameters, projections, targeted, unmerge
from jtrain.models.projection import Projection, adapter_keys, project
from jtrain.models.quantized import QuantizedKernel
from jtrain.ops.fp8 import fp8_products
from tests.models.build import jit, small

D, H, DH, RANK, SCALE = 8, 2, 3, 2, 1.7
SHAPES = {
    "q": ((("embed", D),), (("heads", H), ("head_dim", DH))),
    "o": ((("heads", H), ("head_dim", DH)), (("embed", D),)),
}
IDS = np.random.default_rng(5).integers(0, 37, (2, 12))


def projection(kind, lora):
    """A projection with adapters of random numbers."""

    class Holder(nnx.Module):
        def __init__(self):
            inputs, outputs = SHAPES[kind]
            self.proj = Projection(jax.random.key(0), 1.0, inputs, outputs, bias=True, dtype=jnp.float32)

    with nnx.use_eager_sharding(False):
        holder = add_lora(Holder(), lora, key=jax.random.key(1))
        rng = np.random.default_rng(2)
        for name in (*ADAPTER, "bias"):
            if hasattr(holder.proj, name):
                variable = getattr(holder.proj, name)
                variable[...] = jnp.asarray(rng.normal(0.5, 0.5, variable[...].shape), jnp.float32)
    return holder.proj


def matrices(p):
    """W [in, out], A, B, bias, m in float64."""
    rank = len(p.axes) - p.input_rank
    parts = [np.asarray(v, np.float64) for v in (p.kernel[...], p.lora_a[...], p.lora_b[...], p.bias[...])]
    fan_out = int(np.prod(parts[0].shape[-rank:])) if rank else 1
    w = parts[0].reshape(-1, fan_out)
    m = np.asarray(p.lora_magnitude[...], np.float64).reshape(-1) if hasattr(p, "lora_magnitude") else None
    return w, parts[1].reshape(-1, RANK), parts[2].reshape(RANK, -1), parts[3].reshape(-1), m


def lora(**changes):
    return Lora(**{"rank": RANK, "alpha": RANK * SCALE} | changes)


@pytest.mark.parametrize("kind, dora, base", [
    ("q", False, None), ("q", True, None), ("q", False, "nf4"), ("o", False, "int8"), ("o", True, "nf4"),
])  # fmt: skip
def test_values_and_gradients_are_those_of_the_formula(kind, dora, base):
    """y = x W + s x A B; for DoRA its columns brought to m, their lengths taken as constants (section 4.3)."""
    p = projection(kind, lora(dora=dora, quantization=base))
    inputs = [size for _, size in SHAPES[kind][0]]
    x = np.random.default_rng(3).normal(0, 1, (2, 5, *inputs))
    graph, adapters, rest = nnx.split(p, lambda path, _: path[-1] in ADAPTER, ...)

    def loss(adapters, x):
        y = nnx.merge(graph, adapters, rest)(x)
        return (y * jnp.cos(jnp.arange(y.size, dtype=y.dtype).reshape(y.shape))).sum(), y

    (_, y), (got, d_x) = jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        adapters, jnp.asarray(x, jnp.float32)
    )
    w, a, b, bias, m = matrices(p)
    flat = x.reshape(10, -1)
    whole = w + SCALE * a @ b
    g = 1.0 if m is None else m / np.sqrt((whole**2).sum(0))
    want = g * (flat @ whole) + bias
    np.testing.assert_allclose(np.asarray(y).reshape(10, -1), want, rtol=2e-5, atol=2e-5)

    d_y = np.cos(np.arange(want.size)).reshape(want.shape)
    d_whole = g * d_y
    np.testing.assert_allclose(np.asarray(d_x).reshape(10, -1), d_whole @ whole.T, rtol=2e-4, atol=2e-4)
    wanted = {"lora_a": SCALE * flat.T @ d_whole @ b.T, "lora_b": SCALE * a.T @ flat.T @ d_whole}
    if m is not None:
        wanted["lora_magnitude"] = (d_y * (flat @ whole)).sum(0) / np.sqrt((whole**2).sum(0))
    for name, value in wanted.items():
        np.testing.assert_allclose(np.ravel(got[name][...]), value.ravel(), rtol=3e-4, atol=3e-4, err_msg=name)


@pytest.fixture(scope="module")
def decoder():
    """A decoder with NF4 kernels and DoRA, and one with LoRA alone, beside the plain one; B is not zero."""
    config = small(hidden_size=32, attention_bias=True, initializer_range=0.05)

    def built(spec, seed=0):
        def build():
            with nnx.use_eager_sharding(False):
                module = Decoder(config, nnx.Rngs(0))
                if spec is not None:
                    add_lora(module, spec, key=jax.random.key(7))
                return nnx.split(module)

        graph = None

        def state():
            nonlocal graph
            graph, values = build()
            return values

        values = jit(state)()
        return nnx.merge(graph, values)

    return {"plain": built(None), "lora": built(lora()), "qdora": built(lora(dora=True, quantization="nf4"))}


def logits(module):
    graph, state = nnx.split(module)
    return np.asarray(jit(lambda state: nnx.merge(graph, state)(jnp.asarray(IDS)))(state))


def fill(module, seed=0):
    rng = np.random.default_rng(seed)
    for p in projections(module).values():
        p.lora_b[...] = jnp.asarray(rng.normal(0, 0.1, p.lora_b[...].shape), jnp.float32)


def test_step_0_is_the_base_model_bit_by_bit(decoder):
    plain, adapted = decoder["plain"], decoder["lora"]
    np.testing.assert_array_equal(logits(plain), logits(adapted))
    base = jax.tree.leaves(nnx.to_pure_dict(nnx.state(plain, nnx.Param)))
    mine = jax.tree.leaves(plain_parameters(adapted, merged=False))
    assert [a.tobytes() for a in map(np.asarray, base)] == [b.tobytes() for b in map(np.asarray, mine)]


@pytest.mark.parametrize("kind", ["lora", "qdora"])
def test_merged_equals_unmerged_and_unmerging_gives_back_the_bits(decoder, kind):
    module = nnx.clone(decoder[kind])
    fill(module)
    before, kept = logits(module), [np.asarray(x).tobytes() for x in jax.tree.leaves(nnx.state(module))]
    merge(module)
    assert not any(p.adapter for p in projections(module).values())
    merged = logits(module)
    np.testing.assert_allclose(merged, before, rtol=0, atol=1e-6)
    assert np.abs(before - logits(decoder["plain"])).max() > 1e-2  # the adapters say something
    unmerge(module)
    assert [np.asarray(x).tobytes() for x in jax.tree.leaves(nnx.state(module))] == kept
    # The same as a plain decoder's parameters: what an export writes.
    plain_graph, plain_state = nnx.split(decoder["plain"])
    nnx.replace_by_pure_dict(plain_state, plain_parameters(module))
    np.testing.assert_allclose(
        logits(nnx.merge(plain_graph, plain_state)), merged, rtol=0, atol=1e-6 * np.abs(before).max()
    )


def test_adapters_begin_as_in_peft_and_leave_the_base_as_it_was_drawn(decoder):
    """A is uniform within 1 / sqrt(in), another one in every layer and projection; B is zero."""
    for path, p in projections(decoder["lora"]).items():
        a = np.asarray(p.lora_a[...])
        fan_in = np.prod(a.shape[1:-1])
        bound = 1 / np.sqrt(fan_in)
        assert bound * 0.8 < np.abs(a).max() <= bound, path
        assert abs(a.mean()) < bound * 4 / np.sqrt(3 * a.size)  # four standard errors
        assert np.abs(a[0] - a[1]).max() > bound / 4
        assert not np.any(p.lora_b[...])
    q, k = (np.asarray(projections(decoder["lora"])[f"layers/attention/{n}_proj"].lora_a[...]) for n in "qk")
    assert np.abs(q - k).max() > 0.05


def test_the_scale_of_rslora_is_over_the_root_of_the_rank():
    assert Lora(rank=16, alpha=8.0).scale == 0.5 and Lora(rank=16, alpha=8.0, rslora=True).scale == 2.0


def test_dropout_hangs_on_the_row_alone_and_differs_between_projections():
    p, other = projection("q", lora(dropout=0.5)), projection("q", lora(dropout=0.5))
    other.adapter = type(other.adapter)(SCALE, 0.5, 99)
    x = jnp.ones((3, 4, D))
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(3), jnp.arange(3))
    with adapter_keys(keys):
        y, z = project([p, other], x)
    order = jnp.asarray([2, 0, 1])
    with adapter_keys(keys[order]):
        np.testing.assert_array_equal(p(x[order]), y[order])
    assert np.abs(y - z).max() > 0.1 and np.abs(y[0] - y[1]).max() > 0.1
    np.testing.assert_array_equal(p(x), projection("q", lora())(x))  # no keys: evaluation
    # The mean over many masks is the value without any.
    with adapter_keys(jax.random.split(jax.random.key(4), 3000)):
        mean = np.asarray(p(jnp.ones((3000, 1, D)))).mean(0)
    np.testing.assert_allclose(mean, p(jnp.ones((1, 1, D)))[0], atol=0.25)


PATHS = [f"layers/{part}_proj" for part in ("attention/q", "attention/o", "mlp/up", "mlp/down")] + [
    "dense_layers/mlp/up_proj"
]


@pytest.mark.parametrize("targets, found", [
    (["all-linear"], PATHS),
    (["q_proj"], ["layers/attention/q_proj"]),
    (["up_proj"], ["layers/mlp/up_proj", "dense_layers/mlp/up_proj"]),
    (["layers/mlp/up_proj"], ["layers/mlp/up_proj"]),
    (["mlp.(up|down)_proj"], ["layers/mlp/up_proj", "layers/mlp/down_proj", "dense_layers/mlp/up_proj"]),
    (["layers/attention/.*", "down_proj"], [*PATHS[:2], "layers/mlp/down_proj"]),
])  # fmt: skip
def test_targets_are_names_patterns_or_all(targets, found):
    assert targeted(PATHS, targets) == sorted(found)


@pytest.mark.parametrize("spec, words", [
    (lora(targets=("c_attn",)), ["model.lora.targets: 'c_attn' matches no projection", "q_proj", "all-linear"]),
    (lora(targets=("q_proj(",)), ["model.lora.targets: 'q_proj(' is not a pattern"]),
    (lora(rank=17, targets=("k_proj",)), ["model.lora.rank: 17 is above the width of", "k_proj, 16 to 8", "8 or less"]),
])  # fmt: skip
def test_what_can_not_be_is_said_before_anything_is_computed(spec, words):
    with pytest.raises(ConfigError) as error, nnx.use_eager_sharding(False):
        nnx.eval_shape(lambda: add_lora(Decoder(small(), nnx.Rngs(0)), spec, key=jax.random.key(0)))
    assert all(word in str(error.value) for word in words) and error.value.exit_code == 64


def test_experts_are_quantised_and_have_no_adapter():
    config = small(num_experts=4, n_shared_experts=1, first_k_dense_replace=1, moe_intermediate_size=8)
    with nnx.use_eager_sharding(False):
        module = nnx.eval_shape(
            lambda: add_lora(Decoder(config, nnx.Rngs(0)), lora(quantization="nf4"), key=jax.random.key(0))
        )
    experts = module.layers.mlp.experts.up_proj
    assert isinstance(experts, QuantizedKernel)
    assert experts.codes.get_metadata()["out_sharding"] == ("layers", "expert", "embed", "mlp")
    assert experts.codes.shape == (1, 4, 8, 8) and experts.mean.shape == (1, 4, 8)
    attention = [f"attention/{name}_proj" for name in "qkvo"]
    dense = [f"mlp/{name}_proj" for name in ("gate", "up", "down")]
    wanted = [f"layers/{name}" for name in attention] + [f"dense_layers/{name}" for name in attention + dense]
    assert sorted(projections(module)) == sorted(wanted)


def test_gradients_in_fp8_are_within_the_rounding_of_both_operands():
    """Against float64: e4m3 is off by 2^-4 of a number at most, e5m2 by 2^-3, and small numbers by half their step."""
    inputs, outputs = SHAPES["q"]
    with nnx.use_eager_sharding(False):
        p = Projection(jax.random.key(0), 1.0, inputs, outputs, bias=False, dtype=jnp.float32)
    x = jax.random.normal(jax.random.key(1), (2, 16, D))
    d_y = jax.random.normal(jax.random.key(2), (2, 16, H, DH))
    graph, _ = nnx.split(p)

    def run(kernel, x):
        return nnx.merge(graph, {"kernel": kernel})(x)

    with fp8_products("emulate"):
        y, back = jax.vjp(run, p.kernel[...], x)
        d_w, d_x = back(d_y)
    w, x, d_y = (
        np.asarray(v, np.float64) for v in (p.kernel[...].reshape(D, -1), x.reshape(32, D), d_y.reshape(32, -1))
    )

    def check(got, a, b, share):
        bound = np.abs(a) @ np.abs(b) * share + 0.02
        off = np.abs(np.asarray(got).reshape(bound.shape) - a @ b)
        assert np.all(off <= bound) and off.max() > 1e-3

    check(y, x, w, (1 + 2**-4) ** 2 - 1)
    check(d_x, d_y, w.T, (1 + 2**-4) * (1 + 2**-3) - 1)
    check(d_w, x.T, d_y, (1 + 2**-4) * (1 + 2**-3) - 1)


def test_adapters_are_not_rounded_to_eight_bits():
    """y is, through its base; the gradients of A and B depend on x and on the gradient of y alone."""
    p = projection("q", lora())
    graph, adapters, rest = nnx.split(p, lambda path, _: path[-1] in ADAPTER, ...)
    x, d_y = (jax.random.normal(jax.random.key(n), shape) for n, shape in ((1, (2, 16, D)), (2, (2, 16, H, DH))))

    def run(adapters):
        return nnx.merge(graph, adapters, rest)(x)

    exact, back = jax.vjp(run, adapters)
    wanted = back(d_y)[0]
    with fp8_products("emulate"):
        y, back = jax.vjp(run, adapters)
        got = back(d_y)[0]
    assert jnp.abs(y - exact).max() > 1e-3
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
