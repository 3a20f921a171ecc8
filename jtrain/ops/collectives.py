"""Sums over manual mesh axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jtrain.ops.logical import current_mesh


def sum_over(tree: Any, axes: tuple[str, ...]) -> Any:
    """`lax.psum` of a tree over manual axes; the tree itself where there are none.

    XLA:CPU aborts on a 16-bit sum over a manual axis while other axes are automatic: there it is taken in float32.
    """
    if not axes:
        return tree
    mesh = current_mesh()
    on_cpu = mesh is not None and mesh.devices.flat[0].platform == "cpu"

    def one(x: jax.Array) -> jax.Array:
        if on_cpu and x.dtype in (jnp.bfloat16, jnp.float16):
            return jax.lax.psum(x.astype(jnp.float32), axes).astype(x.dtype)
        return jax.lax.psum(x, axes)

    return jax.tree.map(one, tree)
