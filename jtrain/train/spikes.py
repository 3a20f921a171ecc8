"""What the step remembers of its numbers, to tell a spike, and to stand still once one ends the run.

A spike is an update whose loss or gradient norm lies far above the median of the last updates: further than `threshold`
robust standard deviations (1.4826 times the median distance to the median, as for normal noise; Rousseeuw and Croux
1993). Everything is decided inside the step from sums over all devices, so that all processes decide alike, and it is
part of the state, so that a resumed run decides as one that was never stopped.

The loop reads figures one step late: by then the next update has been made. After a batch that takes the run back, or
ends it, the state is `halted`: what follows is skipped, and it is still the state before that batch.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jtrain.config.schema import FaultsConfig

_LEAST_WIDTH = 0.01
"""Least standard deviation, as a share of the median: what hardly moves is no spike when it moves by a hair."""


@dataclasses.dataclass(frozen=True)
class NumbersRule:
    """What of the numbers decides about an update.

    Attributes:
      window: updates that the median is of; 0: spikes are not looked for.
      threshold: robust standard deviations above the median.
      halts_on_spike: whether a spike halts.
      halts_on_nonfinite: whether a batch that is not finite halts.
    """

    window: int = 0
    threshold: float = 8.0
    halts_on_spike: bool = False
    halts_on_nonfinite: bool = False

    @classmethod
    def of(cls, faults: FaultsConfig) -> NumbersRule:
        """The rule that a config's section asks for."""
        first = faults.max_consecutive_skips == 1  # the first batch that is skipped is one too many
        return cls(
            window=0 if faults.spike == "off" else faults.spike_window,
            threshold=faults.spike_threshold,
            halts_on_spike=faults.spike == "rollback" or (faults.spike == "skip" and first),
            halts_on_nonfinite=faults.nonfinite == "stop" or (faults.nonfinite == "skip" and first),
        )

    @property
    def remembers(self) -> bool:
        """Whether the state has to hold anything for it."""
        return self.window > 0 or self.halts_on_nonfinite


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Numbers:
    """The part of the state.

    Attributes:
      losses, norms: float32 [n], of the last n updates, update k at k mod n; None where spikes are not looked for.
      count: int32 scalar, updates that are taken into account.
      halted: whether the state stands still.
    """

    losses: jax.Array | None
    norms: jax.Array | None
    count: jax.Array
    halted: jax.Array

    @classmethod
    def begin(cls, window: int) -> Numbers:
        """Before the first update."""
        ring = jnp.zeros(window, jnp.float32) if window else None
        return cls(ring, ring, jnp.int32(0), jnp.bool_(False))

    def is_spike(self, loss: jax.Array, norm: jax.Array, threshold: float) -> jax.Array:
        """Whether these figures lie far above those of the last updates. Never before half of the window is full."""
        if self.losses is None or self.norms is None:
            return jnp.bool_(False)
        enough = 2 * self.count >= len(self.losses)
        far = [value > limit(ring, self.count, threshold) for ring, value in ((self.losses, loss), (self.norms, norm))]
        return enough & (far[0] | far[1])

    def after(self, loss: jax.Array, norm: jax.Array, taken: jax.Array, halted: jax.Array) -> Numbers:
        """With the figures of one more update, if it is `taken` into account."""
        count = self.count + taken

        def put(ring: jax.Array | None, value: jax.Array) -> jax.Array | None:
            if ring is None:
                return None
            place = self.count % len(ring)
            return ring.at[place].set(jnp.where(taken, value.astype(jnp.float32), ring[place]))

        return Numbers(put(self.losses, loss), put(self.norms, norm), count, self.halted | halted)


def limit(ring: jax.Array, count: jax.Array, threshold: float) -> jax.Array:
    """The largest value that is no spike, given the last `count` values in a ring [n]."""
    size = jnp.minimum(count, len(ring))
    median = _median(ring, size)
    width = jnp.maximum(1.4826 * _median(jnp.abs(ring - median), size), _LEAST_WIDTH * jnp.abs(median))
    return median + threshold * width


def _median(values: jax.Array, size: jax.Array) -> jax.Array:
    """The median of the first `size` values."""
    ordered = jnp.sort(jnp.where(jnp.arange(len(values)) < size, values, jnp.inf))
    return (ordered[jnp.maximum(size - 1, 0) // 2] + ordered[size // 2]) / 2


def awake(numbers: Numbers | None) -> Numbers | None:
    """As before the batch that halted it."""
    if numbers is None:
        return None
    place = numbers.halted.sharding
    return dataclasses.replace(numbers, halted=jax.make_array_from_callback((), place, lambda _: np.asarray(False)))


def complete_numbers(state: Any, window: int, place: NamedSharding) -> Any:
    """A restored state whose `numbers` may be shapes (the checkpoint has none, or of another window): begun anew."""
    if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state.numbers)):
        return state
    begin = jax.jit(lambda: Numbers.begin(window), out_shardings=place)
    return dataclasses.replace(state, numbers=begin())
