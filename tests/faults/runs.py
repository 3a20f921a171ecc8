"""Runs of two processes whose model is a line: started, ended by id, and compared bit by bit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from jtrain.observe.metrics import read_events
from tests.parity.launch import Running, wait_all
from tests.parity.test_kill import result
from tests.train.fits import settings

ROOT = Path(__file__).parents[2]
STEPS = 20


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """Twenty updates, evaluated and saved at every fourth."""
    return settings(
        folder / "run",
        **{
            "task": "pretrain",
            "max_steps": STEPS,
            "devices": 2,
            "checkpoint": {"save_steps": 4, "best": None},
            "eval": {"eval_steps": 4},
            "logging": {"log_every_n_steps": 1, "trackers": []},
            **changes,
        },
    )


def start(
    config: dict[str, Any],
    name: str,
    *,
    fault: str = "",
    rank: int = 0,
    program: str = "linear_run.py",
    **environment: str,
) -> list[Running]:
    """Starts both processes; one of them has the fault."""
    folder = Path(config["run_dir"]).parent
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    running = []
    for number in range(2):
        own = {"FAULT": fault} if fault and number == rank else {}
        with (folder / f"{name}.{number}.out").open("wb") as out, (folder / f"{name}.{number}.err").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name(program)), "train", str(path),
                 "--distributed.coordinator_address", address, "--distributed.num_processes", "2",
                 "--distributed.process_id", str(number)],
                cwd=folder,
                env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)} | own | environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )  # fmt: skip
        running.append(Running(process, folder, f"{name}.{number}"))
    return running


def wait_for(running: list[Running], true: Any, seconds: float = 300) -> None:
    """Waits while both are there."""
    deadline = time.monotonic() + seconds
    while not true():
        alive = all(one.process.poll() is None for one in running)
        assert alive and time.monotonic() < deadline, said(running)
        time.sleep(0.02)


def said(running: list[Running]) -> str:
    return "\n".join(f"--- {one.name}\n{one.out[-2000:]}\n{one.err[-3000:]}" for one in running)


def codes(running: list[Running], seconds: float = 300) -> list[int]:
    return wait_all(running, seconds)


def durable(config: dict[str, Any]) -> list[int]:
    """Steps on the disk."""
    folder = Path(config["run_dir"]) / "checkpoints"
    return sorted(int(path.parent.name) for path in folder.glob("*/manifest.json") if path.parent.name.isdigit())


def events(config: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return read_events(config["run_dir"], name)


def goes_on(config: dict[str, Any], reference: dict[str, Any], name: str = "again") -> None:
    """Started again without a fault it ends with the bits and the lines of an undisturbed run, and leaves nothing."""
    again = start(config, name)
    assert codes(again) == [0, 0], said(again)
    found = result(config)
    for part in ("step", "counters", "lines", "bits"):
        assert found[part] == reference[part], part
    left = [path.name for path in (Path(config["run_dir"]) / "checkpoints").iterdir()]
    assert all(name.isdigit() or name.startswith("_") for name in left), left


def undisturbed(folder: Path) -> dict[str, Any]:
    """What a run ends with that nothing happens to."""
    config = config_of(folder)
    running = start(config, "whole")
    assert codes(running) == [0, 0], said(running)
    return result(config)
