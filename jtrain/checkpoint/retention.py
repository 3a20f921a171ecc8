"""Which checkpoints stay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

Mode = Literal["min", "max"]


def best_steps(metrics: Mapping[int, float | None], keep_best: int, mode: Mode) -> list[int]:
    """The `keep_best` steps with the best metric, best first; of equal ones the earlier is better.

    Args:
      metrics: step -> metric; None (or not finite) takes no part.
    """
    sign = 1.0 if mode == "min" else -1.0
    known = [(sign * value, step) for step, value in metrics.items() if value is not None and math.isfinite(value)]
    return [step for _, step in sorted(known)[:keep_best]]


def surplus_steps(
    metrics: Mapping[int, float | None], save_total_limit: int | None, keep_best: int, mode: Mode
) -> list[int]:
    """The steps to remove, oldest first.

    The newest and the best always stay, even when they are more than `save_total_limit`; what the limit leaves beyond
    them goes to the newest of the others.
    """
    if save_total_limit is None or not metrics:
        return []
    newest_first = sorted(metrics, reverse=True)
    keep = {newest_first[0], *best_steps(metrics, keep_best, mode)}
    for step in newest_first:
        if len(keep) >= save_total_limit:
            break
        keep.add(step)
    return sorted(set(metrics) - keep)
