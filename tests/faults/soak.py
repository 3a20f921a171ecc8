"""A run of two processes under `jtrain launch local`, and what is done to it: one fault after the other, at random.

The model is a line, so that nearly all of the time goes into what is tested: ends and starts. The run directory lies on
a file system of its own where one can be mounted; the ledger of rows lies beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from jtrain.cli.drill_runs import left_files
from jtrain.train.row_ledger import recovered_at
from tests.faults.runs import ROOT, config_of, durable

RECOVERY_SECONDS = 150.0
"""A run that does not get on for so long after a fault has not recovered."""
LIMITS = "step=10,data_wait=10,eval=10,restore=60,compile=60,save_stall=60"
SAVE_STEPS = 20
SHARES = {"kill": 20, "kill_again": 12, "stop": 14, "term": 16, "corrupt": 18, "disk_full": 12, "slow_disk": 8}
"""Faults of each kind in a hundred."""


@dataclass
class Result:
    """What came of a fault.

    Attributes:
      seconds: from the fault (for a full disk: from the return of its space) to the first update, where the run was
        started again, or to the first durable step, where it was not; None: it did not recover.
    """

    kind: str
    what: str
    seconds: float | None
    restarted: bool = False


@dataclass
class Soak:
    """The run, its supervisor, and the generator of faults."""

    folder: Path
    seed: int
    results: list[Result] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.disk, self.ledger = self.folder / "disk", self.folder / "ledger"
        self.disk.mkdir()
        self.ledger.mkdir()
        self.config = soak_config(self.disk)
        (self.folder / "run.yaml").write_text(yaml.safe_dump(self.config))
        self.environment = worker_environment(self.folder, self.ledger) | {"SLOW": "0.03"}
        self.said = self.folder / "said"
        self.supervisor: subprocess.Popen[bytes] | None = None

    # -- the run ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        command = [sys.executable, "-m", "jtrain", "launch", "local", str(self.folder / "run.yaml"), "--hosts", "2"]
        with self.said.open("ab") as said:
            self.supervisor = subprocess.Popen(
                command, cwd=self.folder, env=os.environ | self.environment, stdout=said, stderr=said
            )

    @property
    def is_up(self) -> bool:
        return self.supervisor is not None and self.supervisor.poll() is None

    def workers(self) -> dict[int, psutil.Process]:
        """The processes that train, by rank."""
        assert self.supervisor is not None
        found = {}
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.supervisor.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error, KeyError):
                    if "train" in child.cmdline() and "jtrain.launch.leash" not in child.cmdline():
                        found[int(child.environ()["JTRAIN_DISTRIBUTED__PROCESS_ID"])] = child
        return found

    def tail(self) -> tuple[float, float, int]:
        """Of process 0: when it last began, when its last update was done, and that update."""
        began, done, step = 0.0, 0.0, 0
        with contextlib.suppress(OSError), (self.ledger / "rows-0.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 15)))
            for line in file.read().splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    said = json.loads(line)
                    if said["kind"] == "start":
                        began = said["time"]
                    elif said["kind"] == "done":
                        done, step = said["time"], said["step"]
        return began, done, step

    def newest(self) -> int:
        return max(durable(self.config), default=0)

    def wait(self, true: Callable[[], bool], seconds: float = RECOVERY_SECONDS) -> bool:
        deadline = time.monotonic() + seconds
        while not true():
            if not self.is_up or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def is_well(self, before: int, since: float) -> bool:
        """Whether a step newer than `before` is durable, and an update was made since, by the newest start."""
        began, done, _ = self.tail()
        return self.newest() > before and done > max(since, began)

    # -- faults -------------------------------------------------------------------------------------------------------

    def kinds(self, count: int) -> list[str]:
        """So many kinds, in the proportions of `SHARES`, in a random order, without those that can't be had here."""
        shares = dict(SHARES)
        if not os.path.ismount(self.disk):
            del shares["disk_full"]
        if not can_trace():
            del shares["slow_disk"]
        names = [kind for kind, share in shares.items() for _ in range(share)]
        self.rng.shuffle(names)
        names = (names * (count // len(names) + 1))[:count]
        if count <= len(shares):  # a short one has as many kinds as it can
            names = self.rng.sample(sorted(shares), count)
        return names

    def fault(self, kind: str) -> Result:
        """One fault, and the recovery from it."""
        time.sleep(self.rng.uniform(0.0, 1.5))
        before, rank = self.newest(), self.rng.randrange(2)
        try:
            what, at = getattr(self, kind)(rank)
        except (psutil.Error, KeyError, IndexError) as error:  # it ended just then
            what, at = f"{kind}: {error!r}", time.time()
        stays = kind in ("disk_full", "slow_disk")
        recovered = self.wait(lambda: self.is_well(before, at) and (stays or self.tail()[0] > at))
        restarted = self.tail()[0] > at
        seconds = None
        if recovered:
            seconds = (recovered_at(self.ledger, at) if restarted else time.time()) - at
        result = Result(kind, what, seconds, restarted)
        self.results.append(result)
        if not recovered and not self.is_up:
            self.start()
            self.wait(lambda: self.is_well(before, at))
        return result

    def kill(self, rank: int) -> tuple[str, float]:
        at = time.time()
        self.workers()[rank].kill()
        return f"SIGKILL of rank {rank}", at

    def kill_again(self, rank: int) -> tuple[str, float]:
        """Once more while the next attempt starts, compiles, restores, or makes its first steps."""
        first = self.workers()[rank]
        first.kill()
        self.wait(lambda: len(found := self.workers()) == 2 and first not in found.values(), 60)
        again, delay = self.rng.randrange(2), self.rng.uniform(0.0, 8.0)
        time.sleep(delay)
        at = time.time()
        self.workers()[again].kill()
        return f"SIGKILL of rank {rank}, and of rank {again} {delay:.1f} s after the next start", at

    def stop(self, rank: int) -> tuple[str, float]:
        at = time.time()
        self.workers()[rank].suspend()
        return f"SIGSTOP of rank {rank}", at

    def term(self, rank: int) -> tuple[str, float]:
        ranks = [0, 1] if self.rng.random() < 0.3 else [rank]
        found, at = self.workers(), time.time()
        for each in ranks:
            found[each].terminate()
        return f"SIGTERM of rank {' and '.join(map(str, ranks))}", at

    def corrupt(self, rank: int) -> tuple[str, float]:
        """The newest step is damaged, and nothing newer gets durable before the next start."""
        found = self.workers()
        for each in found.values():  # held: neither a save nor retention may come between
            each.suspend()
        newest = Path(self.config["run_dir"]) / "checkpoints" / str(self.newest())
        files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
        path, action = self.rng.choice(files), self.rng.choice(["flip", "zero", "delete", "cut"])
        damage(path, action, self.rng)
        at = time.time()
        for each in found.values():
            each.kill()
        return f"{action} of {path.relative_to(newest.parent)}, and SIGKILL of both", at

    def disk_full(self, rank: int) -> tuple[str, float]:
        filler, seconds = self.disk / "filler", self.rng.uniform(0.5, 4.0)
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
        time.sleep(seconds)
        filler.unlink()
        return f"no space for {seconds:.1f} s", time.time()

    def slow_disk(self, rank: int) -> tuple[str, float]:
        at, seconds = time.time(), self.rng.uniform(2.0, 4.0)
        command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=fsync", "-e",
                   "inject=fsync:delay_enter=300000", "-p", str(self.workers()[rank].pid)]  # fmt: skip
        tracer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(seconds)
        tracer.send_signal(signal.SIGINT)
        tracer.wait(30)
        return f"300 ms for each fsync of rank {rank}, for {seconds:.1f} s", at

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self) -> int | None:
        """Asks the run to stop for good, by a STOP file; the exit code of its supervisor."""
        assert self.supervisor is not None
        stop = Path(self.config["run_dir"]) / "STOP"
        stop.touch()
        try:
            code = self.supervisor.wait(120)
        except subprocess.TimeoutExpired:
            code = None
        stop.unlink()
        return code

    def close(self) -> None:
        if self.supervisor is not None and self.supervisor.poll() is None:
            self.supervisor.kill()
            self.supervisor.wait()

    def left_behind(self) -> list[str]:
        """Processes of the run, and files of saves that were not finished."""
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("LEDGER") == str(self.ledger) and process.status() != psutil.STATUS_ZOMBIE:
                    processes.append(f"process {process.pid}: {process.cmdline()}")
        run = Path(self.config["run_dir"])
        return processes + [str(run / name) for name in left_files(run)]

    def report(self) -> dict[str, Any]:
        """The figures."""
        good = [result for result in self.results if result.seconds is not None]
        kinds = {
            kind: {
                "faults": len(all_of),
                "recovered": len([r for r in all_of if r.seconds is not None]),
                "restarted": len([r for r in all_of if r.restarted]),
                **summary([r.seconds for r in all_of if r.seconds is not None]),
            }
            for kind in SHARES
            if (all_of := [result for result in self.results if result.kind == kind])
        }
        restarts = summary([r.seconds for r in good if r.restarted and r.seconds is not None])
        failed = [f"{result.kind}: {result.what}" for result in self.results if result.seconds is None]
        figures = {"faults": len(self.results), "recovered": len(good), "seed": self.seed}
        return figures | {"recovery_seconds": restarts, "kinds": kinds, "failed": failed}


