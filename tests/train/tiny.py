"""A decoder of two layers on random rows: small enough to compile often."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jtrain.config import load_config
from jtrain.models.decoder import Decoder
from jtrain.models.presets import preset
from jtrain.tasks.pretrain import pretrain_loss
from jtrain.train.program import Program, build_program, mesh_and_batch

VOCAB, LENGTH, ROWS = 101, 32, 16
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "remat": "none",
}


def tiny_program(
    mesh: Any = None,
    *,
    devices: int = 1,
    loss_fn: Any = None,
    shape: dict[str, Any] | None = None,
    step_hook: Any = None,
    optimizer: Any = None,
    **config: Any,
) -> Program:
    """A program over the first `devices` devices; `config` are fields of the config."""
    fields = {"precision": "32-true", "max_steps": 20, "max_length": LENGTH, "global_batch_size": ROWS}
    fields |= config if mesh is None else {"mesh": mesh} | config
    checked, built, batch = mesh_and_batch(load_config(fields, env={}), jax.devices()[:devices])
    decoder = preset("llama-tiny", **SHAPE | (shape or {}))
    return build_program(
        checked,
        lambda rngs: Decoder(decoder, rngs),
        loss_fn or pretrain_loss(),
        mesh=built,
        batch=batch,
        max_steps=20,
        step_hook=step_hook,
        optimizer=optimizer,
    )


def tiny_rows(seed: int = 0, rows: int = ROWS) -> dict[str, np.ndarray]:
    """Rows of two documents each, every third with padding at its end."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, VOCAB, (rows, LENGTH)).astype(np.int32)
    segments = np.ones((rows, LENGTH), np.int32)
    segments[:, LENGTH // 2 :] = 2
    segments[::3, -5:] = 0
    labels = np.where(segments > 0, ids, -100).astype(np.int32)
    labels[:, [0, LENGTH // 2]] = -100
    positions = np.tile(np.arange(LENGTH // 2, dtype=np.int32), (rows, 2))
    return {"input_ids": ids, "labels": labels, "segment_ids": segments, "position_ids": positions}


def put(program: Program, rows: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Rows [G, ...] as a batch [A, b, ...] on the mesh, with their numbers."""
    rows = rows | {"row": np.arange(program.batch.total, dtype=np.int32)}
    spec = tuple(program.batch_sharding.spec)

    def one(values: np.ndarray) -> jax.Array:
        cut = values.reshape(program.batch.accumulation, program.batch.rows, *values.shape[1:])
        return jax.device_put(cut, NamedSharding(program.mesh, PartitionSpec(*spec)))

    return {name: one(values) for name, values in rows.items()}


def tiny_batch(program: Program, seed: int = 0) -> dict[str, jax.Array]:
    """The batch of `tiny_rows(seed)`."""
    return put(program, tiny_rows(seed, program.batch.total))
