"""Checks of the run directory: clock, lock, speed, and space for the checkpoints that are kept."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jtrain.cli.doctor_checks import Check, size
from jtrain.config.schema import Config

SKEW_SECONDS = 1.0
"""More than this between two clocks makes the times in logs, leases and idle time wrong."""
_SAMPLE_BYTES = 64 << 20
_SAMPLE_SECONDS = 3.0
_SLOW_SAVE_SECONDS = 600.0


class Needs(NamedTuple):
    """What a run's state takes (`jtrain.cli.doctor_probe`), in bytes."""

    parameters: int
    checkpoint_bytes: int
    state_bytes: int
    gradient_bytes: int


def clock(config: Config) -> Check:
    """This host's clock against that of the run directory's file system, which all hosts of a run share."""
    folder, _ = nearest_folder(config.run_dir)
    if folder is None:
        return Check("clock", "ok", f"{config.run_dir} is no folder: its store has a clock of its own")
    probe_ = folder / f".doctor-{uuid.uuid4().hex[:8]}"
    try:
        before = time.time()
        probe_.write_bytes(b"clock")
        after = time.time()
        there = probe_.stat().st_mtime
    except OSError as error:
        return Check("clock", "warn", f"{folder} can't be written: {error.strerror}", "set another run_dir")
    finally:
        with contextlib.suppress(OSError):
            probe_.unlink()
    skew = there - after if there > after else min(0.0, there - before + 0.01)  # its clock ticks every few ms
    value = f"{abs(skew):.1f} s {'ahead of' if skew < 0 else 'behind'} the file system of {folder}"
    remedy = "start a time service on the hosts (chrony): logs and the account of idle time compare clocks"
    if abs(skew) > SKEW_SECONDS:
        return Check("clock", "warn", value, remedy)
    last = _last_event(Path(config.run_dir))
    if last is not None and last > after + SKEW_SECONDS:
        return Check("clock", "warn", f"the run's last event is {last - after:.0f} s in the future", remedy)
    return Check("clock", "ok", f"as the file system of {folder}")


