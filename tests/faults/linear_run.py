"""`jtrain ARGS` as one process of a run whose model is a line, with a fault. All but the model is as it is.

usage: linear_run.py ARGS... . The fault is in the environment: FAULT="what@where[:number]", in the first attempt alone.

- where: `step` (before that update), `eval`, `compile`, `restore`, `save`, `data` (batch of that number), `init`;
- what: `term`, `usr1`, `kill`, `stop`: a signal to itself; `twice`: SIGTERM, and again after 1.5 s; `sleep`: for 60 s;
  `pause`: for 4 s; `leak`: 4 MiB more in every update from there on.

LIMITS="step=4,restore=6": limits of the watchdog, in seconds. SLOW: seconds that an update takes. ROOM: MiB of memory
that seem to be left at the start. FAULT_RANK: the process that has the fault; all that have the variable, by default.
LEDGER: the folder of a ledger of rows. POINT: a kill at a place of a save (`save_points.py`). LEASE: seconds. BEAT:
seconds after which jax takes a process for lost that it has not heard of (100).
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from typing import Any

import jax
import numpy as np

from jtrain import tasks
from jtrain.checkpoint import lease
from jtrain.checkpoint.checkpoints import Checkpoints
from jtrain.config import ladder
from jtrain.data.arrays import as_rows
from jtrain.observe.host_memory import host_memory
from jtrain.train import beside, watchdog
from jtrain.train.callbacks import Callback
from jtrain.train.row_ledger import RowLedger
from jtrain.train.session import Session
from jtrain.train.trainer import Trainer
from tests.faults import save_points
from tests.train.fits import BATCH, examples, squared_error
from tests.train.linear import Linear

leaked: list[Any] = []


def strike(what: str) -> None:
    """The fault itself."""
    print(f"fault: {what}", file=sys.stderr, flush=True)
    numbers = {"term": signal.SIGTERM, "usr1": signal.SIGUSR1, "kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    if what == "twice":
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep(60)
    elif what in numbers:
        os.kill(os.getpid(), numbers[what])
        time.sleep(1.0)  # long enough for all to have heard of it while this process is still here
    else:
        time.sleep({"sleep": 60.0, "pause": 4.0}[what])


class Fault(Callback):
    """What happens in the loop."""

    def __init__(self, what: str, where: str, number: int):
        self.what, self.where, self.number = what, where, number

    def on_step_start(self, trainer: Trainer, step: int) -> None:
        time.sleep(float(os.environ.get("SLOW", "0.02")))
        if self.where == "step" and self.what == "leak" and step >= self.number:
            leaked.append(np.ones(4 << 17))
        elif self.where == "step" and step == self.number:
            strike(self.what)


class Rows:
    """Rows whose reader has the fault."""

    def __init__(self, what: str, number: int):
        self._rows, self._what, self._number = as_rows(examples(), seed=None), what, number
        self._begun = False

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        if indices.min() // BATCH == self._number and not self._begun:
            self._begun = True
            strike(self._what)
        return self._rows.rows(indices)


def before(holder: Any, method: str, what: str) -> None:
    """The fault before the first call of a method."""
    original, struck = getattr(holder, method), []

    def call(*arguments: Any, **named: Any) -> Any:
        if not struck:
            struck.append(what)
            strike(what)
        return original(*arguments, **named)

    setattr(holder, method, call)


def trainer_of(task: str) -> Any:
    """In place of a task's trainer."""
    what, _, rest = os.environ.get("FAULT", "none@none").partition("@")
    where, _, number = rest.partition(":")
    rank = os.environ.get("JTRAIN_DISTRIBUTED__PROCESS_ID")
    if os.environ.get("JTRAIN_ATTEMPT", "1") != "1" or os.environ.get("FAULT_RANK", rank) != rank:
        what, where = "none", "none"

    def build(config: Any) -> Trainer:
        if where == "init":
            strike(what)
        seed = config.seed if config.data.shuffle else None
        rows = Rows(what, int(number)) if where == "data" else as_rows(examples(), seed=seed)
        fault = Fault(what, where, int(number or 0))
        trainer = Trainer(
            config, model=Linear, loss_fn=squared_error, train_data=rows, eval_data=examples(11, 1), callbacks=[fault]
        )
        if ledger := os.environ.get("LEDGER"):
            RowLedger(ledger).attach(trainer)
        if where == "compile":
            before(trainer.train_step, "compile", what)
        if where == "eval":
            prepare = trainer.prepare
            evaluated = []

            def prepare_or_strike(*arguments: Any) -> Any:
                if trainer.interrupts is not bool and not evaluated:
                    evaluated.append(what)
                    strike(what)
                return prepare(*arguments)

            trainer.prepare = prepare_or_strike  # type: ignore[method-assign]
        if where == "restore":
            before(Session, "restore", what)
        if where == "save":
            before(Checkpoints, "save", what)
        return trainer

    return build


def install() -> None:
    """Puts model, limits and fault in place."""
    tasks.trainer_of = trainer_of
    save_points.install()
    if beat := os.environ.get("BEAT"):
        join = jax.distributed.initialize
        jax.distributed.initialize = functools.partial(join, heartbeat_timeout_seconds=int(beat))
    lease.SECONDS = float(os.environ.get("LEASE", lease.SECONDS))
    if limits := os.environ.get("LIMITS"):
        given = {name: float(seconds) for name, _, seconds in (part.partition("=") for part in limits.split(","))}
        usual = ladder.limits
        ladder.limits = lambda faults: usual(faults) | given
        ladder.check = lambda config: None
        watchdog.DATA_SECONDS = 1.0
    if room := os.environ.get("ROOM"):
        begun: list[int] = []

        def memory() -> tuple[int, int]:
            used = host_memory()
            assert used is not None
            begun.append(used[0])
            return used[0], begun[0] + int(room) * 2**20 - used[0]

        beside.host_memory = memory


if __name__ == "__main__":
    from jtrain.cli import main

    install()
    sys.argv = ["jtrain", *sys.argv[1:]]
    sys.exit(main.main())
