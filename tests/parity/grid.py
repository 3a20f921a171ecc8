"""The parity grid: one step program per case, against the same model on one device.

A case is a variant of the model, a mesh and the pipeline's section. Pipelines are compared in float64 by their
gradients, everything else in float32 by its losses over twenty steps.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jtrain.config import load_config
from jtrain.models.decoder import Decoder
from jtrain.models.presets import preset
from jtrain.models.rope_scaling import RopeScaling
from jtrain.tasks.pretrain import pretrain_loss
from jtrain.train.program import Program, build_program, mesh_and_batch

ROWS, LENGTH, STEPS = 16, 16, 20

FAST_TO_COMPILE = {"xla_backend_optimization_level": 0}
"""Machine code that runs a few steps need not be fast; the program before it is the same."""

DENSE = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "remat": "none",
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "router_aux_loss_coef": 0.01,
    "router_z_loss_coef": 0.001,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tie_word_embeddings": True, "dropout": 0.1, "remat": "full"},
    "odd": {"vocab_size": 97, "num_hidden_layers": 5, "dropout": 0.1},  # nothing divides
    "deep": {"num_hidden_layers": 7},
    "halves": {"vocab_size": 102, "num_hidden_layers": 5, "tie_word_embeddings": True},  # two divides it, four does not
    "experts": EXPERTS | {"dropout": 0.1},
    "balanced": EXPERTS
    | {
        "scoring_func": "sigmoid",
        "n_shared_experts": 1,
        "router_bias_update_rate": 0.01,
        "router_aux_loss_coef": 0.0,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 5,
        "tie_word_embeddings": True,
    },
    # Parts of the families of Hugging Face, as they come together there: Gemma, gpt-oss, DeepSeek, GPT-NeoX, OLMo 2.
    "windows": {
        "norm_position": "sandwich",
        "norm_unit_offset": True,
        "qk_norm": "head",
        "sliding_window": 5,
        "layer_types": ("sliding_attention", "sliding_attention", "full_attention", "sliding_attention"),
        "rope_local_base_freq": 100.0,
        "rope_scaling": RopeScaling(rope_type="linear", factor=8.0),
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
        "embedding_multiplier": 4.0,
        "activation": "geglu",
        "tie_word_embeddings": True,
    },
    "sinks": EXPERTS
    | {
        "attention_sinks": True,
        "attention_bias": True,
        "router_offset": True,
        "expert_bias": True,
        "activation": "swiglu_clamped",
        "sliding_window": 4,
        "layer_types": ("sliding_attention", "full_attention") * 2,
    },
    "latent": EXPERTS
    | {
        "num_key_value_heads": 4,
        "kv_lora_rank": 8,
        "q_lora_rank": 12,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "rope_interleave": True,
        "num_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "scoring_func": "sigmoid",
        "router_bias_update_rate": 0.01,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 5,
    },
    "parallel": {
        "parallel_residual": True,
        "partial_rotary_factor": 0.5,
        "norm": "layernorm",
        "activation": "gelu_exact",
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 4,
    },
    "post": {
        "norm_position": "post",
        "qk_norm": "full",
        "position_embedding": "learned",
        "clip_qkv": 1.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 0.25,
        "num_hidden_layers": 5,
        "dropout": 0.1,
    },
    "unplaced": {"no_rope_layers": (1, 1, 0, 1), "qk_norm": "head"},
}
"""Grouped key-value heads, packed rows and uneven masks in all of them."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A variant on a mesh. `pipeline` holds the section's fields, `more` further fields of the config."""

    variant: str
    mesh: str
    devices: int = 8
    pipeline: tuple[tuple[str, Any], ...] = ()
    more: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        extra = [f"{name}={value}" for name, value in (*self.pipeline, *self.more)]
        return "-".join([self.variant, self.mesh, *extra]).replace(" ", "")

    @property
    def staged(self) -> bool:
        """Whether it is a pipeline."""
        return "pipeline" in self.mesh


def program(variant: str, mesh: str = "data=1", devices: int = 1, *, precision: str, **config: Any) -> Program:
    """The step program; gradients stand among its figures."""

    def keep(gradients: Any, state: Any, metrics: dict[str, Any]) -> Any:
        return gradients, metrics | {"gradients": gradients}

    fields = {"precision": precision, "max_steps": STEPS, "max_length": LENGTH, "global_batch_size": ROWS, "mesh": mesh}
    fields |= {"optimizer": {"learning_rate": 1e-3}, "xla_options": FAST_TO_COMPILE} | config
    checked, built, batch = mesh_and_batch(load_config(fields, env={}), jax.devices()[:devices])
    shape = preset("llama-tiny", **DENSE | VARIANTS[variant])
    hook = keep if precision == "64-true" else None
    return build_program(
        checked,
        lambda rngs: Decoder(shape, rngs),
        pretrain_loss(z_loss=1e-4, label_smoothing=0.1),
        mesh=built,
        batch=batch,
        max_steps=STEPS,
        step_hook=hook,
    )


