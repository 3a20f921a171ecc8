"""What the tests of this folder make models and meshes with."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

from jtrain.models.config import DecoderConfig
from jtrain.models.decoder import Decoder

AXES = ("data", "fsdp", "pipeline", "context", "tensor", "expert")
RULES = {
    "batch": ("data", "fsdp"),
    "sequence": ("context",),
    "residual_sequence": ("context", "tensor"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}


jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""Compiles in a fifth of the time; what it compiles runs for microseconds here."""


def small(**changes: Any) -> DecoderConfig:
    fields: dict[str, Any] = {
        "vocab_size": 37,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
    }
    return DecoderConfig(**(fields | changes))


def born(config: DecoderConfig, seed: int = 0) -> dict[str, Any]:
    """The parameters that training starts from."""

    def init(key: jax.Array) -> dict[str, Any]:
        with nnx.use_eager_sharding(False):
            return nnx.to_pure_dict(nnx.split(Decoder(config, nnx.Rngs(params=key)))[1])

    return jit(init)(jax.random.key(seed))


def make(config: DecoderConfig, seed: int = 0) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """The model's structure, and NumPy's numbers in it: cheap, and no scale of one or bias of zero hides a mistake."""
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    leaves, tree = jax.tree.flatten(nnx.to_pure_dict(state))
    rng = np.random.default_rng(seed)
    return graph, tree.unflatten([rng.normal(0.1, 0.3, a.shape).astype(np.float32) for a in leaves])


def mesh(**sizes: int) -> Mesh:
    shape = [sizes.get(axis, 1) for axis in AXES]
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))
