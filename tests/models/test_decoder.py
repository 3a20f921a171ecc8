import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jtrain.models.counts import parameter_count
from jtrain.models.decoder import Decoder
from jtrain.ops.cross_entropy import cross_entropy
from jtrain.ops.logical import logical_rules

from .build import RULES, born, jit, make, mesh, small
from .oracle import decoder_logits

IDS = np.random.default_rng(0).integers(0, 37, (2, 12)).astype(np.int32)
SEGMENTS = np.array([[1] * 5 + [2] * 7, [1] * 9 + [0] * 3], np.int32)
POSITIONS = np.array([[*range(5), *range(7)], [*range(9), 0, 0, 0]], np.int32)

LLAMA = {}
GPT = {"norm": "layernorm", "activation": "gelu", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
GEGLU = {"activation": "geglu", "num_key_value_heads": 1, "head_dim": 6, "mlp_bias": True, "rope_theta": 100.0}


def logits_of(graph, params):
    model = nnx.merge(graph, params)
    hidden = model.hidden(IDS, position_ids=POSITIONS, segment_ids=SEGMENTS)
    return hidden.astype(jnp.float32) @ model.head().astype(jnp.float32)


@pytest.mark.parametrize("changes", [LLAMA, GPT, GEGLU], ids=["llama", "gpt", "geglu"])
def test_logits_equal_those_of_a_float64_numpy_decoder(changes):
    config = small(**changes)
    graph, params = make(config)
    logits = np.asarray(jit(logits_of, static_argnums=0)(graph, params))
    for row in range(2):
        expected = decoder_logits(config, params, IDS[row], POSITIONS[row], SEGMENTS[row])
        live = SEGMENTS[row] > 0
        np.testing.assert_allclose(logits[row][live], expected[live], rtol=2e-5, atol=2e-5)


def test_float64_parameters_are_computed_in_float64_throughout():
    with jax.enable_x64(True):
        config = small()
        graph, params = make(config)
        params = jax.tree.map(lambda a: a.astype(jnp.float64), params)
        logits = jit(lambda p: nnx.merge(graph, p)(IDS[:1]))(params)
        expected = decoder_logits(config, params, IDS[0], np.arange(12), np.ones(12))
        assert logits.dtype == jnp.float64
        np.testing.assert_allclose(logits[0], expected, rtol=1e-12, atol=1e-12)


def test_bfloat16_parameters_give_bfloat16_activations_and_float32_logits():
    graph, params = make(small(**GPT))
    model = nnx.merge(graph, jax.tree.map(lambda a: a.astype(jnp.bfloat16), params))
    hidden = jax.eval_shape(lambda: model.hidden(IDS))
    assert hidden.dtype == jnp.bfloat16
    assert jax.eval_shape(lambda: model(IDS)).dtype == jnp.float32
    program = str(jax.make_jaxpr(lambda: model.hidden(IDS))())
    # One product of the layer's body is float32: the attention scores.
    assert Counter(re.findall(r":(\w+)\[[\d,]*\] = dot_general", program)) == {"f32": 1, "bf16": 7}


def test_packed_documents_equal_the_same_documents_alone():
    graph, params = make(small())

    @jit
    def run(params):
        model = nnx.merge(graph, params)
        packed = model.hidden(IDS[:1], position_ids=POSITIONS[:1], segment_ids=SEGMENTS[:1])
        return packed, jnp.concatenate([model.hidden(IDS[:1, :5]), model.hidden(IDS[:1, 5:])], axis=1)

    np.testing.assert_allclose(*run(params), atol=2e-6)


def test_padding_on_the_left_changes_no_logit_of_a_token():
    graph, params = make(small())
    padded = np.concatenate([np.zeros((2, 3), np.int32), IDS], axis=1)
    mask = (np.arange(15) >= 3).astype(np.int32)[None].repeat(2, 0)
    # Rotary positions are relative: moving a row by three places changes nothing but rounding.
    model = jit(lambda p, *inputs: nnx.merge(graph, p)(*inputs))
    np.testing.assert_allclose(model(params, padded, mask)[:, 3:], model(params, IDS), atol=2e-5)


def test_the_parameter_tree_has_stacked_layers_named_axes_and_the_counted_size():
    for changes in (LLAMA, GPT, GEGLU):
        config = small(**changes)
        with nnx.use_eager_sharding(False):
            state = nnx.split(nnx.eval_shape(lambda config=config: Decoder(config, nnx.Rngs(0))))[1]
        leaves = jax.tree.leaves(state, is_leaf=lambda v: isinstance(v, nnx.Variable))
        assert sum(v.size for v in leaves) == parameter_count(config)
        assert all(len(v.out_sharding) == v.ndim for v in leaves)
        kernel = state["layers"]["attention"]["k_proj"]["kernel"]
        assert kernel.out_sharding == ("layers", "embed", "kv_heads", "head_dim")
        assert kernel.shape == (2, 16, config.kv_heads, config.head_size)
        assert state["embed_tokens"]["embedding"].out_sharding == ("vocab", "embed")


def test_more_layers_leave_the_first_ones_as_they_were_drawn():
    two, three = born(small()), born(small(num_hidden_layers=3))
    jax.tree.map(np.testing.assert_array_equal, two["layers"], jax.tree.map(lambda a: a[:2], three["layers"]))
    np.testing.assert_array_equal(two["lm_head"]["kernel"], three["lm_head"]["kernel"])
    kernel = two["layers"]["mlp"]["up_proj"]["kernel"]
    assert not np.array_equal(kernel[0], kernel[1])


def test_initial_kernels_have_the_configured_deviation_and_norms_start_at_one():
    params = born(small(hidden_size=128, intermediate_size=512, initializer_range=0.05))
    # 2 * 128 * 512 draws: the standard error of the deviation is 0.2 %.
    assert float(params["layers"]["mlp"]["up_proj"]["kernel"].std()) == pytest.approx(0.05, rel=0.01)
    assert bool((params["final_norm"]["scale"] == 1).all())


def loss_of(graph, params, rng, rows=slice(None)):
    model = nnx.merge(graph, params)
    hidden = model.hidden(
        IDS4[rows], segment_ids=SEGMENTS4[rows], rng=rng, row=np.arange(4)[rows], deterministic=rng is None
    )
    targets = np.concatenate([IDS4[rows, 1:], np.full_like(IDS4[rows, :1], -100)], axis=1)
    return cross_entropy(hidden, model.head(), targets)[0]


IDS4 = np.concatenate([IDS, IDS[:, ::-1]])
SEGMENTS4 = np.concatenate([SEGMENTS, SEGMENTS])


def test_a_mesh_with_padded_vocabulary_and_repeated_heads_changes_no_number():
    # 37 tokens and two key-value heads on four tensor ranks: both have to be stretched, with dropout on.
    graph, params = make(small(dropout=0.1))
    gradient = jax.value_and_grad(lambda p, key: loss_of(graph, p, key))
    plain = jit(gradient)(params, jax.random.key(3))

    def on_mesh(p, key):
        with logical_rules(mesh(data=2, tensor=4), RULES):
            return gradient(p, key)

    meshed = jit(on_mesh)(params, jax.random.key(3))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-4), plain, meshed)
    assert jax.tree.map(jnp.shape, meshed[1]) == jax.tree.map(jnp.shape, params)


