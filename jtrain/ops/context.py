"""Context parallelism: the tokens of a row lie on several devices, and attention is what has to bring them together.

| method | what travels | heads | work of a device |
|---|---|---|---|
| ring | keys and values go round, queries stay (Liu et al. 2023) | any | equal under zig-zag |
| ulysses | everything, to whole rows of a few heads and back (Jacobs et al. 2023) | a multiple of `context` | equal |

This file holds what both share: the options of the run, the rule of `auto`, and the region in which the devices talk.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from jax.sharding import PartitionSpec

from jtrain.errors import ConfigError
from jtrain.ops.logical import logical_spec, mesh_axis_size, ways
from jtrain.ops.region import Region, axes_of, free_region

Method = Literal["ring", "ulysses"]

ULYSSES_LENGTH = 32_768
"""Longest row for which `auto` takes ulysses. The kernels that run on whole rows hold scores or masks of that length
(TPU's splash does not), and from here on a hop of the ring hides behind the computation of a block anyway."""


RESULT = "attention"
"""Name (`checkpoint_name`) of what a remat policy has to keep so that attention is not computed again."""


@dataclass(frozen=True)
class ContextOptions:
    """Section `context` of the config."""

    method: Literal["auto", "ring", "ulysses"] = "auto"
    layout: Literal["zigzag", "contiguous"] = "zigzag"


DEFAULT_OPTIONS = ContextOptions()

_options: contextvars.ContextVar[ContextOptions] = contextvars.ContextVar("context_options", default=DEFAULT_OPTIONS)


@contextlib.contextmanager
def context_options(options: ContextOptions) -> Iterator[None]:
    """Gives attention its options while a function is traced."""
    token = _options.set(options)
    try:
        yield
    finally:
        _options.reset(token)


def current_options() -> ContextOptions:
    """The options of the innermost `context_options`."""
    return _options.get()


def context_ways(length: int) -> int:
    """How many devices hold a row of `length` tokens together; 1 where they do not divide it."""
    return ways(length, "sequence")


def context_method(
    method: Literal["auto", "ring", "ulysses"],
    kernel: Literal["auto", "xla", "splash", "cudnn"],
    *,
    length: int,
    heads: int,
    kv_heads: int,
    context: int,
    tensor: int = 1,
) -> Method:
    """The method that attention runs.

    `auto` takes ulysses where whole query and key-value heads can be dealt out to the devices and a row has at most
    `ULYSSES_LENGTH` tokens, or where a kernel was asked for by name that needs whole rows; else the ring.

    Args:
      method: what the config says.
      kernel: attention kernel that the config says.
      length: tokens of a row.
      heads: query heads.
      kv_heads: key-value heads (repeated ones count).
      context: devices that hold a row together.
      tensor: ways that the heads are cut already.

    Raises:
      ConfigError: ulysses with heads that can't be dealt out; a kernel that can't run under the ring.
    """
    whole_rows = kernel in ("splash", "cudnn")
    if method == "ring" and whole_rows:
        raise ConfigError(
            f"model.attention is {kernel!r}, which needs whole rows, and under context.method: ring a device never "
            "has one",
            "Write model.attention: auto, or context.method: ulysses.",
        )
    divides = heads % (tensor * context) == 0
    if (method == "ulysses" or whole_rows) and not divides:
        cut = f" / {tensor} (mesh.tensor)" if tensor > 1 else ""
        local = heads // tensor
        legal = [ways for ways in range(1, local + 1) if local % ways == 0]
        nearest = min(legal, key=lambda ways: (abs(ways - context), ways))
        need = f"context.method: ulysses{f' (for model.attention: {kernel})' if method != 'ulysses' else ''}"
        raise ConfigError(
            f"{need} deals out heads: {heads} query heads{cut} = {local} over mesh.context={context} leave a remainder",
            f"Write mesh.context: {nearest} (it may be {', '.join(map(str, legal[:8]))}), or context.method: ring.",
        )
    if method == "ring":
        return "ring"
    if method == "ulysses" or whole_rows:
        return "ulysses"
    return "ulysses" if divides and kv_heads % (tensor * context) == 0 and length <= ULYSSES_LENGTH else "ring"


def balanced_ways(kernel: Literal["auto", "xla", "splash", "cudnn"], *, length: int, heads: int, kv_heads: int) -> int:
    """For how many devices a loss puts its rows into zig-zag order (`jtrain.ops.zigzag`); 1: natural order.

    Args:
      kernel: attention kernel that the config says.
      length: tokens of a row.
      heads: query heads.
      kv_heads: key-value heads (repeated ones count).
    """
    options, context = current_options(), context_ways(length)
    if context == 1 or options.layout != "zigzag":
        return 1
    tensor = mesh_axis_size("heads")
    method = context_method(
        options.method, kernel, length=length, heads=heads, kv_heads=kv_heads, context=context, tensor=tensor
    )
    return context if method == "ring" else 1


class Places(NamedTuple):
    """Where queries, keys and values lie, in the region in which their devices talk."""

    region: Region
    axes: tuple[str, ...]
    """Mesh axes that the tokens are cut over."""
    ways: int
    rows: PartitionSpec
    """Of [B, L]."""
    q: PartitionSpec
    """Of [B, L, H, Dh]."""
    kv: PartitionSpec
    """Of [B, L, K, Dh]."""


def attention_places(q_shape: Sequence[int], kv_shape: Sequence[int]) -> Places:
    """The places of arrays of these shapes, whose tokens are cut (`context_ways` > 1)."""
    region = free_region()
    assert region is not None
    rows = logical_spec(q_shape[:2], "batch", "sequence")
    q = logical_spec(q_shape, "batch", "sequence", "heads", None)
    kv = logical_spec(kv_shape, "batch", "sequence", "kv_heads", None)
    if q[2] != kv[2]:
        # A device would hold query heads without their key-value head: leave the heads whole.
        q = kv = PartitionSpec(rows[0], rows[1], None, None)
    return Places(region, axes_of(rows[1]), context_ways(q_shape[1]), rows, q, kv)
