"""What a run leaves in memory."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass
class History:
    """What `fit` returns: the lines of this call's metrics.jsonl.

    Attributes:
      train: one dict a logged step.
      eval: one dict an evaluation.
    """

    train: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    eval: list[dict[str, Any]] = dataclasses.field(default_factory=list)
