"""A short sampler for a look at a model in training: one full forward pass a token, no cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.train.program import Program
from jtrain.train.state import SAMPLE_STREAM, stream_key


class Sampler:
    """Continues a row of tokens on the training mesh.

    Args:
      program: the run's; its model has `__call__(input_ids) -> logits`.
    """

    def __init__(self, program: Program):
        self._next = program.forward(_next_token)

    def __call__(
        self,
        params: Any,
        variables: Any,
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
          params: parameters, or their moving average.
          variables: what the model keeps beside them.
          ids: the prompt; its last `length` tokens are seen.
          max_new_tokens: how many at most.
          temperature: 0 takes the likeliest token.
          seed: of the draw.
          stop: token that ends the text.
          length: L, tokens of the window.
        """
        window, new = list(ids)[-length:], []
        for step in range(max_new_tokens):
            row = np.zeros((1, length), np.int32)
            row[0, : len(window)] = window
            key = stream_key(seed, SAMPLE_STREAM, step)
            token = int(self._next(params, variables, row, len(window), key, temperature))
            if token == stop:
                break
            new.append(token)
            window = [*window, token][-length:]
        return new


def _next_token(module: Any, row: jax.Array, size: jax.Array, key: jax.Array, temperature: jax.Array) -> jax.Array:
    logits = module(row)[0, size - 1]
    drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, logits.argmax())
