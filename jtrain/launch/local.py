"""`jtrain launch local`: n processes on this machine."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jtrain.errors import ConfigError
from jtrain.launch.attempt import Outcome
from jtrain.launch.gang import Worker
from jtrain.launch.hosts import Hosts
from jtrain.launch.job import Job

_NVIDIA = Path("/proc/driver/nvidia/gpus")
LEASH = ("-m", "jtrain.launch.leash")


class Local:
    """Processes of this machine; a "host" is one of them.

    Args:
      job: what they run.
      least, most: how many; the run goes on with fewer than `most` when some are lost.

    Raises:
      ConfigError: the run can't be divided so.
    """

    def __init__(self, job: Job, least: int, most: int):
        self._job, self._most = job, most
        self._elastic = least < most
        config = job.config
        if most > 1 and config.accelerator == "tpu":
            raise ConfigError(
                f"--hosts {most} with accelerator: tpu: one process holds all TPU chips of a machine",
                "Write --hosts 1; the hosts of a slice are started by jtrain launch tpu.",
            )
        if self._elastic:
            job.check_elastic(least, most)
        elif most > 1:
            job.changed("--distributed.num_processes", str(most))  # refused here, and not n times
        self._gpus = gpu_shares(most) if config.accelerator in ("auto", "gpu") else None
        self._hosts = Hosts([f"local{n}" for n in range(most)], least, self._refused)
        if self._elastic and (refusal := self._refused(least)) is not None:
            raise ConfigError(
                f"--hosts {least}:{most}, and the run can't go on with {least}: {refusal}",
                f"Write a mesh with an axis of -1, which takes what is there; or --hosts {most}.",
            )

    def workers(self, environment: dict[str, str], stopping: Callable[[], int] = lambda: 0) -> Sequence[Worker]:
        """See `Platform`."""
        hosts = self._hosts.choose()
        address = free_address()
        workers = []
        for rank, host in enumerate(hosts):
            own = dict(environment)
            if len(hosts) > 1:
                own |= meeting(address, len(hosts), rank)
            if self._gpus is not None:
                own["CUDA_VISIBLE_DEVICES"] = self._gpus[int(host.removeprefix("local"))]
            train = self._job.command(sys.executable, *self._fewer(len(hosts)))
            workers.append(Worker(host, [sys.executable, *LEASH, *train], own))
        return workers

    def look(self) -> tuple[str, str] | None:
        """See `Platform`."""
        if self._elastic and (host := self._hosts.back()) is not None:
            return "leave", f"{host} may take part again: the run saves and goes on with more processes"
        return None

    def ended(self, outcome: Outcome) -> None:
        """See `Platform`."""
        if self._elastic and outcome.lost_host is not None:
            self._hosts.lost(outcome.lost_host)

    def _fewer(self, count: int) -> list[str]:
        """Flags by which a run on fewer hosts has their devices alone."""
        devices = self._devices(count)
        return [] if not self._elastic or devices is None else ["--devices", str(devices)]

    def _devices(self, count: int) -> int | None:
        """Devices of so many processes; None: as many as there are."""
        config = self._job.config
        if config.devices != "auto":
            return config.devices // self._most * count
        return count if config.accelerator == "cpu" else None

    def _refused(self, count: int) -> str | None:
        """Why the run can't be divided over so many processes."""
        try:
            self._job.changed(*self._fewer(count), "--distributed.num_processes", str(count))
        except ConfigError as error:
            return error.message
        return None


def meeting(address: str, count: int, rank: int) -> dict[str, str]:
    """The environment by which processes find each other."""
    names = {"COORDINATOR_ADDRESS": address, "NUM_PROCESSES": str(count), "PROCESS_ID": str(rank)}
    return {f"JTRAIN_DISTRIBUTED__{name}": value for name, value in names.items()}


def free_address() -> str:
    """A port of this machine that nobody has now; another one for each attempt, since the last may still be held."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def gpu_shares(count: int) -> list[str] | None:
    """CUDA_VISIBLE_DEVICES of each process, where there are GPUs and several processes.

    Raises:
      ConfigError: they can't be divided.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        visible = ",".join(str(n) for n, _ in enumerate(_NVIDIA.iterdir())) if _NVIDIA.is_dir() else ""
    gpus = [name for name in visible.split(",") if name]
    if not gpus or count == 1:
        return None
    if len(gpus) % count:
        raise ConfigError(
            f"--hosts {count}: {len(gpus)} GPUs can't be divided over {count} processes",
            f"Write a divisor of {len(gpus)}, or set CUDA_VISIBLE_DEVICES.",
        )
    size = len(gpus) // count
    return [",".join(gpus[n * size : (n + 1) * size]) for n in range(count)]
