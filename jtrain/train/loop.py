"""The loop: dispatch an update, read the figures of the one before, and do what is due. Do not change the order.

Step k means that k updates have been applied. Batches are numbered by use: batch i = updates + skipped steps so far, so
that data and randomness are functions of (seed, i) and a resumed run reads on where it stopped. Figures of a step are
read while the next one runs; only an evaluation, a save and the end wait for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jtrain.errors import Preempted
from jtrain.train.faults import FiniteCheck
from jtrain.train.meter import Meter
from jtrain.train.preemption import Preemption
from jtrain.train.session import Session

if TYPE_CHECKING:
    from jtrain.train.trainer import Trainer


class Loop:
    """The updates of one `fit`.

    Args:
      trainer: whose state, counters and callbacks it moves on.
      session: the open run directory.
      preemption: polled after every update.
    """

    def __init__(self, trainer: Trainer, session: Session, preemption: Preemption):
        self._trainer, self._session, self._preemption = trainer, session, preemption
        self._meter = Meter(trainer)
        scaling = trainer.program.precision.loss_scaling
        self._finite_check = FiniteCheck(trainer.config.faults, loss_scaling=scaling, emit=session.emit)
        self._figures: dict[str, Any] = {}
        self._logged = self._evaluated = trainer.counters.step

    def run(self) -> None:
        """Trains to the last step, or until a callback asks to stop.

        Raises:
          Preempted: the run was asked to leave; the step is saved.
        """
        trainer, session, counters = self._trainer, self._session, self._trainer.counters
        with trainer.train_loader() as loader:
            trainer.train_step.compile(trainer.state, self._prepared(loader[counters.batches]))
            trainer.say(f"train_step compiled in {trainer.train_step.seconds:.1f} s")
            self._meter.restart()
            in_flight: dict[str, Any] | None = None
            while not self._ends():
                running = int(in_flight is not None)
                trainer.callbacks("on_step_start", trainer, counters.step + running + 1)
                batch = loader[counters.batches + running]
                self._meter.waited(loader.last_wait_seconds)
                trainer.state, metrics = trainer.train_step(trainer.state, self._prepared(batch))
                if in_flight is not None:
                    self._retire(in_flight)
                in_flight = metrics
                if session.checkpoints is not None:
                    session.checkpoints.poll()
                preempted = self._preemption.requested(counters.batches + 1)
                # The device is waited for only when something is due once the update in flight is done.
                due = session.due(counters.step + 1) or trainer.waits_for(counters.step + 1)
                if preempted or trainer.requests or due:
                    self._retire(in_flight)
                    in_flight = None
                    self._boundary(preempted)
                    self._meter.restart()

    def _prepared(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self._trainer.prepare(batch, self._trainer.state.params, self._trainer.state.variables)

    def _retire(self, metrics: dict[str, Any]) -> None:
        """Reads the figures of an update and takes note of them."""
        trainer, counters = self._trainer, self._trainer.counters
        values = self._meter.read(metrics)
        counters.tokens += values.pop("batch_tokens")
        counters.examples += trainer.program.batch.total
        self._finite_check(counters.step, values)
        if int(metrics["step"]) == counters.step:  # skipped: no update was applied
            counters.skipped += 1
            return
        counters.step += 1
        self._figures = values
        trainer.callbacks("on_step_end", trainer, counters.step, values)
        if trainer.timetable.logs(counters.step) or "log" in trainer.requests:
            trainer.requests.discard("log")
            self._log()
        self._session.console.advance(counters.step)

    def _boundary(self, preempted: bool) -> None:
        """The device is idle: log, evaluate, save, and leave if asked to."""
        trainer, session, requests = self._trainer, self._session, self._trainer.requests
        step, last = trainer.counters.step, self._ends()
        if last or preempted:
            self._log()
        wanted = last or "evaluate" in requests or trainer.timetable.evaluates(step)
        wanted = wanted and trainer.eval_rows is not None and self._evaluated != step
        requests.discard("evaluate")
        trainer.counters.owes_evaluation = wanted and preempted  # made good at the next start
        metrics: dict[str, float] = {}
        if wanted and not preempted:
            self._evaluated = step
            metrics = trainer.evaluate()
            trainer.callbacks("on_evaluate", trainer, metrics)
            if self._ends() and not last:  # early stopping
                last = True
                self._log()
        if preempted or last or "save" in requests or session.saves(step):
            requests.discard("save")
            trainer.save(metrics)
        if preempted:
            self._leave(step)
        if "stop" in requests and not last:  # asked for by a callback of the save: what a last step owes is made good
            self._boundary(preempted)

    def _leave(self, step: int) -> None:
        self._trainer.callbacks("on_preemption", self._trainer, step)
        saved = self._session.checkpoints is not None
        self._session.wait()
        self._session.emit("preempted", {"step": step, "saved": saved})
        raise Preempted(f"preempted at step {step}" + (", saved" if saved else ", not saved"), saved=saved)

    def _log(self) -> None:
        step = self._trainer.counters.step
        if self._logged != step:  # a step has one line
            self._logged = step
            self._trainer.log("train", self._meter.record(self._figures))

    def _ends(self) -> bool:
        """Whether the step just made is the run's last, as far as is known."""
        return self._trainer.ends()
