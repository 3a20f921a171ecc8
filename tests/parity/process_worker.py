"""`jtrain ARGS`, as one of several processes, with a fault.

usage: process_worker.py FAULT STEP ARGS... . FAULT is what happens before update STEP:

- `none`; `raise`: an exception; `kill`: kill -9 of this process;
- `term`: SIGTERM to this process, `wait`: nothing; with either every update takes 0.2 s;
- `dump`: the initial parameters are written beside RUN, to initial-<process>.npz: the shards that this process holds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from jtrain.cli.main import main
from jtrain.train.callbacks import Callback
from jtrain.train.trainer import Trainer


class Fault(Callback):
    def __init__(self, kind: str, step: int):
        self.kind, self.step = kind, step

    def on_fit_start(self, trainer: Trainer) -> None:
        if self.kind == "dump":
            dump(trainer)

    def on_step_start(self, trainer: Trainer, step: int) -> None:
        if self.kind in ("term", "wait"):
            time.sleep(0.2)  # jax looks for the signal once a second
        if step != self.step:
            return
        if self.kind == "raise":
            raise KeyError("the fault that the test asked for")
        if self.kind in ("kill", "term"):
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGTERM)


def dump(trainer: Trainer) -> None:
    """Every shard of every parameter as `<parameter>|<where it begins>`."""
    import jax

    shards: dict[str, Any] = {}
    for path, array in jax.tree_util.tree_leaves_with_path(trainer.state.params):
        for shard in array.addressable_shards:
            begins = ",".join(str(index.start or 0) for index in shard.index)
            shards[f"{jax.tree_util.keystr(path)}|{begins}"] = np.asarray(shard.data)
    np.savez(Path(trainer.config.run_dir).parent / f"initial-{jax.process_index()}.npz", **shards)


if __name__ == "__main__":
    fault, fit = Fault(sys.argv[1], int(sys.argv[2])), Trainer.fit

    def fit_with_fault(trainer: Trainer) -> Any:
        trainer.callbacks.callbacks.append(fault)
        return fit(trainer)

    Trainer.fit = fit_with_fault
    sys.exit(main(sys.argv[3:]))
