"""The processes of a run, and the one place that touches `jax.distributed`.

`start(config)` chooses the platform, makes CPU devices where they are asked for, and joins the other processes; it has
to come before the first use of a device. On TPU pods, under Slurm and on GKE the processes find each other; elsewhere
`distributed.*` says where the coordinator is.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jtrain import progress
from jtrain.config.schema import Config, DistributedConfig
from jtrain.errors import ConfigError, PeerLostError
from jtrain.parallel import lost
from jtrain.parallel.compile_cache import find_cache

log = logging.getLogger(__name__)

_PLATFORMS = {"cpu": "cpu", "gpu": "cuda,rocm", "tpu": "tpu"}


def start(config: Config) -> list[jax.Device]:
    """Brings up the backend and joins the other processes.

    Returns:
      The devices of the run (all processes').

    Raises:
      ConfigError: the accelerator is not there, or `devices` asks for more than there are.
      PeerLostError: the coordinator or a process did not answer.
    """
    processes = config.distributed.num_processes or _detected_processes() or 1
    if not _backend_is_up():
        _choose_platform(config, processes)
        _compile_cache(config.compile_cache)
        if processes > 1 and not jax.distributed.is_initialized():
            progress.report("join")
            _join(config.distributed)
            progress.report("init")
    if lost.several():
        lost.watch()
    _set_x64(config.precision == "64-true")
    return devices_of(config)


_own_x64 = False


def _set_x64(wanted: bool) -> None:
    """float64 for the run that wants it; the next run in this program is again without, unless its user chose so."""
    global _own_x64
    if wanted and not jax.config.jax_enable_x64:
        jax.config.update("jax_enable_x64", True)
        _own_x64 = True
    elif not wanted and _own_x64:
        jax.config.update("jax_enable_x64", False)
        _own_x64 = False


def is_main() -> bool:
    """Whether this process writes the run's files and prints (process 0)."""
    return jax.process_index() == 0


def agree(value: Any) -> Any:
    """Process 0's value of a number or a small numpy array, on every process."""
    if jax.process_count() == 1:
        return value
    return multihost_utils.broadcast_one_to_all(np.asarray(value))


def _backend_is_up() -> bool:
    from jax._src import xla_bridge  # no public question exists; asking for devices would start the backend

    return xla_bridge.backends_are_initialized()


def _choose_platform(config: Config, processes: int) -> None:
    if config.accelerator != "auto":
        jax.config.update("jax_platforms", _PLATFORMS[config.accelerator])
    if config.accelerator == "cpu" and config.devices != "auto":
        if config.devices % processes:
            raise ConfigError(
                f"devices={config.devices} can't be divided over distributed.num_processes={processes}",
                f"write a multiple of {processes}",
            )
        jax.config.update("jax_num_cpu_devices", config.devices // processes)
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")


def _compile_cache(setting: str) -> None:
    try:
        folder = find_cache(setting)
    except OSError as error:
        log.warning("no compile cache: %s", error)
        return
    if folder is not None and folder.field == "compile_cache":  # else jax has read it, with what its variables say
        jax.config.update("jax_compilation_cache_dir", folder.path)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _detected_processes() -> int | None:
    """Number of processes as the launcher's environment tells it (Slurm, Open MPI, TPU pods, GKE), else None."""
    # SLURM_NTASKS alone is also set in a batch script and after salloc, where srun has started nothing.
    slurm = "SLURM_NTASKS" if "SLURM_STEP_NODELIST" in os.environ else ""
    for name in (slurm, "OMPI_COMM_WORLD_SIZE"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "")
    slices = os.environ.get("MEGASCALE_NUM_SLICES", "1")
    return (hosts.count(",") + 1) * (int(slices) if slices.isdigit() else 1) if hosts else None


def _check_port(address: str) -> None:
    """Raises:
    PeerLostError: somebody listens there; jax would end with a segmentation fault, and without a word of why.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_server((host.strip("[]"), int(port)), family=_family(host)):
            pass
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PeerLostError(
                f"distributed.coordinator_address: {address} is taken: another program listens there",
                "end it (an earlier start of this run?), or give another port",
            ) from error
    except ValueError:  # no address: jax says so
        pass


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _join(distributed: DistributedConfig) -> None:
    # Its notifier would take SIGTERM away from us (jtrain/train/preemption.py), and hold it until somebody asks.
    jax.config.update("jax_enable_preemption_service", False)
    # By itself jax listens on every interface.
    arguments: dict[str, Any] = {}
    if distributed.bind_address:
        arguments = {"coordinator_bind_address": distributed.bind_address}
    if distributed.coordinator_address:
        arguments = {
            "coordinator_address": distributed.coordinator_address,
            "num_processes": distributed.num_processes,
            "process_id": distributed.process_id,
            "coordinator_bind_address": distributed.bind_address or distributed.coordinator_address,
        }
        if distributed.process_id == 0:
            _check_port(arguments["coordinator_bind_address"])
    try:
        jax.distributed.initialize(**arguments)
    except ValueError as error:
        raise ConfigError(
            f"distributed.num_processes={distributed.num_processes}: {error}",
            "give distributed.coordinator_address, num_processes and process_id on every process",
        ) from error
    except RuntimeError as error:
        raise PeerLostError(
            f"process {distributed.process_id} could not join {distributed.coordinator_address}: {error}",
            "see that every process was started with the same address, and that the port is open",
        ) from error


def devices_of(config: Config) -> list[jax.Device]:
    """The devices of a run, of all processes; the backend is up.

    Raises:
      ConfigError: the accelerator is not there, or `devices` asks for more than there are.
    """
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise lost.as_peer_lost(error) or ConfigError(
            f"accelerator={config.accelerator!r}: {str(error).splitlines()[0]}",
            "install the extra for it (pip install 'jtrain[cuda12]' or 'jtrain[tpu]'), or write accelerator: cpu",
        ) from error
    platform = devices[0].platform
    if config.accelerator != "auto" and platform != config.accelerator:
        raise ConfigError(
            f"accelerator={config.accelerator!r}, but jax already runs on {platform!r} in this process",
            "choose the accelerator before the first use of jax",
        )
    if config.devices == "auto" or config.devices == len(devices):
        return devices
    if config.devices > len(devices) or jax.process_count() > 1:
        remedy = "write devices: auto, or accelerator: cpu to try the mesh on CPU devices"
        raise ConfigError(f"devices={config.devices}, but there are {len(devices)} {platform} devices", remedy)
    return devices[: config.devices]


def shutdown() -> None:
    """Leaves the other processes in an orderly way, at the end of a run that went well."""
    if jax.process_count() > 1:
        progress.report("shutdown")
        with contextlib.suppress(RuntimeError):
            jax.distributed.shutdown()
