"""Attention across devices: the mesh that the tests trace under, and the definition they compare with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jtrain.ops.context import ContextOptions, context_options
from jtrain.ops.logical import logical_rules
from jtrain.ops.zigzag import to_zigzag, zigzag_order

AXES = ("data", "context", "tensor")
RULES = {
    "batch": ("data",),
    "sequence": ("context",),
    "residual_sequence": ("context", "tensor"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "vocab": ("tensor",),
}
CHEAP = {"xla_backend_optimization_level": 0}
"""Compiles in a fraction of the time."""


def make_mesh(data: int = 1, context: int = 1, tensor: int = 1) -> Mesh:
    devices = np.array(jax.devices()[: data * context * tensor]).reshape(data, context, tensor)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)


@contextlib.contextmanager
def across(mesh: Mesh, method: str = "ring", *, zigzag: bool = False) -> Iterator[None]:
    ways = mesh.shape["context"] if zigzag else 1
    with logical_rules(mesh, RULES), context_options(ContextOptions(method)), zigzag_order(ways):
        yield


def inputs(b: int, length: int, heads: int, kv_heads: int, size: int, dtype=np.float64):
    """q, k, v, segment ids and the cotangent of the result; documents of uneven length."""
    rng = np.random.default_rng(0)
    shapes = [(b, length, n, size) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, d = (rng.normal(0, 1, shape).astype(dtype) for shape in shapes)
    segments = np.sort(rng.integers(1, 4, (b, length)), axis=1).astype(np.int32)
    return q, k, v, segments, d


def definition(q, k, v, segments, *, causal=True, window=None, scale=None, softcap=None, sinks=None):
    """All scores at once; a sink is one more column, which is thrown away."""
    b, length, heads, size = q.shape
    k, v = (jnp.repeat(x, heads // k.shape[2], axis=2) for x in (k, v))
    distance = np.arange(length)[:, None] - np.arange(length)[None]
    seen = (distance >= 0) | (not causal)
    if window is not None:
        seen &= distance < window
    seen = seen[None, None]
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (size**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[None, :, None, None], (b, heads, length, 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1)[..., :length], v)


def with_gradients(function, *arguments):
    """The result and the gradients of all arguments but the last, which is the cotangent of the result; compiled."""

    def both(*arguments):
        out, pull = jax.vjp(function, *arguments[:-1])
        return out, *pull(arguments[-1])

    return jax.jit(both, compiler_options=CHEAP)(*arguments)


def places(length: int, ways: int) -> np.ndarray:
    """Which token stands at each place in the zig-zag order."""
    return np.asarray(to_zigzag(jnp.arange(length)[None], ways))[0]


def assert_equal(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())
