"""The loop: dispatch an update, read the figures of the one before, and do what is due. Do not change the order.

Step k means that k updates have been applied. Batches are numbered by use: batch i = updates + skipped steps so far, so
that data and randomness are functions of (seed, i) and a resumed run reads on where it stopped. Figures of a step are
read while the next one runs; only an evaluation, a save and the end wait for the device.

Whether to leave is asked before every update and before every batch of an evaluation: the places that all processes of
a run pass alike.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp

from jtrain.data.loader import DataLoader
from jtrain.errors import NumbersError, Preempted
from jtrain.train.bundle import Bundle
from jtrain.train.device_checks import DeviceChecks
from jtrain.train.evaluation import Interrupted
from jtrain.train.faults import Diverged, NumbersCheck
from jtrain.train.guard import Guard
from jtrain.train.meter import Meter
from jtrain.train.rollback import go_back
from jtrain.train.session import Session
from jtrain.train.spikes import awake
from jtrain.train.state import with_skipped

if TYPE_CHECKING:
    from jtrain.train.trainer import Trainer


class Loop:
    """The updates of one `fit`.

    Args:
      trainer: whose state, counters and callbacks it moves on.
      session: the open run directory.
      guard: asked whether to leave.
      resumed: whether the run goes on from a step that is durable.
    """

    def __init__(self, trainer: Trainer, session: Session, guard: Guard, *, resumed: bool):
        self._trainer, self._session, self._guard, self._resumed = trainer, session, guard, resumed
        self._meter = Meter(trainer)
        scaling = trainer.program.precision.loss_scaling
        self._check = NumbersCheck(trainer.config.faults, loss_scaling=scaling, emit=session.emit)
        self._figures: dict[str, Any] = {}
        self._device_checks = DeviceChecks(trainer, session)
        self._scale = trainer.state.loss_scale
        self._bundle: Bundle | None = None
        self._wants_figures = False
        self._begun = False
        self._logged = self._evaluated = trainer.counters.step

    def run(self) -> None:
        """Trains to the last step, or until a callback asks to stop.

        Raises:
          Preempted: the run was asked to leave; the step is saved.
          NumbersError: the numbers are bad, and the run can't go back, or not any more.
        """
        while True:
            try:
                return self._train()
            except Diverged as error:
                if (why := go_back(self._trainer, self._session, error)) is not None:
                    raise self._end(error, why) from None
                self._resumed = True
                self._logged = self._evaluated = self._trainer.counters.step

    def _train(self) -> None:
        trainer, session, counters = self._trainer, self._session, self._trainer.counters
        with trainer.train_loader() as loader:
            self._leave_out()
            batch = self._batch(loader, counters.batches)
            if self._resumed and self._guard.poll():  # now, and not when the program has been compiled
                self._leave(counters.step)
            if trainer.train_step.latest is None:
                with trainer.goodput("compile"):
                    trainer.train_step.compile(trainer.state, self._prepared(batch))
                trainer.say(f"train_step compiled in {trainer.train_step.seconds:.1f} s")
                trainer.account()
            self._meter.restart()
            in_flight: dict[str, Any] | None = None
            while not self._ends():
                running = int(in_flight is not None)
                if trainer.rollbacks.beyond(counters.batches + running) > counters.batches + running:
                    if in_flight is not None:
                        self._retire(in_flight)
                    in_flight, running = None, 0
                    self._leave_out()
                batch = self._batch(loader, counters.batches + running)
                if self._leaves():
                    if in_flight is not None:
                        self._retire(in_flight)
                    self._boundary(True)
                self._meter.waited(loader.last_wait_seconds)
                trainer.callbacks("on_step_start", trainer, counters.step + running + 1)
                prepared, began = self._prepared(batch), time.perf_counter()
                self._guard.computes()
                metrics = self._update(counters.step + running + 1, counters.batches + running, prepared)
                self._meter.dispatched(time.perf_counter() - began)
                if in_flight is not None:
                    self._retire(in_flight)
                in_flight = metrics
                if session.checkpoints is not None:
                    session.checkpoints.poll()
                # The device is waited for only when something is due once the update in flight is done.
                step = counters.step + 1
                due = session.due(step) or trainer.waits_for(step) or self._device_checks.due(step)
                due = due or step + 1 == trainer.config.faults.bundle_step
                stops = bool(trainer.requests) or due
                if stops or counters.skips_in_a_row:  # a batch that may end the run is followed by no other
                    self._retire(in_flight)
                    in_flight = None
                if stops:
                    self._boundary(False)
                    self._meter.restart()

    def evaluate(self) -> dict[str, float] | None:
        """Evaluates, or None: the run was asked to leave. What follows has to be `leave`."""
        self._trainer.interrupts = self._guard.poll
        try:
            return self._trainer.evaluate()
        except Interrupted:
            return None
        finally:
            self._trainer.interrupts = bool

    def leave(self) -> NoReturn:
        """Leaves after an evaluation that was broken off.

        Raises:
          Preempted: always.
        """
        self._leave(self._trainer.counters.step)

    def _batch(self, loader: DataLoader, number: int) -> dict[str, Any]:
        """A batch; an empty one where the run leaves before it would be used."""
        with self._trainer.goodput("data_wait"):
            return loader.get(number, lambda: self._stops_here and self._guard.is_next()) or {}

    @property
    def _stops_here(self) -> bool:
        """A new run makes one update: before that there is nothing to save."""
        return self._resumed or self._begun

    def _leaves(self) -> bool:
        """Whether to leave before the next update."""
        stops, self._begun = self._stops_here, True
        return stops and self._guard.poll()

    def _leave_out(self) -> None:
        """Goes beyond the batches that the run leaves out here."""
        number = self._trainer.counters.batches
        if (more := self._trainer.rollbacks.beyond(number) - number) > 0:
            self._trainer.leave_out(more)

    def _update(self, step: int, number: int, batch: dict[str, Any]) -> dict[str, Any]:
        """Makes update `step` with batch `number`; its metrics."""
        trainer = self._trainer
        if step == trainer.config.faults.bundle_step and self._bundle is None and not self._session.dry:
            self._bundle = Bundle(trainer, step, number)
            with trainer.goodput("save_stall"):
                self._bundle.write(trainer.state, batch)
            self._wants_figures = True
        self._scale = jax.tree.map(jnp.copy, trainer.state.loss_scale)
        if self._device_checks.replays(step):
            trainer.state, metrics = self._device_checks.step_twice(step, batch)
        else:
            trainer.state, metrics = trainer.train_step(trainer.state, batch)
        return metrics

    def _end(self, error: Diverged, why: str) -> NumbersError:
        """What ends the run; the batch that does is kept, with the state before it."""
        trainer, remedy = self._trainer, error.remedy
        if not self._session.dry:
            bundle = Bundle(trainer, error.step + 1, error.batch)
            with trainer.goodput("save_stall"), trainer.train_loader() as loader:
                state = with_skipped(trainer.state, trainer.counters.skipped)
                state = dataclasses.replace(state, loss_scale=self._scale, numbers=awake(state.numbers))
                bundle.write(state, self._prepared(loader[error.batch]))
            bundle.finish(error.figures, error.message)
            if bundle.folder is not None:
                remedy = f"{remedy}\n  jtrain replay {bundle.folder} makes that update again"
        return NumbersError(f"{error.message}{why}", remedy)

    def _prepared(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self._trainer.prepare(batch, self._trainer.state.params, self._trainer.state.variables)

    def _retire(self, metrics: dict[str, Any]) -> None:
        """Reads the figures of an update and takes note of them."""
        trainer, counters = self._trainer, self._trainer.counters
        values = self._meter.read(metrics)
        if self._wants_figures and self._bundle is not None:
            self._wants_figures = False
            self._bundle.finish(values, "faults.bundle_step")
        counters.tokens += values.pop("batch_tokens")
        counters.examples += trainer.program.batch.total
        self._check(counters, values)
        if int(metrics["step"]) == counters.step:  # skipped: no update was applied
            counters.skipped += 1
            return
        counters.step += 1
        trainer.goodput.stepped(counters.step)
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
            found = self.evaluate()
            if found is None:
                trainer.counters.owes_evaluation = preempted = True
                self._log()
            else:
                self._evaluated, metrics = step, found
                trainer.callbacks("on_evaluate", trainer, metrics)
                if self._ends() and not last:  # early stopping
                    last = True
                    self._log()
        saves = preempted or last or "save" in requests or session.saves(step)
        self._device_checks.compare_replicas(step, saves=saves)
        if saves:
            requests.discard("save")
            trainer.save(metrics)
        if preempted:
            self._leave(step)
        if "stop" in requests and not last:  # asked for by a callback of the save: what a last step owes is made good
            self._boundary(preempted)

    def _leave(self, step: int) -> NoReturn:
        self._trainer.callbacks("on_preemption", self._trainer, step)
        saved = self._session.checkpoints is not None
        self._trainer.wait()
        if saved:
            self._guard.saved()
        self._trainer.account(last=True)
        preemption = self._guard.preemption
        seconds = round(time.monotonic() - preemption.asked_at, 3)
        fields = {"step": step, "saved": saved, "reason": preemption.reason, "seconds": seconds}
        self._session.emit("preempted", fields)
        self._session.wait_for_backup(self._guard.seconds_left)
        raise Preempted(f"preempted at step {step}" + (", saved" if saved else ", not saved"), saved=saved)

    def _log(self) -> None:
        step = self._trainer.counters.step
        if self._logged != step:  # a step has one line
            self._logged = step
            self._trainer.log("train", self._meter.record(self._figures))
            self._guard.logged(step, *self._meter.pace)

    def _ends(self) -> bool:
        """Whether the step just made is the run's last, as far as is known."""
        return self._trainer.ends()
