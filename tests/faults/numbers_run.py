"""`jtrain ARGS` as one process of a run whose model is a line, with bad numbers.

usage: numbers_run.py ARGS... . In the environment:

- BAD="nan@6 spike@10,11": targets of these batches that are not finite, or far too large; of one row, which one process
  holds. DROP="8:11": the data has never held these batches.
- KILL="9:2": kills itself where update 9 is to begin for the second time.
- FLIP="5": flips a bit of a parameter on this process's first device after update 5.
- SHAKY="6": the sixth run of the step gives one parameter another bit here.

All but BAD and DROP are for the process RANK (1), in the first attempt alone (ATTEMPT=1).
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from typing import Any

import jax
import numpy as np

from jtrain import tasks
from jtrain.data.arrays import as_rows
from jtrain.train.callbacks import Callback
from jtrain.train.trainer import Trainer
from tests.train.fits import BATCH, examples, squared_error
from tests.train.linear import Linear

BATCHES = 40


def data() -> dict[str, np.ndarray]:
    """The rows, with what BAD and DROP say."""
    rows = examples(BATCHES * BATCH)
    for word in os.environ.get("BAD", "").split():
        what, _, numbers = word.partition("@")
        for number in map(int, numbers.split(",")):
            last = (number + 1) * BATCH - 1  # held by the last process
            rows["y"][last] = np.nan if what == "nan" else 1e3
    if window := os.environ.get("DROP"):
        first, _, end = window.partition(":")
        rows = {name: np.delete(x, slice(int(first) * BATCH, int(end) * BATCH), 0) for name, x in rows.items()}
    return rows


def flipped(array: jax.Array) -> jax.Array:
    """With another bit on this process's first device."""
    parts = [np.array(shard.data) for shard in array.addressable_shards]
    parts[0].reshape(-1).view(np.uint32)[0] ^= np.uint32(1 << 12)
    shards = [jax.device_put(part, shard.device) for part, shard in zip(parts, array.addressable_shards, strict=True)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def with_flip(state: Any) -> Any:
    return dataclasses.replace(state, params=state.params | {"w": flipped(state.params["w"])})


class Bad(Callback):
    """What happens in the loop."""

    def __init__(self) -> None:
        step, _, time = os.environ.get("KILL", "0:0").partition(":")
        self.step, self.left = int(step), int(time)
        self.flip = int(os.environ.get("FLIP", "0"))

    def on_step_start(self, trainer: Trainer, step: int) -> None:
        self.left -= step == self.step
        if step == self.step and self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        if step == self.flip:
            trainer.state = with_flip(trainer.state)


class Shaky:
    """The compiled step of a device that computes wrong once."""

    def __init__(self, step: Any, number: int):
        self._step, self._left = step, number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def __call__(self, state: Any, batch: Any) -> Any:
        state, metrics = self._step(state, batch)
        self._left -= 1
        return (with_flip(state) if self._left == 0 else state), metrics


def build(config: Any) -> Trainer:
    mine = os.environ.get("JTRAIN_ATTEMPT", "1") == "1" and jax.process_index() == int(os.environ.get("RANK", "1"))
    callbacks = [Bad()] if mine else []
    trainer = Trainer(
        config, model=Linear, loss_fn=squared_error, train_data=as_rows(data(), seed=None), callbacks=callbacks
    )
    if mine and "SHAKY" in os.environ:
        trainer.train_step = Shaky(trainer.train_step, int(os.environ["SHAKY"]))  # type: ignore[assignment]
    return trainer


if __name__ == "__main__":
    from jtrain.cli import main

    tasks.trainer_of = lambda task: build
    sys.argv = ["jtrain", *sys.argv[1:]]
    sys.exit(main.main())
