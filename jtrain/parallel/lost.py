"""When one process of a run ends with an error, so do the others: soon, and knowing why.

Its peers would wait for it in a collective for ever. So whoever leaves tells the coordinator first, and in every
process a thread looks for such a word. A peer that is killed says nothing: then the network tells, by an error in a
collective within a second, or the heartbeat of `jax.distributed` after 100 s. When the coordinator itself (process 0)
is killed, jax aborts the others at once (SIGABRT) and no code of ours runs.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from jax._src import distributed  # the client has no public name

from jtrain.errors import LOST_PEER_SIGNS, Exit, JtrainError, PeerLostError
from jtrain.parallel.store import store

GRACE_SECONDS = 5.0
"""How long a process that hears of another's end may take to end by an error of its own: often it has the same one."""

LEAVE_SECONDS = 20.0
"""How long it may take to tell the others and to flush; then the process ends without it."""
hears: list[Callable[[int], None]] = []
"""Called with the exit code of another process that has ended, before this one follows it."""

_WORD = "jtrain/ended"
_LEFT = "jtrain/left"
_FOLLOWED = {int(Exit.PREEMPTED_NOT_SAVED), int(Exit.PREEMPTED_SAVED), int(Exit.HUNG)}
"""Ends that are those of the whole run: the others end alike, at once."""
_leaving = threading.Lock()
_stop = threading.Event()


def several() -> bool:
    """Whether this process has joined others; starts no backend."""
    return distributed.global_state.client is not None and distributed.global_state.num_processes > 1


def process_id() -> int:
    """Number of this process; starts no backend."""
    return distributed.global_state.process_id


def prefix() -> str:
    """`[process n] ` for messages on a console that all processes share; empty for process 0."""
    return f"[process {process_id()}] " if process_id() else ""


@functools.cache
def watch() -> None:
    """Starts, once, to listen for the end of another process; an uncaught exception here is told to the others."""
    thread = threading.Thread(target=_listen, name="jtrain-lost", daemon=True)
    thread.start()

    def stop() -> None:  # a thread that is in C++ while the interpreter ends would abort the process
        _stop.set()
        thread.join()

    atexit.register(stop)
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        shown(kind, error, traceback)
        leave(int(error.exit_code) if isinstance(error, JtrainError) else 1, f"{kind.__name__}: {error}")

    sys.excepthook = hook


def leave_within(seconds: float, code: int) -> None:
    """Ends this process with `code` in so many seconds, whatever hangs until then (a disk, a pipe, the coordinator)."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=end, name="jtrain-end", daemon=True).start()


def leave(code: int, reason: str) -> NoReturn:
    """Ends this process at once with `code`, after telling the others.

    An ordinary exit would wait for them in the shutdown barrier, and they may hang in a collective. Process 0, which is
    the coordinator, goes last: without it the others would be aborted before they can say a word.
    """
    if not _leaving.acquire(blocking=False):
        time.sleep(10 * LEAVE_SECONDS)  # another thread is at it
    leave_within(LEAVE_SECONDS, code)
    if several():
        with contextlib.suppress(RuntimeError):
            _tell(reason, code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def as_peer_lost(error: BaseException) -> PeerLostError | None:
    """The error of a lost peer that stands behind `error` or its causes; None when it is something else."""
    seen: BaseException | None = error
    while seen is not None and several():
        if isinstance(seen, PeerLostError):
            return seen
        # A collective that fails while its figures are read comes as a ValueError.
        kind = isinstance(seen, RuntimeError | ValueError)
        if kind and any(sign in str(seen).lower() for sign in LOST_PEER_SIGNS):
            word = _word()
            lost = PeerLostError(
                _said(word) if word else f"another process was lost: {' '.join(str(seen).split())[:200]}",
                "look for its first error; all processes have to be started again together",
            )
            if word and word["code"] in _FOLLOWED:
                lost.exit_code = Exit(word["code"])
            return lost
        seen = seen.__cause__ or seen.__context__
    return None


def _tell(reason: str, code: int) -> None:
    client: Any = distributed.global_state.client
    word = json.dumps({"process": process_id(), "reason": reason, "code": code})
    with contextlib.suppress(RuntimeError):  # the first word stands
        client.key_value_set(_WORD, word)
    client.key_value_set(f"{_LEFT}/{process_id()}", "")
    deadline = time.monotonic() + GRACE_SECONDS + 2.0
    while process_id() == 0 and time.monotonic() < deadline:
        if len(client.key_value_dir_get(_LEFT)) == distributed.global_state.num_processes:
            time.sleep(0.5)  # they said so a moment before they go
            return
        time.sleep(0.1)


def _word() -> dict[str, Any] | None:
    """What another process said before it went, if one did."""
    kept = store()
    found = None if kept is None else kept.get(_WORD)
    word = None if found is None else json.loads(found)
    return None if word is None or word["process"] == process_id() else word


def _said(word: dict[str, Any]) -> str:
    return f"process {word['process']} has ended: {word['reason']}"


def _listen() -> None:
    state = distributed.global_state
    seconds = 1.0 + state.num_processes / 1000  # the coordinator answers all of them
    while not _stop.wait(seconds):
        if (word := _word()) is None:
            continue
        code, reason = word["code"], _said(word)
        follows = code in _FOLLOWED
        if follows:
            leave_within(LEAVE_SECONDS, code)
        for hear in hears:
            hear(code)
        if not _stop.wait(0.0 if follows else GRACE_SECONDS) and not _leaving.locked():
            print(f"error: {prefix()}{reason}", file=sys.stderr, flush=True)
            leave(code if follows else int(Exit.PEER_LOST), reason)
        return
