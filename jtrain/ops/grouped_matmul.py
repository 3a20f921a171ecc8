"""Products of many small matrices: rows that belong together are multiplied with the same kernel.

Legend: N rows, G groups, K inner, M outer dimension.

| kernel | what it is |
|---|---|
| blocks | a loop over blocks of rows of one group, as many as there are: the work of the rows. Everywhere. |
| ragged_dot | `jax.lax.ragged_dot`. TPU; elsewhere XLA multiplies all rows with every kernel: G times the work. |
| megablox | JAX's own Pallas kernel (MegaBlocks, Gale et al. 2022). TPU, sizes that are multiples of 128. |
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jtrain.errors import ConfigError
from jtrain.ops.logical import current_mesh

ExpertKernel = Literal["blocks", "ragged_dot", "megablox"]
_TILE = 128


def chosen_expert_kernel(
    kernel: Literal["auto", "blocks", "ragged_dot", "megablox"],
    *,
    platform: str,
    sizes: tuple[int, ...],
    dtype: DTypeLike,
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
        return "blocks" if platform != "tpu" else "ragged_dot" if why else "megablox"
    if kernel == "megablox" and why:
        raise ConfigError(f"model.expert_kernel: megablox: {why}", "Write model.expert_kernel: auto.")
    return kernel


def grouped_matmul(
    x_NK: jax.Array,
    kernel_GKM: jax.Array,
    sizes_G: jax.Array,
    *,
    kernel: Literal["auto", "blocks", "ragged_dot", "megablox"] = "auto",
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
    elif name == "ragged_dot":
        y_NM = jax.lax.ragged_dot(x_NK, kernel_GKM, sizes_G, preferred_element_type=x_NK.dtype)
    else:
        y_NM = _blocks(x_NK, kernel_GKM, sizes_G)
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


class _Blocks(NamedTuple):
    """Blocks of at most `rows` rows, each of one group, in the order of the rows.

    Attributes:
      rows: of a block; static.
      count: how many blocks there are.
      group: of every block.
      first: number of its first row.
      inside: how many of its rows are the group's own; those that follow are others'.
    """

    rows: int
    count: jax.Array
    group: jax.Array
    first: jax.Array
    inside: jax.Array

    @staticmethod
    def make(sizes_G: jax.Array, total: int) -> _Blocks:
        groups = sizes_G.shape[0]
        rows = min(512, max(16, 1 << (total // groups).bit_length()))
        ends_G, blocks_G = jnp.cumsum(sizes_G), -(-sizes_G // rows)
        last_G = jnp.cumsum(blocks_G)
        index = jnp.arange(total // rows + groups)
        group = jnp.minimum(jnp.searchsorted(last_G, index, side="right"), groups - 1)
        first = (ends_G - sizes_G)[group] + (index - (last_G - blocks_G)[group]) * rows
        return _Blocks(rows, last_G[-1], group, first, jnp.minimum(rows, ends_G[group] - first))

    def take(self, x_NK: jax.Array, block: jax.Array) -> jax.Array:
        """Rows of a block, the others' among them; x has `rows` more rows than there are."""
        return jax.lax.dynamic_slice_in_dim(x_NK, self.first[block], self.rows)

    def put(self, y_NM: jax.Array, block: jax.Array, y: jax.Array) -> jax.Array:
        """With the rows of a block; what it writes over others' rows, the blocks after it set right."""
        return jax.lax.dynamic_update_slice_in_dim(y_NM, y.astype(y_NM.dtype), self.first[block], 0)

    def own(self, block: jax.Array) -> jax.Array:
        return (jnp.arange(self.rows) < self.inside[block])[:, None]


@jax.custom_vjp
def _blocks(x_NK: jax.Array, kernel_GKM: jax.Array, sizes_G: jax.Array) -> jax.Array:
    blocks = _Blocks.make(sizes_G, x_NK.shape[0])
    x_NK = jnp.pad(x_NK, ((0, blocks.rows), (0, 0)))

    def one(block: jax.Array, y_NM: jax.Array) -> jax.Array:
        return blocks.put(y_NM, block, blocks.take(x_NK, block) @ kernel_GKM[blocks.group[block]])

    y_NM = jnp.zeros((x_NK.shape[0], kernel_GKM.shape[2]), x_NK.dtype)
    return jax.lax.fori_loop(0, blocks.count, one, y_NM)[: -blocks.rows]


def _blocks_forward(x_NK: jax.Array, kernel_GKM: jax.Array, sizes_G: jax.Array) -> tuple[jax.Array, Any]:
    return _blocks(x_NK, kernel_GKM, sizes_G), (x_NK, kernel_GKM, sizes_G)


def _blocks_backward(saved: Any, ct_NM: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_NK, kernel_GKM, sizes_G = saved
    blocks = _Blocks.make(sizes_G, x_NK.shape[0])
    x_NK, ct_NM = (jnp.pad(a, ((0, blocks.rows), (0, 0))) for a in (x_NK, ct_NM))
    wide = jnp.promote_types(kernel_GKM.dtype, jnp.float32)  # a kernel's gradient is a sum over many blocks

    def one(block: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        gx_NK, gk_GKM = sums
        group, ct = blocks.group[block], blocks.take(ct_NM, block)
        own = jnp.where(blocks.own(block), blocks.take(x_NK, block), 0)
        gk = jnp.einsum("nk,nm->km", own, ct, preferred_element_type=wide)
        return blocks.put(gx_NK, block, ct @ kernel_GKM[group].T), gk_GKM.at[group].add(gk)

    zeros = jnp.zeros_like(x_NK), jnp.zeros(kernel_GKM.shape, wide)
    gx_NK, gk_GKM = jax.lax.fori_loop(0, blocks.count, one, zeros)
    return gx_NK[: -blocks.rows], gk_GKM.astype(kernel_GKM.dtype), None


_blocks.defvjp(_blocks_forward, _blocks_backward)
