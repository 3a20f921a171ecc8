"""Which checkpoints stay, and how the others go."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from etils import epath

from jtrain.checkpoint import files, layout

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


def remove_step(root: epath.Path, step: str) -> None:
    """Deletes a step such that a crash leaves no half of it."""
    folder = root / step
    if files.is_local(folder):
        trash = layout.unused_path(root / layout.TRASH, step)
        files.move(folder, trash)
        folder = trash
    else:  # no atomic rename there; without its manifest a step does not exist
        (folder / layout.MANIFEST).unlink(missing_ok=True)
    files.remove_tree(folder)
