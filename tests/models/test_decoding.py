"""Decoding from a cache against a full forward pass for every token, for every kind of cache."""

import dataclasses
import weakref

import jax
import numpy as np
import pytest

from jtrain.models.config import DecoderConfig
from jtrain.models.decoding import Request, generate, resume
from jtrain.models.lora import Lora
from jtrain.models.rope_scaling import RopeScaling
from jtrain.ops.sampling import Sampling
from jtrain.tasks.adapters import decoder_factory
from jtrain.train.model import functional_model
from jtrain.train.step import make_forward
from tests.models.random_weights import random_model

QUICK = {"xla_backend_optimization_level": 0}
BASE = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ALTERNATE = ("sliding_attention", "full_attention")
KINDS = {
    "full": {"qk_norm": "full", "norm_position": "post", "partial_rotary_factor": 0.5},
    # as gpt-oss and SmolLM3: sinks; a layer that does not turn
    "sliding": {
        "sliding_window": 5,
        "attention_sinks": True,
        "clip_qkv": 2.0,
        "no_rope_layers": (1, 0),
        "residual_multiplier": 0.5,
    },
    # as Gemma 2 and 3: windows alternate, caps, norms before and after, a base of its own for the sliding layers
    "mixed": {
        "sliding_window": 5,
        "layer_types": ALTERNATE,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
        "norm_position": "sandwich",
        "norm_unit_offset": True,
        "qk_norm": "head",
        "rope_local_base_freq": 100.0,
        "attention_scale": 0.2,
        "embedding_multiplier": 2.0,
        "logits_scaling": 1.5,
        "tie_word_embeddings": True,
    },
    "latent": {
        "num_key_value_heads": None,
        "kv_lora_rank": 10,
        "q_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        "rope_interleave": True,
        "rope_scaling": RopeScaling(rope_type="yarn", factor=4.0, original_length=16),
    },
    "learned": {
        "position_embedding": "learned",
        "norm": "layernorm",
        "activation": "gelu",
        "attention_bias": True,
        "mlp_bias": True,
        "parallel_residual": True,
    },
    # as DeepSeek-V3 and gpt-oss together: a dense layer first, shared experts, a bias on the choice, windows
    "experts": {
        "num_hidden_layers": 3,
        "num_experts": 4,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 12,
        "scoring_func": "sigmoid",
        "score_correction_bias": True,
        "sliding_window": 5,
        "layer_types": ("full_attention", *ALTERNATE),
    },
}
SIZES, SLOTS, NEW = (3, 9, 7), 12, 9
PROMPTS = [np.random.default_rng(0).integers(0, 61, size) for size in SIZES]


def request(limit=NEW, how=None, stop=-1):
    return Request(
        start=np.asarray([SLOTS - size for size in SIZES], np.int32),
        row=np.arange(3, dtype=np.int32),
        key=jax.random.key(0),
        how=how or Sampling(),
        stop=np.asarray([stop], np.int32),
        limit=np.int32(limit),
        length=np.asarray(SIZES, np.int32) + NEW,
    )


def rows():
    ids = np.zeros((3, SLOTS), np.int32)
    for row, prompt in enumerate(PROMPTS):
        ids[row, SLOTS - len(prompt) :] = prompt
    return ids


def jitted(model, function):
    forward = make_forward(model.model, model.plan, function, compiler_options=QUICK)
    return lambda *arguments: forward(model.params, model.variables, *arguments)


def run(module, ids, ended, request, views):
    return generate(module, ids, ended, request, new_tokens=NEW, views=views)


PROGRAMS = weakref.WeakKeyDictionary()


def decoded(model, views=None, ended=(False, False, False), **asked):
    if model not in PROGRAMS:
        PROGRAMS[model] = jitted(model, run)
    return PROGRAMS[model](rows(), np.asarray(ended), request(**asked), views)


@pytest.fixture(scope="module")
def models():
    return {}


