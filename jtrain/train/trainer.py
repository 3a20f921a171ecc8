"""The Trainer: any Flax model, any loss, any mesh.

It puts a run together from the config (mesh, program, rows, callbacks) and has its verbs. `fit` opens the run
directory, restores or starts, and hands over to the loop in `jtrain/train/loop.py`; the step is `jtrain/train/step.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import optax

from jtrain.config.load import load_config
from jtrain.config.schema import Config
from jtrain.data.arrays import as_rows
from jtrain.data.loader import DataLoader
from jtrain.data.quarantine import write_quarantine
from jtrain.data.rows import Rows
from jtrain.errors import ConfigError, Preempted
from jtrain.observe.flops import TokenFlops
from jtrain.observe.goodput import Goodput
from jtrain.parallel import processes
from jtrain.parallel.lost import as_peer_lost
from jtrain.parallel.mesh import data_ranks, describe
from jtrain.parallel.sharding import bytes_per_device
from jtrain.train.across_slices import complete, exchange_name
from jtrain.train.adapters import counts
from jtrain.train.callbacks import Callback, CallbackList, early_stopping
from jtrain.train.compiled import CompiledStep
from jtrain.train.evaluation import Evaluator
from jtrain.train.guard import Guard, guarded
from jtrain.train.history import History
from jtrain.train.loop import Loop
from jtrain.train.loss import LossFn
from jtrain.train.program import InitialWeights, build_program, mesh_and_batch
from jtrain.train.rollback import Rollbacks
from jtrain.train.self_test import check_draw
from jtrain.train.session import Counters, Session
from jtrain.train.spikes import complete_numbers
from jtrain.train.state import TrainState, combine, with_skipped
from jtrain.train.step import StepHook
from jtrain.train.timetable import Timetable

log = logging.getLogger(__name__)


class Source(InitialWeights, Protocol):
    """Where a run's model comes from."""

    @property
    def pretrained(self) -> bool:
        """Whether a new run begins with weights that are loaded, and not drawn."""
        ...

    def keep(self, run_dir: str) -> None:
        """Writes into the directory of a new run what is needed beside its checkpoints to use the model elsewhere."""
        ...