def test_logits_on_a_mesh_have_the_true_vocabulary():
    graph, params = make(small())

    def on_mesh(p):
        with logical_rules(mesh(tensor=4), RULES):
            return nnx.merge(graph, p)(IDS)

    logits = jit(on_mesh)(params)
    assert logits.shape == (2, 12, 37)
    np.testing.assert_allclose(logits, jit(lambda p: nnx.merge(graph, p)(IDS))(params), atol=1e-4)


def test_dropout_depends_on_the_global_row_and_not_on_the_micro_batch():
    graph, params = make(small(dropout=0.3))
    run = jit(lambda p, key, rows: loss_of(graph, p, key, slice(*rows)), static_argnums=2)
    key = jax.random.key(1)
    whole = run(params, key, (0, 4))
    np.testing.assert_allclose(whole, run(params, key, (0, 2)) + run(params, key, (2, 4)), rtol=1e-6)
    assert abs(float(whole - run(params, None, (0, 4)))) > 1e-2
    assert abs(float(whole - run(params, jax.random.key(2), (0, 4)))) > 1e-2


def test_dropout_without_a_key_is_an_error():
    graph, params = make(small(dropout=0.3))
    with pytest.raises(ValueError, match="rng and row"):
        nnx.merge(graph, params).hidden(IDS, deterministic=False)


def test_the_program_does_not_grow_with_the_number_of_layers():
    def lines(layers: int) -> int:
        graph, params = make(small(num_hidden_layers=layers))
        return len(jax.jit(jax.grad(lambda p: loss_of(graph, p, None))).lower(params).as_text().splitlines())

    assert lines(16) == lines(2)
