"""Silent data corruption: what devices hold twice is compared, and now and then an update is made twice.

Both look for a device that computes wrong without anything else to show for it (Dixit et al. 2021, "Silent data
corruptions at scale"; Gemini, 2023, replays steps for it). Every process sees the same checksums, and decides alike.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.errors import ConfigError, NumbersError
from jtrain.train.checksums import Checksums

if TYPE_CHECKING:
    from jtrain.train.session import Session
    from jtrain.train.trainer import Trainer

_SHOWN = 3
_REMEDY = "test these machines or leave them out; the next start goes on from the newest checkpoint"


class DeviceChecks:
    """The checks of `faults.check_replicas_every_n_steps` and `faults.replay_every_n_steps`.

    Args:
      trainer: whose state is looked at.
      session: gets the events.

    Raises:
      ConfigError: a step that is not deterministic can't be compared with itself.
    """

    def __init__(self, trainer: Trainer, session: Session):
        faults = trainer.config.faults
        self._trainer, self._session = trainer, session
        self._replicas, self._replays = faults.check_replicas_every_n_steps, faults.replay_every_n_steps
        self._checksums = Checksums(trainer.plan)
        self._copy: Any = None
        platform = trainer.mesh.devices.flat[0].platform
        if self._replays and platform not in ("cpu", "tpu") and not trainer.config.deterministic:
            raise ConfigError(
                f"faults.replay_every_n_steps: {self._replays} on {platform}, where two runs of a step may differ",
                "write deterministic: true, or faults.replay_every_n_steps: 0",
            )

    def due(self, step: int) -> bool:
        """Whether replicas are compared after update `step`."""
        return bool(self._replicas) and step % self._replicas == 0

    def compare_replicas(self, step: int, *, saves: bool) -> None:
        """Compares what several devices hold, where that is due, or where the state is about to be saved.

        Raises:
          NumbersError: they differ.
        """
        if not (self.due(step) or (saves and self._replicas)):
            return
        table = self._checksums(self._trainer.state)
        odd: set[int] = set()
        paths: list[str] = []
        tied = False
        for path, row in zip(self._checksums.paths, table, strict=True):
            groups = self._checksums.replicas(path)
            for group, copies in zip(groups, row[groups], strict=True):
                if (copies == copies[0]).all():
                    continue
                (most, times), *rest = Counter(copies.tolist()).most_common()
                even = times == rest[0][1]  # half against half: nobody knows who is right
                odd |= set((group if even else group[copies != most]).tolist())
                tied |= even
                paths += [path] if path not in paths else []
        if odd:
            self._alarm("replicas_differ", step, sorted(odd), paths, "one of them is wrong" if tied else "")

    def replays(self, step: int) -> bool:
        """Whether update `step` is made twice."""
        return bool(self._replays) and step % self._replays == 0

    def step_twice(self, step: int, batch: Any) -> tuple[Any, Any]:
        """Makes update `step` twice from the same state and batch.

        Returns:
          The new state and the metrics.

        Raises:
          NumbersError: the two differ.
        """
        trainer = self._trainer
        if self._copy is None:  # the step gives its state away
            self._copy = jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=trainer.plan.shardings)
        first, _ = trainer.train_step(self._copy(trainer.state), batch)
        before = self._checksums(first)
        del first  # two states in memory, not three
        state, metrics = trainer.train_step(trainer.state, batch)
        differs = before != self._checksums(state)
        if differs.any():
            paths = [path for path, row in zip(self._checksums.paths, differs, strict=True) if row.any()]
            self._alarm("step_differs", step, np.flatnonzero(differs.any(0)).tolist(), paths)
        return state, metrics

    def _alarm(self, event: str, step: int, places: list[int], paths: list[str], note: str = "") -> None:
        devices = [self._checksums.devices[place] for place in places]
        named = [{"device": d.id, "process": d.process_index, "kind": d.device_kind} for d in devices]
        self._session.emit(event, {"step": step, "devices": named, "arrays": paths})
        who = ", ".join(f"device {d.id} of process {d.process_index}" for d in devices[: 4 * _SHOWN])
        who += f" and {len(devices) - 4 * _SHOWN} more" if len(devices) > 4 * _SHOWN else ""
        what = ", ".join(paths[:_SHOWN]) + (f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else "")
        said = "update {} made twice gave two results" if event == "step_differs" else "after update {} copies differ"
        raise NumbersError(
            f"silent data corruption: {said.format(step)}: {what} on {who} ({devices[0].device_kind})"
            + (f"; {note}" if note else ""),
            _REMEDY,
        )
