"""Callbacks: what a user hangs into the loop. The loop calls them in list order, at fixed places.

After every step: log, evaluate, save, always in this order. What Hugging Face's `on_substep_end` and
`on_pre_optimizer_step` are used for is an optax transform or a `step_hook` here: the step is one compiled program.
"""

from __future__ import annotations

import collections
import json
import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jtrain.config.schema import Config
from jtrain.errors import ConfigError

if TYPE_CHECKING:
    from jtrain.train.trainer import Trainer

log = logging.getLogger(__name__)


class Callback:
    """Base class with empty methods. `trainer.request_log/evaluate/save/stop()` may be called from any of them."""

    def on_fit_start(self, trainer: Trainer) -> None:
        """Before the first step, after restore."""

    def on_step_start(self, trainer: Trainer, step: int) -> None:
        """Before update `step` is dispatched."""

    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        """Update `step` is done; its figures are read one step late, while the next one runs."""

    def on_log(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl was written."""

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """An evaluation ended."""

    def on_save(self, trainer: Trainer, step: int) -> None:
        """A save of `step` began (the event `durable` tells when it is safe)."""

    def on_preemption(self, trainer: Trainer, step: int) -> None:
        """The run was asked to stop; `step` is saved next."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """The loop ends with an error."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """After the last step, its evaluation and its save."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, as JSON."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, before `on_fit_start` of a resumed run."""


class CallbackList:
    """Calls every callback in order."""

    def __init__(self, callbacks: list[Callback]):
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"callbacks: {callback!r} is no Callback", "pass objects of classes made from Callback"
                )
        self.callbacks = callbacks

    def __call__(self, method: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, method)(*arguments)

    def state_dict(self) -> dict[str, Any]:
        """Every callback's state.

        Raises:
          ConfigError: one that is not JSON.
        """
        states = {key: state for key, callback in self._named() if (state := callback.state_dict())}
        for key, state in states.items():
            try:
                json.dumps(state)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"state_dict() of the callback {key} can't be saved: {error}", "return what JSON can hold"
                ) from error
        return states

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key, callback in self._named():
            if key in state:
                callback.load_state_dict(state[key])

    def _named(self) -> Iterator[tuple[str, Callback]]:
        """Callbacks by class name and number within the class: another class more or less changes no name."""
        seen: collections.Counter[str] = collections.Counter()
        for callback in self.callbacks:
            name = type(callback).__name__
            yield f"{name}:{seen[name]}", callback
            seen[name] += 1


class EarlyStopping(Callback):
    """Ends the run after `patience` evaluations in a row without a better metric.

    A run that ended so stays ended when it is started again, unless the patience has grown.
    """

    def __init__(self, metric: str, mode: str, patience: int, threshold: float = 0.0):
        self.metric, self.sign = metric, 1.0 if mode == "min" else -1.0
        self.patience, self.threshold = patience, threshold
        self.best: float | None = None
        self.waited = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        self._stop_if_due(trainer)

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        value = metrics.get(self.metric)
        if value is None:
            log.warning("early stopping looks at %s, and there is only %s", self.metric, ", ".join(sorted(metrics)))
            return
        better = self.best is None or self.sign * (self.best - value) > self.threshold
        if better and not math.isnan(value):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        self._stop_if_due(trainer)

    def _stop_if_due(self, trainer: Trainer) -> None:
        if self.waited >= self.patience:
            trainer.request_stop(f"{self.metric} has not improved for {self.waited} evaluations")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]


def early_stopping(config: Config) -> list[Callback]:
    """The callback that `eval.early_stopping_patience` asks for, if it does."""
    section, watched = config.eval, config.checkpoint
    if not section.early_stopping_patience:
        return []
    metric = watched.best or "eval_loss"
    return [EarlyStopping(metric, watched.best_mode, section.early_stopping_patience, section.early_stopping_threshold)]