def summary(seconds: list[float]) -> dict[str, float | None]:
    """Median and 90th percentile."""
    if not seconds:
        return {"median": None, "p90": None}
    ordered = sorted(seconds)
    return {"median": round(statistics.median(ordered), 2), "p90": round(ordered[int(0.9 * (len(ordered) - 1))], 2)}


def soak_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run without an end, on shuffled rows, with a constant learning rate: its end changes no update before it."""
    fields: dict[str, Any] = {
        "max_steps": 1_000_000,
        "checkpoint": {"save_steps": SAVE_STEPS, "best": None},
        "eval": {"eval_steps": 2 * SAVE_STEPS},
        "data": {"shuffle": True},
        **changes,
    }
    return config_of(folder, **fields)


def worker_environment(folder: Path, ledger: Path) -> dict[str, str]:
    """What makes `jtrain train` train the line, with a ledger; below a supervisor as well."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "if sys.orig_argv[1:4] == ['-m', 'jtrain', 'train']:\n"
        "    from tests.faults.linear_run import install\n"
        "    install()\n"
    )
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": f"{folder}:{ROOT}", "LIMITS": LIMITS,
            "LEDGER": str(ledger)}  # fmt: skip


def damage(path: Path, action: str, rng: random.Random) -> None:
    """Flips a bit of a file, zeroes it, cuts it, or deletes it."""
    data = bytearray(path.read_bytes())
    if action == "delete":
        path.unlink()
        return
    if action == "flip":
        at = rng.randrange(8 * len(data))
        data[at // 8] ^= 1 << at % 8
    elif action == "zero":
        data = bytearray(len(data))
    else:
        data = data[: len(data) // 2]
    path.write_bytes(data)


def can_trace() -> bool:
    """Whether strace is here, and may look at processes of ours."""
    if not shutil.which("strace"):
        return False
    sleeper = subprocess.Popen(["sleep", "5"])
    tracer = subprocess.Popen(
        ["strace", "-o", "/dev/null", "-p", str(sleeper.pid)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    time.sleep(0.5)
    attached = tracer.poll() is None
    for process in (tracer, sleeper):
        process.terminate()
        process.wait()
    assert tracer.stderr is not None
    tracer.stderr.close()
    return attached


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of 24 MiB of its own in `folder`, where this user may mount one."""
    mounted = False
    if os.getuid() == 0 and shutil.which("mount"):
        command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)