def rows(step: int, vocabulary: int) -> dict[str, np.ndarray]:
    """Packed rows: up to three documents each, prompts that do not count, padding of uneven length, one row empty."""
    generator = np.random.default_rng(step)
    ids = generator.integers(0, vocabulary, (ROWS, LENGTH)).astype(np.int32)
    segments, positions = np.zeros((2, ROWS, LENGTH), np.int32)
    labels = np.full((ROWS, LENGTH), -100, np.int32)
    for row in range(ROWS - 1):
        edges = sorted(generator.choice(np.arange(2, LENGTH + 1), size=3, replace=False))
        for number, (start, end) in enumerate(zip([0, *edges], edges, strict=False), start=1):
            segments[row, start:end], positions[row, start:end] = number, np.arange(end - start)
            labels[row, start + 1 : end] = ids[row, start + 1 : end]
    return {
        "input_ids": ids,
        "labels": labels,
        "segment_ids": segments,
        "position_ids": positions,
        "row": np.arange(ROWS, dtype=np.int32),
    }


def batch(p: Program, step: int) -> dict[str, jax.Array]:
    """The rows of a step, placed."""
    host = rows(step, 96)
    split = {name: value.reshape(p.batch.accumulation, -1, *value.shape[1:]) for name, value in host.items()}
    place = {2: p.batch_sharding.spec, 3: p.batch_sharding.spec}
    return {
        name: jax.device_put(value, NamedSharding(p.mesh, place[min(value.ndim, 3)])) for name, value in split.items()
    }


def gradients(p: Program) -> tuple[Any, float, float]:
    """(gradients, loss, evaluation loss) of the first step and of the initial parameters."""
    state = p.init()
    evaluated = float(p.eval_step(state.params, state.variables, batch(p, 7)).sum)
    _, metrics = p.train_step(state, batch(p, 1))
    return jax.tree.map(np.asarray, jax.device_get(metrics["gradients"])), float(metrics["loss"]), evaluated


def losses(p: Program) -> list[float]:
    """Losses of twenty updates."""
    state, found = p.init(), []
    for step in range(1, STEPS + 1):
        state, metrics = p.train_step(state, batch(p, step))
        found.append(float(metrics["loss"]))
    return found


@functools.cache
def one_device(variant: str, precision: str) -> Any:
    """What one device computes: gradients in float64, losses in float32."""
    p = program(variant, precision=precision)
    return gradients(p) if precision == "64-true" else losses(p)


def check(case: Case) -> None:
    """Fails where a case differs from one device.

    In float64 the gradients of a pipeline agree to 1e-10 of their largest entry; in float32 the loss agrees to 1e-6 at
    the first step and to 1e-5 at the twentieth.
    """
    config = dict(case.more) | ({"pipeline": dict(case.pipeline)} if case.pipeline else {})
    if case.staged:
        with jax.enable_x64(True):
            expected = one_device(case.variant, "64-true")
            got = gradients(program(case.variant, case.mesh, case.devices, precision="64-true", **config))
        assert abs(got[1] - expected[1]) <= 1e-10 * abs(expected[1])
        assert abs(got[2] - expected[2]) <= 1e-10 * abs(expected[2])
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got[0]), jax.tree.leaves(expected[0]), strict=True):
            assert np.abs(a - b).max() <= 1e-10 * np.abs(b).max(), jax.tree_util.keystr(path)
        return
    expected = one_device(case.variant, "32-true")
    got = losses(program(case.variant, case.mesh, case.devices, precision="32-true", **config))
    assert abs(got[0] - expected[0]) <= 1e-6 * abs(expected[0])
    assert abs(got[-1] - expected[-1]) <= 1e-5 * abs(expected[-1])


SIXTEEN = [
    Case("tied", "pipeline=2,fsdp=2,context=2,tensor=2,data=1", 16, (("microbatches", 4),)),
    Case("experts", "pipeline=2,fsdp=2,tensor=2,expert=2,data=1", 16, (("microbatches", 2),)),
    Case("dense", "data=2,fsdp=2,context=2,tensor=2", 16),
]
"""Cases of more devices than a test process has: `python -m tests.parity.grid` in a process that has them."""

if __name__ == "__main__":
    for sixteen in SIXTEEN:
        check(sixteen)
        print(sixteen, "ok", flush=True)
