"""What a step whose numbers are not finite, or a spike, does to the run; the step has already left the state alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from jtrain.config.schema import FaultsConfig
from jtrain.errors import NumbersError
from jtrain.train.session import Counters

log = logging.getLogger(__name__)


class Diverged(NumbersError):
    """The numbers of a batch, or of many in a row, end the run, unless it can go back.

    Attributes:
      step: updates applied.
      batch: number of the batch that was one too many.
      figures: its `loss` and `grad_norm`.
      may_go_back: whether the run is to go on from an older step, where there is one.
    """

    def __init__(
        self, message: str, remedy: str, *, step: int, batch: int, figures: dict[str, Any], may_go_back: bool = True
    ):
        super().__init__(message, remedy)
        self.step, self.batch, self.figures, self.may_go_back = step, batch, figures, may_go_back


class NumbersCheck:
    """Follows the policies `faults.nonfinite` and `faults.spike`, and speaks up when a run skips batch after batch.

    Args:
      faults: the config's section.
      loss_scaling: fp16: gradients overflow now and then, and the loss scale answers; that is no fault of the run.
      emit: writes an event.
    """

    def __init__(self, faults: FaultsConfig, *, loss_scaling: bool, emit: Callable[[str, dict[str, Any]], None]):
        self._faults, self._loss_scaling, self._emit = faults, loss_scaling, emit

    def __call__(self, counters: Counters, values: dict[str, Any]) -> None:
        """Takes note of the figures of batch number `counters.batches`.

        Raises:
          Diverged: the policy says so, or too many in a row were skipped.
        """
        step, spike = counters.step, bool(values.get("spike"))
        if values["finite"] and not spike:
            counters.skips_in_a_row = 0
            return
        text = f"loss={values['loss']} grad_norm={values['grad_norm']}"
        own = {"loss": values["loss"], "grad_norm": values["grad_norm"]}
        where: dict[str, Any] = {"step": step, "batch": counters.batches, "figures": own}
        overflow = self._loss_scaling and not spike and math.isfinite(values["loss"])
        if self._faults.nonfinite == "stop" and not spike and not overflow:
            raise Diverged(
                f"update {step + 1} is not finite: {text}",
                "the state before it is kept; lower optimizer.learning_rate, or write faults.nonfinite: skip",
                may_go_back=False,
                **where,
            )
        if self._faults.nonfinite == "warn" and not spike and not overflow:
            log.warning("update %d is not finite and was applied: %s", step + 1, text)
            return
        what = "a spike" if spike else "not finite"
        counters.skips_in_a_row += 1
        log.warning("a batch after step %d was skipped: %s", step, text + (" (a spike)" if spike else ""))
        self._emit("skipped_step", {"step": step, "batch": counters.batches, "reason": what} | own)
        if spike and self._faults.spike == "rollback":
            raise Diverged(
                f"a spike after step {step}: {text}",
                "lower optimizer.learning_rate, look at the data there, or raise faults.spike_threshold",
                **where,
            )
        if counters.skips_in_a_row >= self._faults.max_consecutive_skips:
            what = "spikes" if spike else "not finite"
            raise Diverged(
                f"{counters.skips_in_a_row} batches in a row after step {step} were {what}: {text}",
                "lower optimizer.learning_rate, look at the data there, or raise faults.max_consecutive_skips",
                **where,
            )