def model_of(models, kind):
    if kind not in models:
        models[kind] = random_model(DecoderConfig(**BASE | KINDS[kind]))
    return models[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_log_probabilities_are_those_of_full_forward_passes(models, kind):
    check_against_full_passes(model_of(models, kind))


@pytest.mark.grid
@pytest.mark.parametrize("more", ({}, {"dora": True}, {"quantization": "int8"}))
def test_adapters_and_quantised_kernels_take_part(more):
    """Latent attention takes the kernel of keys and values apart: with what stands beside it."""
    shape = DecoderConfig(**BASE | KINDS["latent"] | {"initializer_range": 0.4})
    base = random_model(shape)
    model = functional_model(decoder_factory(shape, Lora(rank=2, **more)))
    params, variables = model.init(jax.random.key(0))
    generator = np.random.default_rng(1)
    params = jax.tree_util.tree_map_with_path(
        lambda path, a: generator.normal(size=a.shape).astype(a.dtype) if "lora_b" in str(path) else a, params
    )
    check_against_full_passes(dataclasses.replace(base, model=model, params=params, variables=variables))


def check_against_full_passes(model):
    state = decoded(model)
    ids, logprobs = np.asarray(state.ids), np.asarray(state.logprobs)
    whole = np.zeros((3, SLOTS + NEW), np.int32)
    for row, prompt in enumerate(PROMPTS):
        whole[row, : len(prompt) + NEW] = [*prompt, *ids[row]]
    # Padding stands behind the text here, and before it in the decoder: rows must not see it in either place.
    full = jitted(model, lambda module, whole: jax.nn.log_softmax(module(whole)))(whole)
    for row, prompt in enumerate(PROMPTS):
        expected = np.asarray(full[row, len(prompt) - 1 : len(prompt) - 1 + NEW])
        assert (expected.argmax(-1) == ids[row]).all()
        np.testing.assert_allclose(logprobs[row], expected.max(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ("mixed", pytest.param("experts", marks=pytest.mark.grid)))
def test_layers_one_by_one_give_what_the_scan_gives(models, kind):
    model = model_of(models, kind)
    views = {
        name: [jax.tree.map(lambda a, at=layer: a[at], stack) for layer in range(jax.tree.leaves(stack)[0].shape[0])]
        for name, stack in model.params.items()
        if name in ("layers", "dense_layers")
    }
    one, scan = decoded(model, views), decoded(model)
    assert (np.asarray(one.ids) == np.asarray(scan.ids)).all()
    np.testing.assert_allclose(one.logprobs, scan.logprobs, atol=1e-5, rtol=0)


def test_a_sliding_layer_keeps_its_window_and_a_full_one_all(models):
    cache = decoded(model_of(models, "mixed")).cache
    (((ring, values), (whole, _)),) = cache
    assert ring.shape == values.shape == (1, 3, 2, 5, 4)
    assert whole.shape == (1, 3, 2, SLOTS + NEW, 4)


def test_a_latent_cache_keeps_rank_and_turning_channels_alone(models):
    (((latent,),),) = decoded(model_of(models, "latent")).cache
    assert latent.shape == (2, 3, 1, SLOTS + NEW, 10 + 4)


def test_a_stop_token_ends_its_row_and_the_loop_ends_with_the_last_row(models):
    model = model_of(models, "full")
    free = np.asarray(decoded(model).ids)
    stop = int(free[0, 2])
    state = decoded(model, stop=stop)
    ids = np.asarray(state.ids)
    for row, expected in zip(ids, free, strict=True):
        places = np.flatnonzero(expected == stop)
        end = int(places[0]) + 1 if len(places) else NEW
        assert (row[:end] == expected[:end]).all() and (row[end:] == -1).all()
    alone = decoded(model, ended=(False, True, True), stop=stop)
    assert alone.count == free[0].tolist().index(stop) + 1 and alone.ended.all()
    assert (np.asarray(alone.ids)[0] == ids[0]).all() and (np.asarray(alone.ids)[1:] == -1).all()


def test_a_generation_goes_on_where_it_stood(models):
    model = model_of(models, "mixed")
    how = Sampling(temperature=1.0, repetition_penalty=1.3)
    whole, part = decoded(model, how=how), decoded(model, how=how, limit=4)
    assert part.count == 4 and (np.asarray(part.ids)[:, 4:] == -1).all()
    on = jitted(model, lambda module, state, request: resume(module, state, request, prompt=SLOTS))
    rest = on(part, request(how=how))
    assert (np.asarray(rest.ids) == np.asarray(whole.ids)).all()
    np.testing.assert_allclose(rest.logprobs, whole.logprobs, atol=1e-5, rtol=0)


@pytest.mark.grid
def test_experts_with_a_capacity_drop_nothing(models):
    model = model_of(models, "experts")
    tight = random_model(model.decoder.replace(expert_capacity_factor=0.5))
    assert (np.asarray(decoded(tight).ids) == np.asarray(decoded(model).ids)).all()
