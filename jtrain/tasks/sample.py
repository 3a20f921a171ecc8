"""A short sampler for a look at a model in training: one full forward pass a token, no cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.ops.logical import logical_rules
from jtrain.train.program import Program
from jtrain.train.state import SAMPLE_STREAM, TrainState, stream_key


class Sampler:
    """Continues a row of tokens on the training mesh.

    Args:
      program: the run's; its model has `__call__(input_ids) -> logits`.
    """

    def __init__(self, program: Program):
        self._program = program
        self._next = jax.jit(self._next_token)

    def __call__(
        self,
        state: TrainState,
        ids: Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        stop: int | None,
        length: int,
    ) -> list[int]:
        """The new tokens, without `stop`.

        Args:
          state: whose parameters (or moving average) are used.
          ids: the prompt; its last `length` tokens are seen.
          max_new_tokens: how many at most.
          temperature: 0 takes the likeliest token.
          seed: of the draw.
          stop: token that ends the text.
          length: L, tokens of the window.
        """
        params = state.params if state.ema is None else state.ema
        window, new = list(ids)[-length:], []
        for step in range(max_new_tokens):
            row = np.zeros((1, length), np.int32)
            row[0, : len(window)] = window
            key = stream_key(seed, SAMPLE_STREAM, step)
            token = int(self._next(params, state.variables, row, len(window), key, temperature))
            if token == stop:
                break
            new.append(token)
            window = [*window, token][-length:]
        return new

    def _next_token(
        self, params: Any, variables: Any, row: jax.Array, size: jax.Array, key: jax.Array, temperature: jax.Array
    ) -> jax.Array:
        program = self._program
        with logical_rules(program.mesh, program.rules), jax.default_matmul_precision(program.precision.matmul):
            module: Any = program.model.merge(program.precision.cast(params), variables)
            module.eval()
            logits = module(row)[0, size - 1]
        drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
        return jnp.where(temperature > 0, drawn, logits.argmax())
