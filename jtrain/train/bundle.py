"""Repro bundles: all that is needed to make one update again, elsewhere and later.

```
RUN/bundles/step-<k>/
  bundle.json            the update, its figures, why it is kept, state digest, versions, flags, devices; written last
  config.yaml            the run's, secrets masked
  batch.safetensors      the batch as the step got it: arrays [A, b, ...] of all devices
  checkpoints/<k - 1>/   the state before the update, like any checkpoint: sharded, verified, without pickle
```

`jtrain replay` makes the update again (`jtrain/train/replay.py`).
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
from typing import TYPE_CHECKING, Any

import jax
import jaxlib
import ml_dtypes  # noqa: F401  numpy knows bfloat16 after it
import numpy as np
import safetensors.numpy
from etils import epath
from jax.experimental import multihost_utils

import jtrain
from jtrain.checkpoint import files, peers
from jtrain.checkpoint.checkpoints import Checkpoints
from jtrain.config.export import to_yaml
from jtrain.config.rules import resolve_steps
from jtrain.config.schema import Config, DistributedConfig
from jtrain.errors import CheckpointError, JtrainError
from jtrain.redaction import redact_text
from jtrain.train.checksums import Checksums
from jtrain.train.session import random_platform

if TYPE_CHECKING:
    from jtrain.train.state import TrainState
    from jtrain.train.trainer import Trainer

log = logging.getLogger(__name__)

FOLDER = "bundles"
MANIFEST, CONFIG, BATCH = "bundle.json", "config.yaml", "batch.safetensors"
FORMAT = 1
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_DEFAULT_MATMUL_PRECISION", "NVIDIA_TF32_OVERRIDE")
"""Variables of the environment that change numbers."""


class Bundle:
    """A bundle on its way to the disk. Every process of the run makes one and calls it alike.

    Failures are told of and passed over: no run ends for its bundle.

    Args:
      trainer: the run's.
      step: the update that is kept.
      number: of the batch.

    Attributes:
      folder: where it lies; None: it could not be written.
    """

    def __init__(self, trainer: Trainer, step: int, number: int):
        self._trainer, self._step, self._number = trainer, step, number
        self.folder: epath.Path | None = epath.Path(trainer.config.run_dir) / FOLDER / f"step-{step}"
        self._digest = ""

    def write(self, state: TrainState, batch: dict[str, jax.Array]) -> None:
        """Writes the state before the update, and its batch; both stay the caller's."""
        folder, plan = self.folder, self._trainer.plan
        assert folder is not None
        checksums = Checksums(plan)
        self._digest = checksums.digest(checksums(state))
        arrays = {name: _whole(values) for name, values in batch.items()}
        with _PassingOver(self):
            if peers.index() == 0:
                files.remove_tree(folder)
                files.make_folder(folder)
        if self.folder is None:
            return
        with _PassingOver(self), Checkpoints(folder, async_save=False) as checkpoints:
            checkpoints.save(self._step - 1, state, {"batch": self._number})
        if self.folder is None:
            return
        with _PassingOver(self):
            if peers.index() == 0:
                (folder / BATCH).write_bytes(safetensors.numpy.save(arrays))
                (folder / CONFIG).write_text(to_yaml(_config(self._trainer)))

    def finish(self, figures: dict[str, Any], reason: str) -> None:
        """Writes what the update came to, and with that the bundle counts."""
        if self.folder is None:
            return
        said = json.dumps(self._description(figures, reason), indent=2)
        with _PassingOver(self):
            if peers.index() == 0:
                files.write_atomic(self.folder / MANIFEST, redact_text(said).encode())

    def _description(self, figures: dict[str, Any], reason: str) -> dict[str, Any]:
        trainer = self._trainer
        devices = trainer.mesh.devices.flat
        return {
            "format": FORMAT,
            "step": self._step,
            "batch": self._number,
            "reason": reason,
            "figures": {name: plain(figures[name]) for name in ("loss", "grad_norm")},
            "state": self._digest,
            "seed": trainer.config.seed,
            "run_dir": os.fspath(trainer.config.run_dir),
            "trainer": type(trainer).__name__,
            "task": trainer.config.task,
            "mesh": dict(trainer.mesh.shape),
            "devices": {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)},
            "processes": jax.process_count(),
            "versions": versions(),
            "flags": {name: os.environ[name] for name in FLAGS if name in os.environ},
            "random": random_platform(),
        }


class _PassingOver:
    """Turns an error of any process into a warning on all of them."""

    def __init__(self, bundle: Bundle):
        self._bundle = bundle

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if error is not None and not isinstance(error, JtrainError | OSError | ValueError | RuntimeError):
            return False
        said = next((text for text in peers.exchange("bundle", None if error is None else str(error)) if text), None)
        if said is not None:
            log.warning("no bundle in %s: %s", self._bundle.folder, said)
            self._bundle.folder = None
        return True


def _config(trainer: Trainer) -> Config:
    """The run's, with lengths in steps, and without the other processes: it builds the same step without the data."""
    config, table = trainer.config, trainer.timetable
    lengths = {
        name: resolve_steps(
            getattr(config.schedule, name),
            table.max_steps,
            tokens_per_step=table.tokens_per_step,
            steps_per_epoch=table.steps_per_epoch,
        )
        for name in ("warmup_steps", "decay_steps")
    }
    update: dict[str, Any] = {"max_steps": table.max_steps, "num_train_epochs": None}
    update |= {"distributed": DistributedConfig(), "schedule": config.schedule.model_copy(update=lengths)}
    return config.model_copy(update=update)


def versions() -> dict[str, str]:
    """What the numbers may depend on."""
    own = {"jtrain": jtrain.__version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
    return own | {"python": platform.python_version()}


def plain(value: Any) -> float | str:
    """A figure as JSON has it: numbers that are not finite as text."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


def read_bundle(folder: epath.PathLike) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The description and the batch of a bundle.

    Raises:
      CheckpointError: it is none, is not whole, or of a newer format.
    """
    path = epath.Path(folder)
    try:
        said = json.loads((path / MANIFEST).read_text())
        if said["format"] > FORMAT:
            raise CheckpointError(
                f"{path} was written by jtrain {said['versions']['jtrain']}, in a newer format", "update jtrain"
            )
        return said, safetensors.numpy.load((path / BATCH).read_bytes())
    except FileNotFoundError as error:
        remedy = "give a folder RUN/bundles/step-N"
        raise CheckpointError(
            f"{path} is no bundle: {os.path.basename(str(error.filename))} is missing", remedy
        ) from None
    except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged: {error}", "copy it again from the run") from error


def _whole(values: jax.Array) -> np.ndarray:
    """All of an array, on every process."""
    if values.is_fully_addressable:
        return np.asarray(values)
    return np.asarray(multihost_utils.process_allgather(values, tiled=True))
