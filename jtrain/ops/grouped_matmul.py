"""Products of many small matrices: rows that belong together are multiplied with the same kernel.

Legend: N rows, G groups, K inner, M outer dimension.

| kernel | what it is |
|---|---|
| ragged_dot | `jax.lax.ragged_dot`: XLA's own on GPU and TPU. On CPU every group is multiplied with all rows, masked. |
| megablox | JAX's own Pallas kernel (MegaBlocks, Gale et al. 2022). TPU, sizes that are multiples of 128. |
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jtrain.errors import ConfigError
from jtrain.ops.logical import current_mesh

ExpertKernel = Literal["ragged_dot", "megablox"]
_TILE = 128


def chosen_expert_kernel(
    kernel: Literal["auto", "ragged_dot", "megablox"], *, platform: str, sizes: tuple[int, ...], dtype: DTypeLike
) -> ExpertKernel:
    """The kernel that `auto` stands for, or the one that is asked for, if it can run.

    Args:
      kernel: auto, or a name from the table above.
      platform: cpu, gpu or tpu.
      sizes: inner and outer dimensions of the products.
      dtype: type that they are computed in.

    Raises:
      ConfigError: the kernel asked for does not run there; the message says why.
    """
    why = ""
    if platform != "tpu":
        why = f"it runs on tpu, not on {platform}"
    elif any(size % _TILE for size in sizes):
        why = f"it wants sizes that are multiples of {_TILE}, and they are {', '.join(map(str, sizes))}"
    elif jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        why = f"it knows bfloat16 and float32, not {jnp.dtype(dtype).name}"
    if kernel == "auto":
        return "ragged_dot" if why else "megablox"
    if kernel == "megablox" and why:
        raise ConfigError(f"model.expert_kernel: megablox: {why}", "Write model.expert_kernel: auto.")
    return kernel


def grouped_matmul(
    x_NK: jax.Array,
    kernel_GKM: jax.Array,
    sizes_G: jax.Array,
    *,
    kernel: Literal["auto", "ragged_dot", "megablox"] = "auto",
    interpret: bool = False,
) -> jax.Array:
    """Multiplies the first `sizes_G[0]` rows with the first kernel, the next `sizes_G[1]` with the second, and so on.

    Rows after the last group come out as zeros, and neither they nor what is given back for them reach a gradient.

    Args:
      x_NK: rows, sorted by group.
      kernel_GKM: one matrix a group.
      sizes_G: int32, rows of each group; their sum is at most N.
      kernel: which one computes it.
      interpret: runs a Pallas kernel by its definition, for tests.

    Returns:
      [N, M] in the type of x_NK.
    """
    mesh = current_mesh()
    platform = "tpu" if interpret else mesh.devices.flat[0].platform if mesh is not None else jax.default_backend()
    name = chosen_expert_kernel(kernel, platform=platform, sizes=kernel_GKM.shape[1:], dtype=x_NK.dtype)
    inside_N1 = (jnp.arange(x_NK.shape[0]) < sizes_G.sum())[:, None]
    # A kernel may leave what it does not visit as it was: both masks matter, this one for the gradient of x.
    x_NK = jnp.where(inside_N1, x_NK, 0)
    kernel_GKM = kernel_GKM.astype(x_NK.dtype)
    if name == "megablox":
        y_NM = _megablox(x_NK, kernel_GKM, sizes_G, interpret)
    else:
        y_NM = jax.lax.ragged_dot(x_NK, kernel_GKM, sizes_G, preferred_element_type=x_NK.dtype)
    return jnp.where(inside_N1, y_NM, 0)


def _megablox(x_NK: jax.Array, kernel_GKM: jax.Array, sizes_G: jax.Array, interpret: bool) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    rows, (_, inner, outer) = x_NK.shape[0], kernel_GKM.shape
    filling = -rows % _TILE
    x_NK = jnp.pad(x_NK, ((0, filling), (0, 0)))
    # Tiles as large as 512 where they divide. The backward pass swaps inner and outer, so both have the same one.
    tile = next(t for t in (512, 256, _TILE) if inner % t == 0 and outer % t == 0)
    tiling = (next(t for t in (512, 256, _TILE) if x_NK.shape[0] % t == 0), tile, tile)
    product = functools.partial(gmm, preferred_element_type=x_NK.dtype, tiling=tiling, interpret=interpret)
    return product(x_NK, kernel_GKM, sizes_G)[:rows]
