"""Windows of attention: fixed ones, and those that a scanned layer chooses among."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


class WindowChoice(NamedTuple):
    """`sizes[index]`: a window that differs by layer inside of one scanned body.

    Attributes:
      sizes: the windows, each a number of tokens, itself included, or None for no window.
      index: which of them, int32 scalar (traced).
    """

    sizes: tuple[int | None, ...]
    index: jax.Array


Window = int | None | WindowChoice


def simplified(window: Window, length: int) -> Window:
    """The same window for rows of `length` tokens: one that reaches as far is none, and equal choices are none.

    Raises:
      ValueError: a window of no tokens, or a choice among nothing.
    """
    sizes = window.sizes if isinstance(window, WindowChoice) else (window,)
    if not sizes or any(size is not None and size < 1 for size in sizes):
        raise ValueError(f"windows {sizes}: each is None or at least one token")
    sizes = tuple(None if size is None or size >= length else size for size in sizes)
    if len(set(sizes)) == 1 or not isinstance(window, WindowChoice):
        return sizes[0]
    distinct = tuple(dict.fromkeys(sizes))
    return WindowChoice(distinct, jnp.asarray([distinct.index(size) for size in sizes], jnp.int32)[window.index])


def window_size(window: Window, length: int) -> int | jax.Array | None:
    """The size, for masks: None, a number, or a traced number (no window is then as many tokens as a row has)."""
    if not isinstance(window, WindowChoice):
        return window
    return jnp.asarray([length if size is None else size for size in window.sizes], jnp.int32)[window.index]


def over_windows(function: Callable[[int | None], T], window: Window) -> T:
    """`function(size)` for kernels that need the size while they are traced: every choice is compiled, one runs.

    On several devices this belongs inside of a region of all mesh axes: XLA can't divide what a kernel does by itself.
    """
    if not isinstance(window, WindowChoice):
        return function(window)
    return jax.lax.switch(window.index, [lambda size=size: function(size) for size in window.sizes])
