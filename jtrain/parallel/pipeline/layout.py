"""From where a parameter is stored to where a pipeline stage needs it, and the way back for its gradient.

Stored arrays are never padded and know nothing of stages. Inside the region (manual over pipeline, data and fsdp) every
parameter is gathered over fsdp once, before the loop, and its gradient is reduce-scattered once, after it; over the
pipeline axis a parameter of the stack ends with its stage's chunks [V, K, ...], a table of the vocabulary with its
stage's part of the tokens, anything else whole. Where the stored array is not cut by stages as it is (several chunks a
stage, a number of layers or tokens that the stages do not divide) it is stored cut along another dimension, and one
all-to-all over the pipeline axis turns it round.

Legend: S stages, V chunks a stage, K layers a chunk, N layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jtrain.errors import ConfigError
from jtrain.ops.collectives import sum_over
from jtrain.ops.region import free_region

PIPELINE = "pipeline"


@dataclasses.dataclass(frozen=True)
class Division:
    """How a stack of layers is divided: chunk v of stage s is chunk v S + s of the model.

    Attributes:
      layers: N.
      stages: S.
      chunks: V.
    """

    layers: int
    stages: int
    chunks: int

    @property
    def layers_per_chunk(self) -> int:
        """K = ceil(N / (S V)): the last chunks may be padded."""
        return -(-self.layers // (self.stages * self.chunks))

    @property
    def padded(self) -> int:
        """S V K."""
        return self.stages * self.chunks * self.layers_per_chunk


def check_layers(layers: int, stages: int, chunks: int) -> None:
    """Sees that every chunk has a layer.

    Raises:
      ConfigError: more chunks than layers.
    """
    if layers >= stages * chunks:
        return
    field = f"mesh.pipeline={stages}" + (f" x pipeline.virtual_stages={chunks}" if chunks > 1 else "")
    total = f" = {stages * chunks} chunks" if chunks > 1 else " stages"
    most = max(1, layers // chunks)
    other = f" or pipeline.virtual_stages: {max(1, layers // stages)}" if chunks > 1 and layers >= stages else ""
    raise ConfigError(
        f"{field}{total}, and the stack has {layers} layers", f"write mesh.pipeline: {most}{other}, or use more layers"
    )


@dataclasses.dataclass(frozen=True)
class Layout:
    """The way of one parameter.

    Attributes:
      stored: manual mesh axes of each dimension of the stored array.
      gradient: the same for its gradient.
      free: automatic mesh axes of each dimension; they stay where they are.
      cut: the dimension that the stages divide: 0 for the stack, that of the vocabulary for a table; None: none.
      size: its length without padding.
      division: of the stack's layers; None for a parameter outside of it.
      stages: S.
      batch_axes: manual axes that divide the rows: a gradient is summed over them.
    """

    stored: tuple[tuple[str, ...], ...]
    gradient: tuple[tuple[str, ...], ...]
    free: tuple[tuple[str, ...], ...]
    cut: int | None
    size: int
    division: Division | None
    stages: int
    batch_axes: tuple[str, ...]

    def gather(self, x: jax.Array) -> jax.Array:
        """The local shard as the stage needs it: [V, K, ...] of the stack, else the array or the stage's part of it."""
        return self._by_hand(self._gather, x, 0, self.division is not None)

    def reduce(self, g: jax.Array) -> jax.Array:
        """The gradient of what `gather` gave, summed over the rows' axes, as the shard of its place."""
        return self._by_hand(self._reduce, g, self.division is not None, 0)

    def _gather(self, x: jax.Array) -> jax.Array:
        home = _dimension(self.stored)
        for dimension, axes in enumerate(self.stored):
            after = axes[axes.index(PIPELINE) + 1 :] if PIPELINE in axes else axes
            if after and (PIPELINE in axes or dimension == self.cut):
                x = lax.all_gather(x, after, axis=dimension, tiled=True)
        if self.cut is None:
            if home is not None:
                x = lax.all_gather(x, PIPELINE, axis=home, tiled=True)
        elif home != self.cut:
            x = self._ordered(x)
            x = self._part(x) if home is None else lax.all_to_all(x, PIPELINE, self.cut, home, tiled=True)
        for dimension, axes in enumerate(self.stored):
            before = axes[: axes.index(PIPELINE)] if PIPELINE in axes else axes
            if before and (PIPELINE in axes or dimension != self.cut):
                x = lax.all_gather(x, before, axis=dimension, tiled=True)
        if self.division is not None:
            x = x.reshape(self.division.chunks, self.division.layers_per_chunk, *x.shape[1:])
        return x

    def _reduce(self, g: jax.Array) -> jax.Array:
        if self.division is not None:
            g = g.reshape(-1, *g.shape[2:])
        home, used = _dimension(self.gradient), {axis for axes in self.gradient for axis in axes}
        g = sum_over(g, tuple(axis for axis in self.batch_axes if axis not in used))
        for dimension, axes in enumerate(self.gradient):
            before = axes[: axes.index(PIPELINE)] if PIPELINE in axes else axes
            if before and (PIPELINE in axes or dimension != self.cut):
                g = lax.psum_scatter(g, before, scatter_dimension=dimension, tiled=True)
        if self.cut is None:
            if home is not None:  # the same on all stages: each keeps its part
                size = g.shape[home] // self.stages
                g = lax.dynamic_slice_in_dim(g, lax.axis_index(PIPELINE) * size, size, home)
        elif home != self.cut:
            g = self._whole(g) if home is None else lax.all_to_all(g, PIPELINE, home, self.cut, tiled=True)
            g = self._unordered(g)
        for dimension, axes in enumerate(self.gradient):
            after = axes[axes.index(PIPELINE) + 1 :] if PIPELINE in axes else axes
            if after and (PIPELINE in axes or dimension == self.cut):
                g = lax.psum_scatter(g, after, scatter_dimension=dimension, tiled=True)
        return g

    def _by_hand(self, function: Callable[[jax.Array], jax.Array], x: jax.Array, lead: int, lead_out: int) -> jax.Array:
        """`function` with the automatic axes manual too, on the shard that they leave of x.

        The partitioner would gather x over them for every collective over a manual axis. It has to where such an axis
        cuts the very dimension that is padded for the stages, gathered or scattered: parts would change their order.
        """
        region = free_region()
        home = _dimension(self.stored)
        moved = {d for axes in (self.stored, self.gradient) for d, held in enumerate(axes) if set(held) - {PIPELINE}}
        moved |= {d for d in (home, self.cut) if d is not None and home != self.cut}
        if region is None or not any(self.free) or any(self.free[d] for d in moved):
            return function(x)
        spec_in, spec_out = (PartitionSpec(*[None] * n, *as_spec(self.free)) for n in (lead, lead_out))
        return region.shard_map(function, in_specs=spec_in, out_specs=spec_out)(x)

    @property
    def _padded(self) -> int:
        return -(-self.size // self.stages) * self.stages if self.division is None else self.division.padded

    def _ordered(self, x: jax.Array) -> jax.Array:
        """Pads the cut dimension and brings it into the order of the stages."""
        assert self.cut is not None
        x = jnp.pad(x, [(0, self._padded - self.size if i == self.cut else 0) for i in range(x.ndim)])
        if self.division is None or self.division.chunks == 1:
            return x
        d = self.division
        x = x.reshape(d.chunks, d.stages, d.layers_per_chunk, *x.shape[1:])
        return jnp.swapaxes(x, 0, 1).reshape(d.padded, *x.shape[3:])

    def _unordered(self, x: jax.Array) -> jax.Array:
        """The inverse of `_ordered`."""
        assert self.cut is not None
        if self.division is not None and self.division.chunks > 1:
            d = self.division
            x = x.reshape(d.stages, d.chunks, d.layers_per_chunk, *x.shape[1:])
            x = jnp.swapaxes(x, 0, 1).reshape(d.padded, *x.shape[3:])
        return lax.slice_in_dim(x, 0, self.size, axis=self.cut)

    def _part(self, x: jax.Array) -> jax.Array:
        assert self.cut is not None
        size = self._padded // self.stages
        return lax.dynamic_slice_in_dim(x, lax.axis_index(PIPELINE) * size, size, self.cut)

    def _whole(self, g: jax.Array) -> jax.Array:
        """Every stage's part in a whole array, summed over the stages."""
        assert self.cut is not None
        zeros = jnp.zeros([self._padded if i == self.cut else n for i, n in enumerate(g.shape)], g.dtype)
        start = lax.axis_index(PIPELINE) * g.shape[self.cut]
        return sum_over(lax.dynamic_update_slice_in_dim(zeros, g, start, self.cut), (PIPELINE,))


def manual_part(spec: PartitionSpec, rank: int, manual: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The manual axes of every dimension of a spec.

    Raises:
      ValueError: an automatic axis stands before a manual one. XLA would take such an array in silence and compute with
        its pieces in another order (seen with jaxlib 0.12.0.1).
    """
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    entries += [()] * (rank - len(entries))
    for entry in entries:
        held = [axis in manual for axis in entry]
        if held != sorted(held, reverse=True):
            raise ValueError(f"{spec}: an automatic axis before a manual one of {tuple(manual)}")
    return tuple(tuple(axis for axis in entry if axis in manual) for entry in entries)


def automatic_part(spec: PartitionSpec, rank: int, manual: Sequence[str], mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """The automatic axes of every dimension of a spec, without those of size 1."""
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    entries += [()] * (rank - len(entries))
    return tuple(tuple(axis for axis in entry if axis not in manual and mesh.shape[axis] > 1) for entry in entries)


def as_spec(axes: Sequence[Sequence[str]]) -> PartitionSpec:
    """The spec that `manual_part` took apart."""
    return PartitionSpec(*[tuple(entry) or None for entry in axes])


def auto_microbatches(rows: int, stages: int) -> int:
    """Micro-batches of `pipeline.microbatches: auto`: the fewest that are at least 4 S and divide the rows of a rank.

    With 4 S of them the bubble is (S - 1) / (5 S - 1) < 1/5. Fewer rows than that: one row each.
    """
    return next((m for m in range(4 * stages, rows + 1) if rows % m == 0), rows)


def _dimension(axes: Sequence[Sequence[str]]) -> int | None:
    return next((i for i, entry in enumerate(axes) if PIPELINE in entry), None)
