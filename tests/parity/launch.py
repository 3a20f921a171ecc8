"""`jtrain train` in processes of its own: on loopback, with a time limit, ended by id."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("process_worker.py")
# Compiling is most of the cost of these runs: level 0 halves it.
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

# What gloo prints, from several threads at once: its words may come in any order.
GLOO = re.compile(r"\[Gloo\] Rank|is connected to|peer ranks\.|Expected number of connected peer ranks is :|\d+")


@dataclass
class Running:
    """A process and what it has printed so far; gloo's own lines are left out."""

    process: subprocess.Popen[bytes]
    folder: Path
    name: str

    @property
    def out(self) -> str:
        lines = (self.folder / f"{self.name}.out").read_text().splitlines(keepends=True)
        return "".join(line for line in lines if GLOO.sub("", line).strip())

    @property
    def err(self) -> str:
        return (self.folder / f"{self.name}.err").read_text()

    @property
    def steps(self) -> list[int]:
        """Steps whose lines were printed."""
        return [int(step) for step in re.findall(r"^step (\d+)/", self.out, re.MULTILINE)]

    def wait(self, seconds: float = 240) -> int:
        """The exit code. Past the limit the process is killed, which fails the test."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{self.name} hangs\n{self.out[-2000:]}\n{self.err[-2000:]}") from None


def start(config: dict[str, Any], name: str, *flags: str, fault: tuple[str, int] | None = None) -> Running:
    """Starts `jtrain train` with the config; its files lie beside the run directory."""
    folder = Path(config["run_dir"]).parent
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    program = ["-m", "jtrain"] if fault is None else [str(WORKER), fault[0], str(fault[1])]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS, "PYTHONPATH": str(ROOT)}
    with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.err").open("wb") as err:
        command = [sys.executable, *program, "train", str(path), *flags]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err)
    return Running(process, folder, name)


def start_several(config: dict[str, Any], name: str, faults: list[tuple[str, int]]) -> list[Running]:
    """Starts one process for each fault; together they are one run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = ("--distributed.coordinator_address", address, "--distributed.num_processes", str(len(faults)))
    return [
        start(config, f"{name}.{index}", *flags, "--distributed.process_id", str(index), fault=fault)
        for index, fault in enumerate(faults)
    ]


def wait_all(running: list[Running], seconds: float = 240) -> list[int]:
    """The exit codes."""
    deadline = time.monotonic() + seconds
    try:
        return [one.wait(max(deadline - time.monotonic(), 0.1)) for one in running]
    finally:
        for one in running:
            if one.process.poll() is None:
                one.process.kill()
                one.process.wait()
