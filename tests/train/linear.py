"""Linear regression: a model whose loss, gradient and update can be worked out by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jtrain.config import load_config
from jtrain.train.loss import Loss
from jtrain.train.program import Program, build_program, mesh_and_batch

WIDTH, ROWS = 3, 8


class Linear(nnx.Module):
    """y = x w + b."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (WIDTH,)))
        self.b = nnx.Param(jnp.zeros(()))

    def __call__(self, x):
        return x @ self.w[...] + self.b[...]


def squared_error(model, batch, rng):
    """Sum of squared errors over the rows whose weight is not 0."""
    error = model(batch["x"]) - batch["y"]
    return Loss(
        (batch["weight"] * error**2).sum(), batch["weight"].sum(), {"absolute": (jnp.abs(error).sum(), error.size)}
    )


def linear_program(
    accumulation: int = 1, *, loss_fn: Any = squared_error, model: Any = Linear, **config: Any
) -> Program:
    """On one device; plain gradient descent with rate 1 unless the config says otherwise."""
    tx, hook = config.pop("tx", optax.sgd(1.0)), config.pop("step_hook", None)
    fields = {"precision": "32-true", "max_steps": 10, "optimizer": {"max_grad_norm": 0.0}} | config
    fields |= {"global_batch_size": ROWS, "gradient_accumulation_steps": accumulation}
    checked, mesh, batch = mesh_and_batch(load_config(fields, env={}), jax.devices()[:1])
    return build_program(checked, model, loss_fn, mesh=mesh, batch=batch, max_steps=10, optimizer=tx, step_hook=hook)


def linear_batch(accumulation: int = 1, seed: int = 0, **changes: np.ndarray) -> dict[str, np.ndarray]:
    """[A, b, ...] arrays x, y, weight, row."""
    generator = np.random.default_rng(seed)
    rows = {
        "x": generator.normal(size=(ROWS, WIDTH)).astype(np.float32),
        "y": generator.normal(size=ROWS).astype(np.float32),
        "weight": np.ones(ROWS, np.float32),
        "row": np.arange(ROWS, dtype=np.int32),
    } | changes
    return {name: v.reshape(accumulation, ROWS // accumulation, *v.shape[1:]) for name, v in rows.items()}
