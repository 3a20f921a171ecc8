"""When things happen: the length of the run and the distances of logs, evaluations and saves, in steps."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

from jtrain.config.rules import resolve_steps
from jtrain.config.schema import Config
from jtrain.config.section import MAX_STEPS
from jtrain.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Timetable:
    """The resolved lengths of a run, in optimizer updates.

    Attributes:
      max_steps: N.
      log_every, eval_every, save_every: distances; 0 is only at the end.
      save_seconds: also saves after this time; None: never.
      tokens_per_step: places for tokens in a global batch.
      steps_per_epoch: updates of one pass over the training rows; None without data.
    """

    max_steps: int
    log_every: int
    eval_every: int
    save_every: int
    save_seconds: float | None
    tokens_per_step: int
    steps_per_epoch: Fraction | None

    @classmethod
    def of(cls, config: Config, rows_per_step: int, rows: Any) -> Timetable:
        """Resolves a config's durations.

        Args:
          config: the run's.
          rows_per_step: rows of the global batch.
          rows: the training rows, for epochs; None where there are none.

        Raises:
          ConfigError: a length in epochs without data, or one that is no length.
        """
        tokens = rows_per_step * config.max_length
        epoch = None if rows is None else Fraction(len(rows), rows_per_step)  # exact: 10 epochs of 1.1 steps are 11

        def steps(value: Any, total: int | None) -> int:
            return resolve_steps(value, total, tokens_per_step=tokens, steps_per_epoch=epoch)

        if config.fast_dev_run:
            total = int(config.fast_dev_run)
        elif config.max_steps is not None:
            total = steps(config.max_steps, None)
        else:
            total = math.ceil(Fraction(str(config.num_train_epochs or 1)) * epoch) if epoch else 1
        if total >= MAX_STEPS:
            raise ConfigError(
                f"the run has {total:,} steps, more than a counter holds", "Lower max_steps or num_train_epochs."
            )
        seconds = None if config.checkpoint.save_minutes is None else 60 * config.checkpoint.save_minutes
        return cls(
            max_steps=total,
            log_every=config.logging.log_every_n_steps,
            eval_every=steps(config.eval.eval_steps, total),
            save_every=steps(config.checkpoint.save_steps, total),
            save_seconds=seconds,
            tokens_per_step=tokens,
            steps_per_epoch=epoch,
        )

    def logs(self, step: int) -> bool:
        """Whether update `step` has a line in metrics.jsonl: the first, each multiple, the last."""
        return step in (1, self.max_steps) or step % self.log_every == 0

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation is due after update `step` (the one at the end aside)."""
        return bool(self.eval_every) and step % self.eval_every == 0

    def saves(self, step: int) -> bool:
        """Whether a save is due after update `step` (the last, and those by the clock, aside)."""
        return bool(self.save_every) and step % self.save_every == 0

    def due(self, step: int) -> bool:
        """Whether anything that needs the state waits for update `step`."""
        return step >= self.max_steps or self.evaluates(step) or self.saves(step)
