"""Memory that grows from step to step, noticed before it kills the run."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass

from jtrain.observe.memory import GIB

SKIPPED = 4
"""The first samples: programs are compiled, caches fill, threads start."""
SAMPLES = 16
"""Fewer say nothing."""
LEAST_BYTES = 64 * 2**20
"""Less growth than this is noise."""
_KEPT = 64


@dataclass(frozen=True)
class Trend:
    """A growth that goes on.

    Attributes:
      kind: `host` or `device` memory.
      step: of the newest sample.
      bytes_per_step: the slope.
      bytes: in use now.
      room: bytes that are left.
      full_at: the step at which nothing is left.
    """

    kind: str
    step: int
    bytes_per_step: float
    bytes: int
    room: int
    full_at: int

    def __str__(self) -> str:
        return (
            f"{self.kind} memory grows by {self.bytes_per_step / 2**20:.3g} MiB a step: {self.bytes / GIB:.2f} GiB are "
            f"in use, {self.room / GIB:.2f} GiB are left, which is used up at step {self.full_at:,}"
        )


class Growth:
    """Watches one kind of memory.

    The samples are cut into four parts. What grows steadily has a larger median in each, and grows in the second half
    at least half as fast as in the first; what fills a cache does not.

    Args:
      kind: `host` or `device`.
      max_steps: of the run; what fits until then is no matter.
    """

    def __init__(self, kind: str, max_steps: int):
        self.kind, self._max_steps = kind, max_steps
        self._samples: list[tuple[int, int]] = []
        self._skip = SKIPPED
        self._every = self._count = 1
        self._told: int | None = None

    def sample(self, step: int, used: int, room: int) -> Trend | None:
        """Takes a sample: bytes in use, and bytes that are left.

        A growth is told of once, and again whenever half of its way is gone. Memory that grows so slowly that the run
        ends before is not told of.
        """
        if self._skip:
            self._skip -= 1
            return None
        self._count += 1
        if self._count % self._every:
            return None
        self._samples.append((step, used))
        if len(self._samples) > _KEPT:  # every second one: the window is the whole run, at one cost
            self._samples = self._samples[::2]
            self._every *= 2
        trend = self._trend(step, used, room)
        if trend is None or trend.full_at >= self._max_steps:
            return None
        left = trend.full_at - step
        if self._told is not None and left > self._told / 2:
            return None
        self._told = left
        return trend

    def _trend(self, step: int, used: int, room: int) -> Trend | None:
        samples = self._samples
        if len(samples) < SAMPLES:
            return None
        quarter = len(samples) // 4
        parts = [samples[n * quarter : (n + 1) * quarter] for n in range(3)] + [samples[3 * quarter :]]
        steps = [statistics.median(step for step, _ in part) for part in parts]
        sizes = [statistics.median(size for _, size in part) for part in parts]
        rises = all(later > sooner for sooner, later in itertools.pairwise(sizes))
        if not rises or sizes[3] - sizes[0] < LEAST_BYTES:
            return None
        before, after = ((sizes[n + 1] - sizes[n]) / max(steps[n + 1] - steps[n], 1) for n in (0, 2))
        if after < before / 2:
            return None
        slope = (sizes[3] - sizes[1]) / max(steps[3] - steps[1], 1)
        return Trend(self.kind, step, slope, used, room, step + int(room / slope))