class Trainer:
    """Trains a model.

    Args:
      config: a Config, a YAML file, a recipe's name or a dict; None for the defaults.
      model: a class or function that takes `rngs` and returns a Flax NNX module, or such a module.
      loss_fn: `loss_fn(model, batch, rng) -> Loss(sum, count, metrics)`.
      train_data: a dict of arrays, a list of dicts, any random-access sequence of dicts, or rows (`jtrain.data.Rows`).
      eval_data: the same; rows past its end must count for nothing (see `as_rows`).
      optimizer: any optax chain, in place of the config's optimizer and schedule; or the config's section.
      callbacks: called in this order.
      compute_metrics: `sums -> dict`, further evaluation figures from name -> (sum, count).
      predict_fn: `predict_fn(model, batch) -> tree of [b, ...] arrays`, for `predict`.
      step_hook: `step_hook(gradients, state, metrics) -> (gradients, metrics)`, traced into the step.
      source: where the model comes from: weights that a new run begins with, and files that go into its directory.
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
        optimizer: optax.GradientTransformation | Any = None,
        callbacks: Sequence[Callback] = (),
        compute_metrics: Callable[[dict[str, tuple[float, float]]], dict[str, float]] | None = None,
        predict_fn: Callable[[Any, dict[str, jax.Array]], Any] | None = None,
        step_hook: StepHook | None = None,
        source: Source | None = None,
        **sections: Any,
    ):
        self.goodput = Goodput()
        if optimizer is not None and not isinstance(optimizer, optax.GradientTransformation):
            sections, optimizer = sections | {"optimizer": optimizer}, None
        config = load_config(config, sections)
        devices = processes.start(config)
        config, mesh, batch = mesh_and_batch(config, devices)
        shuffle = config.data.shuffle
        self.train_rows = None if train_data is None else as_rows(train_data, seed=config.seed, shuffle=shuffle)
        self.eval_rows = None if eval_data is None else as_rows(eval_data, seed=None)
        self._fingerprint = getattr(self.train_rows, "fingerprint", None)  # to notice other data at resume
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
        self.callbacks = CallbackList([*early_stopping(config), *callbacks])
        self.counters = Counters()
        several = bool(getattr(self.train_rows, "buckets", ()))  # one program a length of the batches
        compiling = functools.partial(self.goodput, "compile")
        self.train_step = CompiledStep(self.program.train_step, "train_step", once=not several, during=compiling)
        self._eval_step = CompiledStep(self.program.eval_step, "eval_step", once=False, during=compiling)
        self._compute_metrics, self._predict_fn = compute_metrics, predict_fn
        self._source = source
        self._state: TrainState | None = None
        self._session: Session | None = None
        self.requests: set[str] = set()  # log, evaluate, save, stop: see `request_...`
        self.interrupts: Callable[[], bool] = bool  # breaks an evaluation off; never, unless the loop says when
        self.rollbacks = Rollbacks()
        self._trained = False
        self.history = History()

    def fit(self) -> History:
        """Trains up to `max_steps` updates; goes on from the newest checkpoint of `run_dir` where there is one.

        Raises:
          JtrainError: whatever ends the run early, with its exit code; the newest checkpoint stays.
        """
        if self.train_rows is None:
            raise ConfigError("train_data is missing", "pass train_data, or name files in data.train")
        self.history = History()
        with guarded(self.config) as guard, self._open_session(guard) as session:
            self.goodput.open(session.past)
            self.say(" | ".join(self.summary()))
            check_draw(tuple(self.mesh.devices.flat))
            self._restore_or_init(session)
            if not session.dry and processes.is_main():
                write_quarantine(self.config.run_dir, self.train_rows, self.eval_rows)
            total, owed = self.timetable.max_steps, self.counters.owes_evaluation and self.eval_rows is not None
            owed = owed and session.ended != self.counters.step  # made good, and nothing was left to save
            loop = Loop(self, session, guard, resumed=session.last_save_step is not None)
            if self.ends() and not owed:
                self.say(f"the run is complete: max_steps={total}, and step {self.counters.step} is reached")
                session.emit("end", {"step": self.counters.step})
                return self.history
            if session.checkpoints is not None:
                session.checkpoints.check_room(self.state)
            try:
                with self.goodput("step"):
                    self.callbacks("on_fit_start", self)
                    if owed:  # the last start was preempted where an evaluation was due
                        if (metrics := loop.evaluate()) is None:
                            loop.leave()
                        self.callbacks("on_evaluate", self, metrics)
                    if not self.ends():
                        self._trained = True
                        loop.run()
                    self.callbacks("on_fit_end", self)
                    self.wait()  # `end` is not said before the last save is durable
                    with self.goodput("save_stall"):
                        session.wait_for_backup(guard.seconds_left)
                self.account(last=True)
            except Preempted:
                raise
            except BaseException as error:
                self.callbacks("on_exception", self, error)
                self.account(last=True)
                session.emit("end", {"step": self.counters.step, "error": f"{type(error).__name__}: {error}"})
                if (lost := as_peer_lost(error)) is not None:
                    raise lost from error
                raise
            guard.done()
            session.emit("end", {"step": self.counters.step})
            self.say(f"done: step {self.counters.step}" + ("" if session.dry else f", saved in {self.config.run_dir}"))
        return self.history

    @property
    def state(self) -> TrainState:
        """The state on the devices; drawn, or loaded, when it is first asked for."""
        if self._state is None:
            source, start = self._source, self.config.checkpoint.init_from
            if start:
                self._state = self.program.init_from(start)
            elif source is not None and source.pretrained:
                self._state = self.program.init_with(source)
            else:
                self._state = self.program.init()
        return self._state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state = state

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Evaluates on `eval_data`, or on `data`, exactly: every row once, whatever the batch size.

        Figures of `eval_data` are logged; those of other data are only returned.

        Returns:
          `eval_loss` (sum / count over all rows), `eval_<name>` for the loss's metrics, and the computed ones.
        """
        rows = self.eval_rows if data is None else self.rows_of(data)
        if rows is None:
            raise ConfigError("there is no evaluation data", "pass eval_data, or set data.eval")
        evaluator = self._evaluator(rows)
        try:
            with self.goodput("eval"):
                metrics = evaluator(self._evaluated_params(), self.state.variables)
        finally:
            evaluator.close()
        metrics |= self.more_figures(data)
        if data is None:
            self.log("eval", metrics)
        return metrics

    def predict(self, data: Any) -> Any:
        """`predict_fn(model, batch)` over the rows of `data`, in order, as a tree of numpy arrays.

        The parameters are those of an evaluation: the moving average, where there is one and `eval.use_ema` says so.

        Raises:
          ConfigError: the Trainer has no `predict_fn`.
        """
        from jtrain.train.prediction import predict

        if self._predict_fn is None:
            raise ConfigError("predict needs predict_fn", "pass predict_fn(model, batch) -> arrays [b, ...]")
        rows, variables = self.rows_of(data), self.state.variables
        return predict(self.program, self._evaluated_params(), variables, self._predict_fn, rows)

    def prepare(self, batch: dict[str, jax.Array], params: Any, variables: Any) -> dict[str, jax.Array]:
        """What a step gets of a batch [A, b, ...] on the devices; `params` and `variables` are those it will run with.

        A task overrides it to add arrays that are functions of the whole batch, or of another model: the
        log-probabilities of a reference. They are computed before the step, by a program of their own.
        """
        return batch

    def beside(self) -> Any:
        """Arrays that the task changes between steps and a resume needs (a tree), saved with the state; None: none are.

        A task with some overrides the three: `beside`, `abstract_beside`, their shapes and places before a restore, and
        `take_beside`, which gets what a restore has read.
        """
        return None

    def abstract_beside(self) -> Any:
        """Shapes and places of `beside`."""
        return None

    def take_beside(self, restored: Any) -> None:
        """Gets `beside` of the checkpoint that the run goes on from."""

    def waits_for(self, step: int) -> bool:
        """Whether the next step is not begun before `on_step_end` of update `step` is through, which sees its state."""
        return False

    def more_figures(self, data: Any) -> dict[str, float]:
        """Figures of an evaluation that are no sums over batches; `data` is that of `evaluate`. A task overrides it."""
        return {}

    def rows_of(self, data: Any) -> Rows:
        """Data for evaluation or prediction as rows, in order. A task that reads other forms of data overrides it."""
        return as_rows(data, seed=None)

    @property
    def row_multiple(self) -> int:
        """What the rows of an evaluation's batch are filled up to a multiple of; more where a task has other meshes."""
        return data_ranks(self.mesh)

    @property
    def flops_per_token(self) -> TokenFlops | None:
        """Model FLOPs of a token in training; None where its shape is not known (the compiled step is then walked)."""
        return None

    @property
    def epoch(self) -> float | None:
        """Passes over the training rows so far."""
        size = self.timetable.steps_per_epoch
        return None if not size else float(self.counters.batches / size)

    def summary(self) -> list[str]:
        """What the run is, in a few words each: printed when it starts."""
        abstract, batch, pipeline = self.plan.abstract, self.program.batch, self.program.pipeline
        trained, size = counts(self.program.model, self.plan.trainable)
        frozen = "" if trained == size else f", {trained:,} of them trained"
        plural = "es" if batch.accumulation > 1 else ""
        return [
            f"{size:,} parameters{frozen} on {describe(self.mesh)}",
            f"state {bytes_per_device(abstract) / 2**20:,.1f} MiB a device",
            f"{batch.total} rows a step ({batch.accumulation} micro-batch{plural} of {batch.rows})",
            str(self.program.precision),
            *([] if pipeline is None else [str(pipeline.tables(batch.accumulation))]),
            *([] if (across := exchange_name(self.config)) is None else [across]),
        ]

    def say(self, text: str) -> None:
        """Prints on the console of process 0."""
        if self._session is not None:
            self._session.console.message(text)

    def sampled(self, number: int, sample: dict[str, str]) -> None:
        """Writes what the model answered to prompt `number`: prompt, completion and reference."""
        if self._session is not None:
            self._session.sample(self.counters.step, number, sample)

    def train_loader(self) -> DataLoader:
        """The batches of the training rows, on the mesh."""
        batch, rows = self.program.batch, self.train_rows
        assert rows is not None  # fit has seen to it
        return DataLoader(
            rows,
            global_batch_size=batch.total,
            accumulation=batch.accumulation,
            sharding=self.program.batch_sharding,
            prefetch=self.config.data.prefetch,
        )

    def save(self, metrics: dict[str, float] | None = None) -> None:
        """Begins a save of the step just made, unless it is saved already. During `fit`; from callbacks, ask for one.

        Args:
          metrics: of an evaluation at this step; `checkpoint.best` is among them.
        """
        session, step = self._session, self.counters.step
        if session is None or session.checkpoints is None or session.last_save_step == step:
            return
        meta = self.counters.meta(self.config, self.callbacks.state_dict(), self._fingerprint)
        meta |= {"rollbacks": self.rollbacks.windows}
        state = dataclasses.replace(self.state, beside=self.beside())
        with self.goodput("save_stall"):
            session.checkpoints.save(step, state, meta, metrics or None)
        session.saved(step)
        self.account()
        self.callbacks("on_save", self, step)

    def restore(self, read: Callable[[Any], tuple[Any, dict[str, Any]]]) -> None:
        """Goes on from a checkpoint: `read(shapes and places)` returns its state and its JSON."""
        self._state = None  # one state in memory, not two
        abstract = dataclasses.replace(self.plan.abstract, beside=self.abstract_beside())
        with self.goodput("restore"):
            state, meta = read(abstract)
        self._state, anew = complete(dataclasses.replace(state, beside=None), self.plan)
        self._state = complete_numbers(self._state, self.plan.window, self.plan.shardings.step)
        if state.beside is not None:
            self.take_beside(state.beside)
        if anew:
            self.say(f"between slices, {' and '.join(anew)} begin anew: the checkpoint has none for this mesh")
        self.counters = Counters(**meta["counters"])
        self.rollbacks.add(meta.get("rollbacks", ()))
        self.callbacks.load_state_dict(meta["callbacks"])

    def leave_out(self, batches: int) -> None:
        """Goes on behind the next `batches` batches, which count as skipped. The device is idle."""
        self.counters.skipped += batches
        self.state = with_skipped(self.state, self.counters.skipped)

    def wait(self) -> None:
        """Waits until the last save is durable."""
        if self._session is not None:
            with self.goodput("save_stall"):
                self._session.wait()

    def account(self, *, last: bool = False) -> None:
        """Writes a line of the goodput ledger, at most one a second; the last one is printed as well."""
        if self._session is not None and (last or self.goodput.due()):
            self._session.emit("goodput", {"step": self.counters.step} | self.goodput.record())
        if last:
            self.say(self.goodput.line())

    def log(self, split: str, record: dict[str, Any]) -> None:
        """Writes a line of figures of the step just made; `split` is `train` or `eval`."""
        getattr(self.history, split).append({"step": self.counters.step} | record)
        if self._session is not None:
            self._session.log(self.counters.step, split, record)
        if split == "train":
            self.account()
            self.callbacks("on_log", self, record)

    def ends(self) -> bool:
        """Whether the step just made is the run's last, as far as is known."""
        return self.counters.step >= self.timetable.max_steps or "stop" in self.requests

    def request_log(self) -> None:
        """Asks for a line of figures at the next step."""
        self.requests.add("log")

    def request_evaluate(self) -> None:
        """Asks for an evaluation after the update in flight."""
        self.requests.add("evaluate")

    def request_save(self) -> None:
        """Asks for a save after the update in flight."""
        self.requests.add("save")

    def request_stop(self, reason: str) -> None:
        """Ends the run after the update in flight: evaluated and saved."""
        log.info("stopping: %s", reason)
        self.requests.add("stop")

    @contextlib.contextmanager
    def _open_session(self, guard: Guard) -> Iterator[Session]:
        self.requests.clear()
        guard.begin()
        with Session(self.config, self.timetable) as session:
            self._session = session
            guard.open(session.emit, self.timetable.max_steps)
            try:
                yield session
            finally:
                self._session = None
                guard.close()

    def _restore_or_init(self, session: Session) -> None:
        source = self.config.checkpoint.init_from
        resumes = session.resumes()
        if resumes or source or self._trained:  # trained: a fit that broke off before its first save begins anew
            self._state = None  # one state in memory, not two
        self.rollbacks = Rollbacks(session.rollbacks if resumes else ())
        if resumes:
            self.restore(lambda abstract: session.restore(abstract, self._fingerprint))
            session.write_config()
            return
        if self._trained:
            self.counters = Counters()
        session.write_config()
        _ = self.state  # drawn or loaded now: what is missing is said before the run begins
        if self._source is not None and not session.dry and processes.is_main():
            self._source.keep(self.config.run_dir)
        session.emit("start", {"mesh": dict(self.mesh.shape), "max_steps": self.timetable.max_steps})

    def _evaluated_params(self) -> Any:
        """The parameters that are evaluated: the moving average, if there is one and it is wanted."""
        state = self.state
        if not self.config.eval.use_ema or state.ema is None:
            return state.params
        return combine(state.ema, state.params, self.plan.trainable)

    def _evaluator(self, rows: Any) -> Evaluator:
        section = self.config.eval
        return Evaluator.over(
            rows,
            self._eval_step,
            batch_size=section.batch_size or self.program.batch.rows,
            sharding=self.program.batch_sharding,
            multiple=self.row_multiple,
            max_batches=int(self.config.fast_dev_run) or section.max_batches,
            compute_metrics=self._compute_metrics,
            prepare=self.prepare,
            stop=self.interrupts,
        )
