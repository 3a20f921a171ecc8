"""jtrain: a JAX/Flax trainer for language (and other) models on GPUs and TPUs.

Names are loaded when they are first used, so that `jtrain --help` does not wait for JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jtrain.checkpoint.checkpoints import Checkpoints
    from jtrain.config.load import load_config
    from jtrain.config.schema import Config
    from jtrain.data.loader import DataLoader
    from jtrain.errors import JtrainError
    from jtrain.ops.stack import scan_layers
    from jtrain.parallel.mesh import make_mesh
    from jtrain.tasks.contrastive import ContrastiveTrainer
    from jtrain.tasks.distill import DistillTrainer
    from jtrain.tasks.dpo import DPOTrainer
    from jtrain.tasks.dual_encoder import load_dual_encoder
    from jtrain.tasks.evaluate import evaluate
    from jtrain.tasks.exporting import export
    from jtrain.tasks.generate import Generation, generate
    from jtrain.tasks.loading import load_model
    from jtrain.tasks.pretrain import PretrainTrainer
    from jtrain.tasks.reward import RewardTrainer
    from jtrain.tasks.sft import SFTTrainer
    from jtrain.train.callbacks import Callback
    from jtrain.train.history import History
    from jtrain.train.loss import Loss, row_keys
    from jtrain.train.model import functional_model
    from jtrain.train.state import TrainState, init_state, plan_state
    from jtrain.train.step import make_train_step
    from jtrain.train.trainer import Trainer

__version__ = "0.1.0"

_WHERE = {
    "Callback": "train.callbacks",
    "Checkpoints": "checkpoint.checkpoints",
    "Config": "config.schema",
    "ContrastiveTrainer": "tasks.contrastive",
    "DPOTrainer": "tasks.dpo",
    "DataLoader": "data.loader",
    "DistillTrainer": "tasks.distill",
    "Generation": "tasks.generate",
    "History": "train.history",
    "JtrainError": "errors",
    "Loss": "train.loss",
    "PretrainTrainer": "tasks.pretrain",
    "RewardTrainer": "tasks.reward",
    "SFTTrainer": "tasks.sft",
    "TrainState": "train.state",
    "Trainer": "train.trainer",
    "evaluate": "tasks.evaluate",
    "export": "tasks.exporting",
    "functional_model": "train.model",
    "generate": "tasks.generate",
    "init_state": "train.state",
    "load_config": "config.load",
    "load_dual_encoder": "tasks.dual_encoder",
    "load_model": "tasks.loading",
    "make_mesh": "parallel.mesh",
    "make_train_step": "train.step",
    "plan_state": "train.state",
    "row_keys": "train.loss",
    "scan_layers": "ops.stack",
}

__all__ = [
    "Callback",
    "Checkpoints",
    "Config",
    "ContrastiveTrainer",
    "DPOTrainer",
    "DataLoader",
    "DistillTrainer",
    "Generation",
    "History",
    "JtrainError",
    "Loss",
    "PretrainTrainer",
    "RewardTrainer",
    "SFTTrainer",
    "TrainState",
    "Trainer",
    "evaluate",
    "export",
    "functional_model",
    "generate",
    "init_state",
    "load_config",
    "load_dual_encoder",
    "load_model",
    "make_mesh",
    "make_train_step",
    "plan_state",
    "row_keys",
    "scan_layers",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'jtrain' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jtrain.{_WHERE[name]}"), name)
