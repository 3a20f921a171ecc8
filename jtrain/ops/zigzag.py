"""The zig-zag order of a row's tokens, in which every device of a ring does the same work.

Under a causal mask the last tokens see much and the first ones little. A row is therefore cut into 2c chunks for c
devices, and device i holds chunks i and 2c-1-i (Brandon et al. 2023 stripe tokens to the same end; chunks keep the
blocks whole). Only the loss puts its arrays into this order, as integers, before the embedding; everything between is
done token by token, and a sum over the targets does not mind the order. Who calls the model outside `zigzag_order`
gets natural order.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

_ways: contextvars.ContextVar[int] = contextvars.ContextVar("zigzag_ways", default=1)


@contextlib.contextmanager
def zigzag_order(ways: int) -> Iterator[None]:
    """Says, while a function is traced, that rows stand in the zig-zag order of `ways` devices (1: natural order)."""
    token = _ways.set(ways)
    try:
        yield
    finally:
        _ways.reset(token)


def zigzag_ways() -> int:
    """For how many devices the rows are ordered at present; 1: they are in natural order."""
    return _ways.get()


def to_zigzag(x_BL: jax.Array, ways: int) -> jax.Array:
    """Puts arrays [B, L, ...] into the order of `ways` devices. Meant for integers: on activations it is an exchange.

    Raises:
      ValueError: 2 * ways does not divide L (`check_context_length` refuses such a config).
    """
    if ways == 1:
        return x_BL
    b, length = x_BL.shape[:2]
    if length % (2 * ways):
        raise ValueError(f"rows of {length} tokens in 2 x {ways} chunks")
    chunks = x_BL.reshape(b, 2 * ways, length // (2 * ways), *x_BL.shape[2:])
    order = np.stack([np.arange(ways), 2 * ways - 1 - np.arange(ways)], axis=1).reshape(-1)
    return chunks[:, order].reshape(x_BL.shape)


def token_index(length: int) -> jax.Array:
    """Which token of its row stands at each place [L], in the order in force."""
    place = jnp.arange(length)
    ways = zigzag_ways()
    if ways == 1:
        return place
    # By arithmetic on the place, so that every device makes its own part.
    half = length // (2 * ways)
    chunk = place // half
    device = chunk // 2
    return jnp.where(chunk % 2 == 0, device, 2 * ways - 1 - device) * half + place % half
