"""The Trainer: any Flax model, any loss, any mesh. `fit` is the loop; read it first.

Step k means that k updates have been applied. Batches are numbered by use: batch i = updates + skipped steps so far, so
that data and randomness are functions of (seed, i) and a resumed run reads on where it stopped. Figures of a step are
read while the next one runs; only an evaluation, a save and the end wait for the device.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from jtrain.config.load import load_config
from jtrain.config.schema import Config
from jtrain.data.arrays import as_rows
from jtrain.data.loader import DataLoader
from jtrain.errors import ConfigError, JtrainError, NumbersError, Preempted
from jtrain.parallel import processes
from jtrain.parallel.mesh import describe
from jtrain.parallel.sharding import bytes_per_device
from jtrain.train.callbacks import Callback, CallbackList, EarlyStopping
from jtrain.train.compiled import CompiledStep
from jtrain.train.evaluation import Evaluator
from jtrain.train.loss import LossFn
from jtrain.train.meter import Meter
from jtrain.train.preemption import Preemption
from jtrain.train.program import build_program, mesh_and_batch
from jtrain.train.session import Counters, Session
from jtrain.train.state import TrainState
from jtrain.train.step import StepHook
from jtrain.train.timetable import Timetable

log = logging.getLogger(__name__)


@dataclasses.dataclass
class History:
    """What `fit` returns: the lines of this call's metrics.jsonl.

    Attributes:
      train: one dict a logged step.
      eval: one dict an evaluation.
    """

    train: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    eval: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class Trainer:
    """Trains a model.

    Args:
      config: a Config, a YAML file, a recipe's name or a dict; None for the defaults.
      model: a class or function that takes `rngs` and returns a Flax NNX module, or such a module.
      loss_fn: `loss_fn(model, batch, rng) -> Loss(sum, count, metrics)`.
      train_data: a dict of arrays, a list of dicts, any random-access sequence of dicts, or rows (`jtrain.data.Rows`).
      eval_data: the same; rows past its end must count for nothing (see `as_rows`).
      optimizer: any optax chain, in place of the config's optimizer and schedule.
      callbacks: called in this order.
      compute_metrics: `sums -> dict`, further evaluation figures from name -> (sum, count).
      predict_fn: `predict_fn(model, batch) -> tree of [b, ...] arrays`, for `predict`.
      step_hook: `step_hook(gradients, state, metrics) -> (gradients, metrics)`, traced into the step.
      **sections: fields and sections of the config (`mesh="fsdp=4"`, `max_steps=100`, `optimizer={"name": "lion"}`).

    Raises:
      ConfigError: a value that can't be; before a device is used wherever that is possible.
    """

    def __init__(
        self,
        config: Config | str | dict[str, Any] | None = None,
        *,
        model: Any,
        loss_fn: LossFn,
        train_data: Any = None,
        eval_data: Any = None,
        optimizer: optax.GradientTransformation | None = None,
        callbacks: Sequence[Callback] = (),
        compute_metrics: Callable[[dict[str, tuple[float, float]]], dict[str, float]] | None = None,
        predict_fn: Callable[[Any, dict[str, jax.Array]], Any] | None = None,
        step_hook: StepHook | None = None,
        **sections: Any,
    ):
        config = load_config(config, sections)
        devices = processes.start(config)
        config, mesh, batch = mesh_and_batch(config, devices)
        self.train_rows = None if train_data is None else as_rows(train_data, seed=config.seed, shuffle=config.data.shuffle)
        self.eval_rows = None if eval_data is None else as_rows(eval_data, seed=None)
        self.timetable = Timetable.of(config, batch.total, self.train_rows)
        self.program = build_program(
            config,
            model,
            loss_fn,
            mesh=mesh,
            batch=batch,
            max_steps=self.timetable.max_steps,
            tokens_per_step=self.timetable.tokens_per_step,
            steps_per_epoch=self.timetable.steps_per_epoch,
            optimizer=optimizer,
            step_hook=step_hook,
        )
        self.config, self.mesh, self.plan = config, mesh, self.program.plan
        stopping = config.eval.early_stopping_patience
        own = (
            [EarlyStopping(config.checkpoint.best or "eval_loss", config.checkpoint.best_mode, stopping,
                           config.eval.early_stopping_threshold)]
            if stopping
            else []
        )  # fmt: skip
        self.callbacks = CallbackList([*own, *callbacks])
        self.counters = Counters()
        self.train_step = CompiledStep(self.program.train_step, "train_step")
        self._eval_step = CompiledStep(self.program.eval_step, "eval_step", once=False)
        self._compute_metrics, self._predict_fn = compute_metrics, predict_fn
        self._state: TrainState | None = None
        self._session: Session | None = None
        self._requests: set[str] = set()
        self.history = History()

    # ------------------------------------------------------------------------------------------------ the loop

    def fit(self) -> History:
        """Trains up to `max_steps` updates; goes on from the newest checkpoint of `run_dir` where there is one.

        Raises:
          JtrainError: whatever ends the run early, with its exit code; the newest checkpoint stays.
        """
        if self.train_rows is None:
            raise ConfigError("train_data is missing", "pass train_data, or name files in data.train")
        total = self.timetable.max_steps
        with self._open_session(total) as session, Preemption() as preemption:
            self._restore_or_init(session)
            if self.counters.step >= total:
                session.console.message(f"max_steps={total} is already reached (step {self.counters.step}): nothing to do")
                return self.history
            try:
                self.callbacks("on_fit_start", self)
                self._loop(session, preemption, total)
                self.callbacks("on_fit_end", self)
            except BaseException as error:
                self.callbacks("on_exception", self, error)
                session.emit("end", {"step": self.counters.step, "error": f"{type(error).__name__}: {error}"})
                raise
            session.emit("end", {"step": self.counters.step})
        return self.history

    def _loop(self, session: Session, preemption: Preemption, total: int) -> None:
        with self._loader(total + self.counters.skipped) as loader:
            self._compile(loader)
            meter = Meter(self)
            in_flight: dict[str, Any] | None = None
            while self.counters.step < total and "stop" not in self._requests:
                update = self.counters.step + (in_flight is not None) + 1  # if the one in flight is not skipped
                self.callbacks("on_step_start", self, update)
                batch = loader[self.counters.step + self.counters.skipped + (in_flight is not None)]
                meter.waited(loader.last_wait_seconds)
                self._state, metrics = self.train_step(self.state, batch)
                if in_flight is not None:
                    self._retire(in_flight, meter, total)
                in_flight = metrics
                if session.checkpoints is not None:
                    session.checkpoints.poll()
                preempted = preemption.requested(self.counters.step + self.counters.skipped + 1)
                # Nothing below waits for the device unless something is due once this update is done.
                if preempted or self._requests or self.timetable.due(self.counters.step + 1, session.last_save):
                    self._retire(in_flight, meter, total)
                    in_flight = None
                    self._boundary(session, total, preempted)
                    meter.restart()

    def _retire(self, metrics: dict[str, Any], meter: Meter, total: int) -> None:
        """Reads the figures of an update and takes note of them."""
        values = meter.read(metrics)
        counters = self.counters
        counters.tokens += values.pop("batch_tokens")
        counters.examples += self.program.batch.total
        if not values["finite"]:
            self._not_finite(values)
        if int(metrics["step"]) == counters.step:  # skipped: no update was applied
            counters.skipped += 1
            return
        counters.step += 1
        self._bad_in_a_row = 0
        self.callbacks("on_step_end", self, counters.step, values)
        if self.timetable.logs(counters.step) or "log" in self._requests:
            self._requests.discard("log")
            self._log("train", meter.record(values))
        if self._session is not None:
            self._session.console.advance(counters.step)

    def _not_finite(self, values: dict[str, Any]) -> None:
        faults, counters = self.config.faults, self.counters
        figures = f"loss={values['loss']} grad_norm={values['grad_norm']}"
        self._bad_in_a_row += 1
        overflow = self.program.precision.loss_scaling and values["loss"] == values["loss"]
        if faults.nonfinite == "stop" and not overflow:
            raise NumbersError(
                f"the update after step {counters.step} is not finite: {figures}",
                "the state before it is kept; lower optimizer.learning_rate, or write faults.nonfinite: skip",
            )
        if faults.nonfinite == "warn":
            log.warning("update %d is not finite (%s) and was applied", counters.step + 1, figures)
            return
        log.warning("a step after %d was skipped: %s", counters.step, figures)
        self._emit("skipped_step", {"step": counters.step, "skipped": counters.skipped + 1} | values)
        if self._bad_in_a_row > faults.max_consecutive_skips:
            raise NumbersError(
                f"{self._bad_in_a_row} steps in a row after step {counters.step} were not finite: {figures}",
                "lower optimizer.learning_rate, look at the data there, or raise faults.max_consecutive_skips",
            )

    def _boundary(self, session: Session, total: int, preempted: bool) -> None:
        """The device is idle: evaluate, then save, then leave if asked to."""
        step, last = self.counters.step, self.counters.step >= total or "stop" in self._requests
        evaluated: dict[str, float] = {}
        if not preempted and self.eval_rows is not None and (last or self._due("evaluate", self.timetable.evaluates(step))):
            evaluated = self.evaluate()
            self.callbacks("on_evaluate", self, evaluated)
            last = last or "stop" in self._requests
        if preempted or last or self._due("save", self.timetable.saves(step, session.last_save)):
            self._save(session, evaluated)
        self._requests -= {"evaluate", "save"}
        if preempted:
            self.callbacks("on_preemption", self, step)
            saved = session.checkpoints is not None
            if saved:
                session.checkpoints.wait()
            self._emit("preempted", {"step": step, "saved": saved})
            raise Preempted(f"preempted at step {step}" + (", saved" if saved else ", not saved"), saved=saved)

    # ------------------------------------------------------------------------------------------------ its verbs

    @property
    def state(self) -> TrainState:
        """The state on the devices; drawn when it is first asked for."""
        if self._state is None:
            self._state = self.program.init()
        return self._state

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Evaluates on `eval_data`, or on `data`, exactly: every row once, whatever the batch size.

        Returns:
          `eval_loss` (sum / count over all rows), `eval_<name>` for the loss's metrics, and the computed ones.
        """
        rows = self.eval_rows if data is None else as_rows(data, seed=None)
        if rows is None:
            raise ConfigError("there is no evaluation data", "pass eval_data, or set data.eval")
        evaluator = self._evaluator(rows)
        state = self.state
        averaged = self.config.eval.use_ema and state.ema is not None
        try:
            metrics = evaluator(state.ema if averaged else state.params, state.variables)
        finally:
            evaluator.close()
        self._log("eval", metrics)
        return metrics

    def predict(self, data: Any) -> Any:
        """`predict_fn(model, batch)` over the rows of `data`, in order, as a tree of numpy arrays.

        Raises:
          ConfigError: the Trainer has no `predict_fn`.
        """
        from jtrain.train.prediction import predict

        if self._predict_fn is None:
            raise ConfigError("predict needs predict_fn", "pass predict_fn(model, batch) -> arrays [b, ...]")
        return predict(self.program, self.state, self._predict_fn, as_rows(data, seed=None))

    def request_log(self) -> None:
        """Asks for a line of figures at the next step."""
        self._requests.add("log")

    def request_evaluate(self) -> None:
        """Asks for an evaluation after the update in flight."""
        self._requests.add("evaluate")

    def request_save(self) -> None:
        """Asks for a save after the update in flight."""
        self._requests.add("save")

    def request_stop(self, reason: str) -> None:
        """Ends the run after the update in flight: evaluated and saved."""
        log.info("stopping: %s", reason)
        self._requests.add("stop")

    # ------------------------------------------------------------------------------------------------ its parts

    def _open_session(self, total: int) -> Session:
        self._session = Session(self.config, total)
        self._requests.clear()
        self._bad_in_a_row = 0
        return self._session

    def _restore_or_init(self, session: Session) -> None:
        kept, self._state = self._state, None  # one state in memory, not two
        restored = session.restore(self.plan.abstract)
        if restored is not None:
            self._state, meta = restored
            self.counters = Counters(**meta["counters"])
            self.callbacks.load_state_dict(meta["callbacks"])
            session.write_config()
            return
        self._state = kept
        session.write_config()
        if self.config.checkpoint.init_from:
            self._init_from(self.config.checkpoint.init_from)
        state = self.state
        session.emit("start", {"mesh": dict(self.mesh.shape), "max_steps": self.timetable.max_steps})
        size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        session.console.message(
            f"{size:,} parameters on {describe(self.mesh)} | state {bytes_per_device(state) / 2**20:,.1f} MiB a device | "
            f"{self.program.batch.total} rows a step in {self.program.batch.accumulation} micro-batch(es)"
        )

    def _init_from(self, source: str) -> None:
        from jtrain.checkpoint.checkpoints import load_parameters

        params = load_parameters(source, self.plan.abstract.params)
        fresh = self.state
        ema = None if fresh.ema is None else jax.tree.map(lambda p, e: p.astype(e.dtype), params, fresh.ema)
        self._state = dataclasses.replace(fresh, params=params, ema=ema)

    def _loader(self, stop: int) -> DataLoader:
        batch = self.program.batch
        return DataLoader(
            self.train_rows,
            global_batch_size=batch.total,
            accumulation=batch.accumulation,
            sharding=self.program.batch_sharding,
            prefetch=self.config.data.prefetch,
        )

    def _evaluator(self, rows: Any) -> Evaluator:
        size = self.config.eval.batch_size or self.program.batch.rows
        loader = DataLoader(rows, global_batch_size=size, sharding=self.program.batch_sharding, prefetch=1)
        batches = -(-len(rows) // size)
        limit = int(self.config.fast_dev_run) or self.config.eval.max_batches
        return Evaluator(self._eval_step, loader, min(batches, limit or batches), self._compute_metrics)

    def _compile(self, loader: DataLoader) -> None:
        started = time.perf_counter()
        batch = loader[self.counters.step + self.counters.skipped]
        self.train_step.compile(self.state, batch)
        log.info("train_step compiled in %.1f s", time.perf_counter() - started)

    def _save(self, session: Session, metrics: dict[str, float]) -> None:
        if session.checkpoints is None or session.last_save_step == self.counters.step:
            return
        meta = self.counters.meta(self.config, self.callbacks.state_dict())
        session.checkpoints.save(self.counters.step, self.state, meta, metrics or None)
        session.saved(self.counters.step)
        self.callbacks("on_save", self, self.counters.step)

    def _due(self, request: str, scheduled: bool) -> bool:
        return scheduled or request in self._requests

    def _log(self, split: str, record: dict[str, Any]) -> None:
        getattr(self.history, split).append({"step": self.counters.step} | record)
        if self._session is not None:
            self._session.log(self.counters.step, split, record)
        if split == "train":
            self.callbacks("on_log", self, record)

    def _emit(self, event: str, fields: dict[str, Any]) -> None:
        if self._session is not None:
            self._session.emit(event, fields)


__all__ = ["History", "JtrainError", "Trainer"]
