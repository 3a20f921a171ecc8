"""Whole runs of the linear model: fit, evaluation and saves in well under a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jtrain import Callback, Loss, Trainer
from tests.train.linear import WIDTH, Linear

BATCH = 8


def examples(count: int = 40, seed: int = 0) -> dict[str, np.ndarray]:
    """x [N, 3] and y [N] of a noisy line."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, WIDTH)).astype(np.float32)
    noise = 0.1 * generator.normal(size=count)
    return {"x": x, "y": (x @ np.asarray([1.0, -2.0, 0.5]) + 0.3 + noise).astype(np.float32)}


def squared_error(model: Any, batch: Any, rng: Any) -> Loss:
    """Sum of squared errors, and of absolute ones, over the rows that count."""
    error, weight = model(batch["x"]) - batch["y"], batch["row_weight"]
    count = weight.sum()
    return Loss((weight * error**2).sum(), count, {"absolute": ((weight * jnp.abs(error)).sum(), count)})


def settings(run_dir: Path, **changes: Any) -> dict[str, Any]:
    """A config on one device; `changes` replace fields or, given dicts, parts of sections."""
    config: dict[str, Any] = {
        "run_dir": str(run_dir),
        "max_steps": 10,
        "global_batch_size": BATCH,
        "precision": "32-true",
        "compile_cache": "",
        "accelerator": "cpu",
        "devices": 1,
        "optimizer": {"name": "sgd", "learning_rate": 0.1, "weight_decay": 0.0},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "checkpoint": {"save_steps": 0, "best": None},
        "eval": {"eval_steps": 0},
        "data": {"shuffle": False},
        "logging": {"log_every_n_steps": 4, "trackers": []},
    }
    for name, value in changes.items():
        config[name] = config[name] | value if isinstance(value, dict) and isinstance(config.get(name), dict) else value
    return config


def make(
    run_dir: Path, callbacks: Any = (), *, rows: Any = None, held_out: Any = None, module: Any = Linear, **changes: Any
) -> Trainer:
    """A Trainer; keywords that are no fields of the config go to it as they are."""
    own = {name: changes.pop(name) for name in ("compute_metrics", "predict_fn", "step_hook") if name in changes}
    loss_fn = changes.pop("loss_fn", squared_error)
    return Trainer(
        settings(run_dir, **changes),
        model=module,
        loss_fn=loss_fn,
        train_data=examples() if rows is None else rows,
        eval_data=held_out,
        callbacks=callbacks,
        **own,
    )


class Diary(Callback):
    """Writes down what is called, in order: ("step", 3), ("log", 3), ..."""

    def __init__(self):
        self.entries: list[tuple[str, int]] = []

    def on_fit_start(self, trainer):
        self.entries.append(("fit", trainer.counters.step))

    def on_step_end(self, trainer, step, metrics):
        self.entries.append(("step", step))

    def on_log(self, trainer, record):
        self.entries.append(("log", trainer.counters.step))

    def on_evaluate(self, trainer, metrics):
        self.entries.append(("evaluate", trainer.counters.step))

    def on_save(self, trainer, step):
        self.entries.append(("save", step))

    def on_exception(self, trainer, error):
        self.entries.append((type(error).__name__, trainer.counters.step))

    def on_fit_end(self, trainer):
        self.entries.append(("end", trainer.counters.step))

    def steps(self, kind: str) -> list[int]:
        return [step for name, step in self.entries if name == kind]


class Ask(Callback):
    """Calls a request of the trainer when `method` is called at `step`."""

    def __init__(self, method: str, step: int, request: str, *arguments: Any):
        self.calls = 0

        def ask(trainer: Trainer, *_: Any) -> None:
            if trainer.counters.step == step and not self.calls:
                self.calls += 1
                getattr(trainer, f"request_{request}")(*arguments)

        setattr(self, method, ask)


def checkpoints(run_dir: Path) -> list[int]:
    """Steps on disk."""
    return sorted(int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdigit())
