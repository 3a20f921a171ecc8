"""Ahead-of-time compilation of the step: once, timed, and with a word when it happens again."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import jax

log = logging.getLogger(__name__)


class CompiledStep:
    """Calls a jitted function through its compiled form; a call with other shapes compiles again and says why.

    Args:
      jitted: the function.
      name: for messages.
      once: whether a second program is worth a warning.
      during: opened around every compilation.

    Attributes:
      seconds: time of tracing and compiling, in all.
      latest: the newest `jax.stages.Compiled`, for its HLO and memory analysis; None before the first call.
    """

    def __init__(
        self,
        jitted: Callable[..., Any],
        name: str,
        *,
        once: bool = True,
        during: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ):
        self.name = name
        self.seconds = 0.0
        self.latest: Any = None
        self._jitted: Any = jitted
        self._programs: dict[Any, Any] = {}
        self._once = once
        self._during = during

    def __call__(self, *arguments: Any) -> Any:
        return self.compile(*arguments)(*arguments)

    def compile(self, *arguments: Any) -> Any:
        """The program for arguments or `ShapeDtypeStruct`s with shardings; compiled if it is not there yet."""
        signature = _signature(arguments[-1])
        if signature in self._programs:
            return self._programs[signature]
        if self._programs and self._once:
            before = next(reversed(self._programs))
            log.warning("%s is compiled again: %s", self.name, _difference(before, signature))
        start = time.perf_counter()
        with self._during():
            self.latest = self._jitted.lower(*arguments).compile()
        self.seconds += time.perf_counter() - start
        self._programs[signature] = self.latest
        return self.latest


def _signature(batch: Any) -> tuple[tuple[Any, tuple[int, ...], Any], ...]:
    return tuple((path, leaf.shape, leaf.dtype) for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0])


def _difference(before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    old, new = (
        {jax.tree_util.keystr(path): (shape, str(dtype)) for path, shape, dtype in rows} for rows in (before, after)
    )
    changed = [
        f"batch{name} was {old.get(name, 'absent')}, is {new.get(name, 'absent')}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    return "; ".join(changed)
