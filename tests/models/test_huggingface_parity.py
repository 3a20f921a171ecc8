"""Logits, loss and gradients of transformers 5.24 (see fixtures/README.md), with its weights carried over by hand."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jtrain.models.config import DecoderConfig, RopeScaling
from jtrain.ops.cross_entropy import cross_entropy

from .build import jit, make

FIXTURES = Path(__file__).parent / "fixtures"


def load(name: str) -> tuple[DecoderConfig, dict[str, np.ndarray], dict[str, np.ndarray]]:
    c = json.loads((FIXTURES / name / "config.json").read_text())
    rope = c["rope_parameters"]
    scaling = None
    if rope["rope_type"] == "llama3":
        scaling = RopeScaling(
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_length=rope["original_max_position_embeddings"],
        )
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = DecoderConfig(
        **{key: c[key] for key in (*same, "num_key_value_heads", "head_dim", "tie_word_embeddings")},
        norm_eps=c["rms_norm_eps"],
        rope_theta=rope["rope_theta"],
        rope_scaling=scaling,
    )
    return config, load_file(FIXTURES / name / "model.safetensors"), load_file(FIXTURES / name / "oracle.safetensors")


def carried_over(c: DecoderConfig, weights: dict[str, np.ndarray]) -> dict:
    """torch keeps kernels as [out, in]; here they are [in, heads, size] and so on, stacked over the layers."""

    def stack(name: str, *shape: int) -> np.ndarray:
        layers = [weights[f"model.layers.{n}.{name}.weight"] for n in range(c.num_hidden_layers)]
        return np.stack([w.T.reshape(shape) if shape else w for w in layers])

    d, f, h, k, s = c.hidden_size, c.intermediate_size, c.num_attention_heads, c.kv_heads, c.head_size
    return {
        "embed_tokens": {"embedding": weights["model.embed_tokens.weight"]},
        "final_norm": {"scale": weights["model.norm.weight"]},
        "lm_head": {"kernel": weights["lm_head.weight"].T},
        "layers": {
            "attention_norm": {"scale": stack("input_layernorm")},
            "mlp_norm": {"scale": stack("post_attention_layernorm")},
            "attention": {
                "q_proj": {"kernel": stack("self_attn.q_proj", d, h, s)},
                "k_proj": {"kernel": stack("self_attn.k_proj", d, k, s)},
                "v_proj": {"kernel": stack("self_attn.v_proj", d, k, s)},
                "o_proj": {"kernel": stack("self_attn.o_proj", h, s, d)},
            },
            "mlp": {
                "gate_proj": {"kernel": stack("mlp.gate_proj", d, f)},
                "up_proj": {"kernel": stack("mlp.up_proj", d, f)},
                "down_proj": {"kernel": stack("mlp.down_proj", f, d)},
            },
        },
    }


@pytest.mark.parametrize("name", ["llama", "llama31-ropescaled"])
def test_logits_loss_and_gradient_norms_equal_those_of_transformers(name):
    config, weights, oracle = load(name)
    graph, drawn = make(config)
    params = jax.tree.map(jnp.asarray, carried_over(config, weights))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, drawn)
    ids, mask, labels = (oracle[key].astype(np.int32) for key in ("input_ids", "attention_mask", "labels"))
    targets = np.concatenate([labels[:, 1:], np.full_like(labels[:, :1], -100)], axis=1)

    @jit
    def run(params):
        def loss(params):
            model = nnx.merge(graph, params)
            hidden = model.hidden(ids, segment_ids=mask)
            total, count = cross_entropy(hidden, model.head(), targets)
            return total / count

        return nnx.merge(graph, params)(ids, mask), *jax.value_and_grad(loss)(params)

    logits, loss, gradients = run(params)
    live = mask == 1
    np.testing.assert_allclose(logits[live], oracle["logits"][live], rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(loss, oracle["loss"][0], rtol=2e-6)
    layer = gradients["layers"]
    ours = {
        "lm_head.weight": gradients["lm_head"]["kernel"],
        "model.embed_tokens.weight": gradients["embed_tokens"]["embedding"],
        "model.norm.weight": gradients["final_norm"]["scale"],
    }
    for n in range(config.num_hidden_layers):
        at = f"model.layers.{n}."
        ours |= {f"{at}self_attn.{p}.weight": layer["attention"][p]["kernel"][n] for p in layer["attention"]}
        ours |= {f"{at}mlp.{p}.weight": layer["mlp"][p]["kernel"][n] for p in layer["mlp"]}
        ours[f"{at}input_layernorm.weight"] = layer["attention_norm"]["scale"][n]
        ours[f"{at}post_attention_layernorm.weight"] = layer["mlp_norm"]["scale"][n]
    theirs = {key.removeprefix("gradnorm."): value[0] for key, value in oracle.items() if key.startswith("gradnorm.")}
    assert ours.keys() == theirs.keys()
    for key, gradient in ours.items():
        np.testing.assert_allclose(jnp.linalg.norm(gradient), theirs[key], rtol=2e-5, err_msg=key)
