"""Kills at a chosen place of a save or a restore. `linear_run.py` puts it in place where POINT is set.

POINT: a name below. POINT_RANK: the process that dies there; at a place that only process 0 comes to, process 1 dies
while process 0 stands there; `none`: it only stands there. POINT_STEP: in the save of that step (8).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BY_ALL = ("d2h", "write", "restore")
BY_ONE = ("merge", "item_rename", "step_rename", "renamed_by_orbax", "manifest", "rename", "renamed")
IN_GC = ("gc_rename", "gc_delete")
AFTER = ("renamed", *IN_GC)
"""There the new step exists."""
HOLD_SECONDS = 4.0


def rank() -> int:
    """Of this process."""
    words = sys.argv
    return int(words[words.index("--distributed.process_id") + 1]) if "--distributed.process_id" in words else 0


def die() -> None:
    print("fault: kill", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def install() -> None:
    """Arms the point of the environment."""
    point = os.environ.get("POINT", "")
    if not point:
        return
    from jtrain.checkpoint.checkpoints import Checkpoints

    victim, wanted = os.environ.get("POINT_RANK", "0"), int(os.environ.get("POINT_STEP", "8"))
    marker = Path.cwd() / f"at-{point}"
    here = {"step": wanted if point == "restore" else 0}
    alone = point not in BY_ALL

    def reach() -> None:
        if here["step"] != wanted:
            return
        if str(rank()) == victim:
            die()
        elif alone:
            marker.touch()
            time.sleep(HOLD_SECONDS)

    prepare = Checkpoints._prepare

    def prepared(self: Any, save: Any, *arguments: Any) -> None:
        here["step"] = save.step
        prepare(self, save, *arguments)

    Checkpoints._prepare = prepared  # type: ignore[method-assign]
    if alone and victim == "1" == str(rank()):
        threading.Thread(target=_follow, args=(marker,), daemon=True).start()
    else:
        _hook(point, reach)


def _follow(marker: Path) -> None:
    while not marker.exists():
        time.sleep(0.01)
    die()


def _hook(point: str, reach: Callable[[], None]) -> None:
    from orbax.checkpoint._src.path.atomicity import AtomicRenameTemporaryPath
    from orbax.checkpoint._src.serialization import ocdbt_utils, replica_slices, serialization

    from jtrain.checkpoint import arrays, files, finish, retention

    places: dict[str, tuple[Any, str, Callable[..., bool]]] = {
        "d2h": (replica_slices, "transfer_arrays_to_host", lambda *_, **__: True),
        "write": (serialization, "async_serialize_from_host", lambda *_, **__: True),
        "merge": (ocdbt_utils, "merge_ocdbt_per_process_files", lambda *_, **__: True),
        "item_rename": (AtomicRenameTemporaryPath, "finalize", lambda self: self.get_final().name == "state"),
        "step_rename": (AtomicRenameTemporaryPath, "finalize", lambda self: self.get_final().name.isdigit()),
        "renamed_by_orbax": (files, "sync_tree", lambda *_: True),
        "manifest": (finish, "write_manifest", lambda *_: True),
        "rename": (files, "move", lambda source, _: "_saving" in os.fspath(source)),
        "gc_rename": (files, "move", lambda _, target: "_trash" in os.fspath(target)),
        "restore": (arrays, "read_arrays", lambda *_, **__: True),
    }
    if point == "renamed":
        move = files.move

        def moved(source: Any, target: Any) -> None:
            move(source, target)
            if "_saving" in os.fspath(source):
                reach()

        files.move = moved
    elif point == "gc_delete":
        remove = retention.files.remove_tree

        def half(path: Any) -> None:
            if "_trash" in os.fspath(path) and os.path.isdir(path):
                remove(path / "state")
                reach()
            remove(path)

        retention.files.remove_tree = half
    else:
        holder, name, here = places[point]
        original = getattr(holder, name)

        def first(*arguments: Any, **named: Any) -> Any:
            if here(*arguments, **named):
                reach()
            return original(*arguments, **named)

        setattr(holder, name, first)
