"""Figures of the steps: rates between log points, utilisation, and the record that is written."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

import jax

from jtrain.observe.devices import peak_flops
from jtrain.observe.flops import mfu
from jtrain.observe.hlo import analyze
from jtrain.observe.memory import peak_memory_gib

if TYPE_CHECKING:
    from jtrain.train.trainer import Trainer

_OF_THE_STEP = ("loss", "learning_rate", "grad_norm", "finite", "spike", "tokens", "sums")


class Meter:
    """Measures from one log point to the next; time spent in evaluation and saving does not count.

    Attributes:
      pace: of the last record: seconds of an update, those of them in which this process did not wait for the device,
        and how many updates.
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._devices = trainer.mesh.devices.size
        kind = trainer.mesh.devices.flat[0].device_kind
        self._peak = peak_flops(kind, trainer.program.precision.name)
        self._seconds = self._wait = self._device = 0.0
        self._tokens = self._steps = 0
        self.pace = (0.0, 0.0, 0)
        self.restart()

    def restart(self) -> None:
        """Starts the clock again after something that is not training."""
        self._mark = time.perf_counter()

    def waited(self, seconds: float) -> None:
        """Takes note of a wait for data."""
        self._wait += seconds

    def dispatched(self, seconds: float) -> None:
        """Takes note of the time that the call of the step took: where it is not asynchronous, it is the step."""
        self._device += seconds

    def read(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """The figures of a step as Python numbers; waits until it is done."""
        began = time.perf_counter()
        host = jax.device_get({name: value for name, value in metrics.items() if name not in ("step", "skipped")})
        now = time.perf_counter()
        self._device += now - began
        self._seconds += now - self._mark
        self._mark = now
        self._steps += 1
        self._tokens += int(host["tokens"])
        sums = {name: float(total) / float(count) if count else None for name, (total, count) in host["sums"].items()}
        added = {name: float(value) for name, value in host.items() if name not in _OF_THE_STEP}  # by a step_hook
        return (
            sums
            | added
            | {
                "loss": float(host["loss"]),
                "learning_rate": float(host["learning_rate"]) if "learning_rate" in host else None,
                "grad_norm": float(host["grad_norm"]),
                "finite": bool(host["finite"]),
                "spike": bool(host.get("spike", False)),
                "batch_tokens": int(host["tokens"]),
            }
        )

    def record(self, values: dict[str, Any]) -> dict[str, Any]:
        """The train line of metrics.jsonl for the step that `values` belong to; begins the next interval."""
        trainer = self._trainer
        rate = self._tokens / self._seconds if self._seconds else None
        per_device = None if rate is None else rate / self._devices
        causal, legacy = self._flops_per_second(per_device)
        record = {name: value for name, value in values.items() if name not in ("finite", "spike")} | {
            "tokens": trainer.counters.tokens,
            "examples": trainer.counters.examples,
            "step_seconds": self._seconds / self._steps,
            "tokens_per_second": rate,
            "tokens_per_second_per_device": per_device,
            "mfu": mfu(causal, 1.0, self._peak),
            "mfu_legacy": mfu(legacy, 1.0, self._peak),
            "tflops_per_device": None if causal is None else causal / 1e12,
            "memory_gib": peak_memory_gib(),
            "data_wait_seconds": self._wait / self._steps,
            "skipped_steps": trainer.counters.skipped,
            "epoch": trainer.epoch,
        }
        busy = max(0.0, self._seconds - self._device) / self._steps
        self.pace = (self._seconds / self._steps, busy, self._steps)
        self._seconds = self._wait = self._device = 0.0
        self._tokens = self._steps = 0
        return record

    def _flops_per_second(self, tokens_per_second: float | None) -> tuple[float | None, float | None]:
        """FLOP/s of one device by both conventions, causal and legacy.

        A decoder's are those of its mathematics. Of another model they are those of the compiled step, recomputation
        included: there is one convention for them, and the second is None.
        """
        flops = self._trainer.flops_per_token
        if flops is None:
            return (self._walked_flops / (self._seconds / self._steps) if self._seconds else None), None
        if tokens_per_second is None:
            return None, None
        return flops.causal * tokens_per_second, flops.legacy * tokens_per_second

    @functools.cached_property
    def _walked_flops(self) -> int:
        return analyze(self._trainer.train_step.latest.as_text()).flops
