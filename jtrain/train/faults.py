"""What a step whose numbers are not finite does to the run; the step itself has already left the state alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from jtrain.config.schema import FaultsConfig
from jtrain.errors import NumbersError

log = logging.getLogger(__name__)


class FiniteCheck:
    """Follows the policy `faults.nonfinite`, and ends a run that skips step after step.

    Args:
      faults: the config's section.
      loss_scaling: fp16: gradients overflow now and then, and the loss scale answers; that is no fault of the run.
      emit: writes an event.
    """

    def __init__(self, faults: FaultsConfig, *, loss_scaling: bool, emit: Callable[[str, dict[str, Any]], None]):
        self._faults, self._loss_scaling, self._emit = faults, loss_scaling, emit
        self._in_a_row = 0

    def __call__(self, step: int, values: dict[str, Any]) -> None:
        """Takes note of the figures of the batch used after update `step`.

        Raises:
          NumbersError: the policy is `stop`, or too many in a row were skipped.
        """
        if values["finite"]:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        figures = f"loss={values['loss']} grad_norm={values['grad_norm']}"
        overflow = self._loss_scaling and math.isfinite(values["loss"])
        if self._faults.nonfinite == "stop" and not overflow:
            raise NumbersError(
                f"update {step + 1} is not finite: {figures}",
                "the state before it is kept; lower optimizer.learning_rate, or write faults.nonfinite: skip",
            )
        if self._faults.nonfinite == "warn" and not overflow:
            log.warning("update %d is not finite and was applied: %s", step + 1, figures)
            return
        log.warning("a batch after step %d was skipped: %s", step, figures)
        self._emit("skipped_step", {"step": step, "loss": values["loss"], "grad_norm": values["grad_norm"]})
        if self._in_a_row >= self._faults.max_consecutive_skips:
            raise NumbersError(
                f"{self._in_a_row} batches in a row after step {step} were not finite: {figures}",
                "lower optimizer.learning_rate, look at the data there, or raise faults.max_consecutive_skips",
            )
