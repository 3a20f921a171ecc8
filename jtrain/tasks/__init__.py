"""Tasks: what is particular to a kind of training (its batch, loss and metrics), thin on the one Trainer."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jtrain.config.schema import Config
    from jtrain.train.trainer import Trainer

TRAINERS = {
    "pretrain": "pretrain:PretrainTrainer",
    "sft": "sft:SFTTrainer",
    "dpo": "dpo:DPOTrainer",
    "reward": "reward:RewardTrainer",
    "distill": "distill:DistillTrainer",
    "contrastive": "contrastive:ContrastiveTrainer",
}
"""Task -> `module:class` of its trainer."""


def trainer_of(task: str) -> Any:
    """The trainer's class of a task."""
    module, _, name = TRAINERS[task].partition(":")
    return getattr(importlib.import_module(f"jtrain.tasks.{module}"), name)


def run(config: Config, *, watched: Callable[[Trainer], None] = lambda trainer: None) -> int:
    """Runs the task that the config names, to its end.

    Args:
      config: the run's.
      watched: gets the trainer before it begins.

    Returns:
      The program's exit code, 0.

    Raises:
      JtrainError: whatever ended the run early, with its exit code.
    """
    from jtrain.errors import Preempted
    from jtrain.parallel import processes
    from jtrain.train.guard import guarded
    from jtrain.train.session import check_run_dir

    with guarded(config):
        processes.start(config)
        check_run_dir(config)  # now, not when the data has been tokenised
        trainer = trainer_of(config.task)(config)
        watched(trainer)
        try:
            trainer.fit()
        except Preempted:
            processes.shutdown()  # all of them are here
            raise
        processes.shutdown()
    return 0