def _last_event(run: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, KeyError, LookupError), (run / "events.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
        return float(json.loads(file.read().splitlines()[-1])["time"])
    return None


def run_dir(config: Config, needs: Needs | None) -> Iterator[Check]:
    """Whether the run directory is free, can be written, fast and large enough for what is kept.

    Args:
      config: the run's.
      needs: None: not known, and only looked at as it is.
    """
    if config.fast_dev_run:
        return
    folder, exists = nearest_folder(config.run_dir)
    if folder is None:
        yield from _remote(config)
        return
    if not folder.is_dir():
        yield Check("run_dir", "fail", f"{folder} is a file", "give the name of a folder in run_dir")
        return
    owner = lock_owner(Path(config.run_dir))
    if owner:
        yield Check("run_dir", "fail", f"{config.run_dir} is in use by {owner}", "stop it, or give another run_dir")
        return
    try:
        speed = write_speed(folder)
    except OSError as error:
        remedy = "set another run_dir, or mend its rights"
        yield Check("run_dir", "fail", f"{folder}: can't be written: {error.strerror or error}", remedy)
        return
    state = "holds a run" if (Path(config.run_dir) / "checkpoints").is_dir() else "exists" if exists else "will be made"
    yield Check("run_dir", "ok", f"{config.run_dir} {state}")
    yield from space(config, needs, folder, shutil.disk_usage(folder).free, speed)


def space(config: Config, needs: Needs | None, folder: Path, free: int, speed: float) -> Iterator[Check]:
    """Free space and speed against what is kept and saved.

    Args:
      config: the run's.
      needs: None: not known.
      folder: where it is written.
      free: bytes.
      speed: bytes a second.
    """
    if needs is None:
        yield Check("disk_space", "ok", f"{size(free)} free in {folder}")
        yield Check("write_speed", "ok", f"{size(speed)}/s")
        return
    one, copies = needs.checkpoint_bytes, checkpoints_kept(config)
    there = _size_of(Path(config.run_dir) / "checkpoints")
    if copies is None:
        need, text = one, f"a checkpoint takes {size(one)}, and all are kept (checkpoint.save_total_limit)"
    else:
        need = max(one, copies * one - there)
        text = f"{copies} checkpoints of {size(one)} (those kept, the best, and one on its way)"
        text += f", of which {size(there)} are there" if there else ""
    value = f"{size(free)} free in {folder}; {text}"
    if free < need:
        remedy = f"free {size(need - free)}, lower checkpoint.save_total_limit, or set another run_dir"
        yield Check("disk_space", "fail", value, remedy)
    elif copies is None:
        yield Check("disk_space", "warn", value, "set checkpoint.save_total_limit")
    else:
        yield Check("disk_space", "ok", value)
    seconds = one / speed if speed else float("inf")
    value = f"{size(speed)}/s from one process: a checkpoint in {seconds:,.1f} s"
    slow = seconds > _SLOW_SAVE_SECONDS
    remedy = "saves at smaller distances than that wait for each other: a faster disk, or more checkpoint.save_steps"
    yield Check("write_speed", "warn" if slow else "ok", value, remedy if slow else None)


def checkpoints_kept(config: Config) -> int | None:
    """Most checkpoints on disk at one time: those kept, the best, and the one being written; None: all of them."""
    section = config.checkpoint
    if section.save_total_limit is None:
        steps, every = config.max_steps, section.save_steps
        if not (isinstance(steps, int) and isinstance(every, int) and every):
            return None
        return -(-steps // every)
    best = section.keep_best if section.best and config.data.eval is not None else 0
    return max(section.save_total_limit, best + 1) + 1


def write_speed(folder: Path) -> float:
    """Bytes a second that reach the disk (with fsync): of 64 MiB, or what can be written in 3 s."""
    block, written = os.urandom(1 << 20), 0
    probe_ = folder / f".doctor-{uuid.uuid4().hex[:8]}"
    begun = time.monotonic()
    try:
        with probe_.open("wb") as file:
            while written < _SAMPLE_BYTES and time.monotonic() - begun < _SAMPLE_SECONDS:
                written += file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return written / max(time.monotonic() - begun, 1e-6)
    finally:
        with contextlib.suppress(OSError):
            probe_.unlink()


def nearest_folder(path: str) -> tuple[Path | None, bool]:
    """The folder itself or the nearest above it that exists, and whether it is itself; None for a URL."""
    if "://" in path:
        return None, False
    folder = Path(os.path.abspath(os.path.expanduser(path)))
    for candidate in (folder, *folder.parents):
        if candidate.exists():
            return candidate, candidate == folder
    return Path("/"), False


def lock_owner(run: Path) -> str | None:
    """Who holds a run directory; None: nobody does."""
    from jtrain.checkpoint.lease import holder_of

    with contextlib.suppress(OSError):
        holder = holder_of(run)
        return None if holder is None else str(holder)
    return None


def _remote(config: Config) -> Iterator[Check]:
    from etils import epath

    data = os.urandom(4 << 20)
    try:
        probe_ = epath.Path(config.run_dir) / f".doctor-{uuid.uuid4().hex[:8]}"
        begun = time.monotonic()
        probe_.parent.mkdir(parents=True, exist_ok=True)
        probe_.write_bytes(data)
        speed = len(data) / max(time.monotonic() - begun, 1e-6)
        probe_.unlink()
    except ImportError as error:
        yield Check("run_dir", "fail", f"{config.run_dir}: {error}", "pip install 'jtrain[gcs]' or 'jtrain[s3]'")
    except Exception as error:  # every store has errors of its own
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        yield Check(
            "run_dir", "fail", f"{config.run_dir} can't be written: {text}", "check the bucket and the credentials"
        )
    else:
        yield Check("run_dir", "ok", f"{config.run_dir} can be written, {size(speed)}/s for an object of 4 MiB")


def _size_of(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.path.getsize(os.path.join(root, name))
    return total
