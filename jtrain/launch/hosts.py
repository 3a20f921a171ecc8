"""Which hosts take part in the next attempt: all, or, with `--hosts 2:4`, those that are there."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Sequence

from jtrain.errors import ConfigError

OUT_SECONDS = 600.0
"""How long a host that was lost is left out; twice as long each time that it is lost again."""


def parse_hosts(text: str, option: str = "--hosts") -> tuple[int, int]:
    """Least and most of `2` or `2:4`.

    Raises:
      ConfigError: no such number, none, or the wrong way round.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if match is None:
        raise ConfigError(f"{option}: {text!r} is no number of hosts", f"Write {option} 2, or {option} 2:4.")
    least, most = int(match[1]), int(match[2] or match[1])
    if least < 1:
        raise ConfigError(f"{option}: {text}: a run needs a host", f"Write {option} 1, or more.")
    if least > most:
        raise ConfigError(f"{option}: {text}: the least comes first", f"Write {option} {most}:{least}.")
    return least, most


class Hosts:
    """The hosts of a run, and those that are left out for a while.

    Args:
      names: all of them.
      least: fewer than these are no run.
      refused: number of hosts -> why the run can't be divided over so many; None: it can.
      clock: seconds that only rise.
    """

    def __init__(
        self,
        names: Sequence[str],
        least: int,
        refused: Callable[[int], str | None] = lambda count: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._names, self._least, self._clock = list(names), least, clock
        self._refused = functools.cache(refused)  # asked ten times a second
        self._until: dict[str, float] = {}
        self._times: dict[str, int] = {}
        self._chosen: list[str] = []

    def lost(self, name: str) -> None:
        """A host could not be started, or was lost: it is left out for a while, where the others are enough."""
        times = self._times[name] = self._times.get(name, 0) + 1
        self._until[name] = self._clock() + OUT_SECONDS * 2.0 ** (times - 1)

    def choose(self) -> list[str]:
        """The hosts of the next attempt, in order.

        Raises:
          ConfigError: the run can't be divided over any number of hosts from the least on.
        """
        self._chosen = self._best()
        return self._chosen

    def back(self) -> str | None:
        """A host that was left out and may take part again, where the run would have more hosts with it."""
        if len(self._best()) <= len(self._chosen):
            return None
        return next(name for name in self._best() if name not in self._chosen)

    def _best(self) -> list[str]:
        now = self._clock()
        here = [name for name in self._names if self._until.get(name, 0.0) <= now]
        out = sorted((name for name in self._names if name not in here), key=lambda name: self._until[name])
        candidates = here + out[: max(0, self._least - len(here))]  # too few: the one that is due next is tried
        why = ""
        for count in range(len(candidates), self._least - 1, -1):
            refusal = self._refused(count)
            if refusal is None:
                return [name for name in self._names if name in candidates[:count]]
            why = why or f"{count} hosts: {refusal}"
        raise ConfigError(f"the run can't be divided over {self._least} to {len(candidates)} hosts; {why}")
