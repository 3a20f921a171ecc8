"""The commands of gcloud that a TPU slice takes, as lists of words, and how they are run.

https://cloud.google.com/sdk/gcloud/reference/compute/tpus/queued-resources/create, .../describe, .../delete
https://cloud.google.com/sdk/gcloud/reference/compute/tpus/tpu-vm/ssh, .../scp, .../describe
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jtrain.errors import ConfigError

# A connection that is cut without a word is noticed after two minutes; no terminal, so that no byte is changed.
_SSH_FLAGS = ("-T", "-o ServerAliveInterval=15", "-o ServerAliveCountMax=8", "-o BatchMode=yes")
RUNTIME_VERSIONS = {
    "v2": "tpu-ubuntu2204-base",
    "v3": "tpu-ubuntu2204-base",
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
"""Type of slice -> the runtime that JAX runs on (https://cloud.google.com/tpu/docs/runtimes)."""


@dataclass(frozen=True)
class Slice:
    """A TPU slice, made or to be made.

    Attributes:
      name: of its node and of its queued resource.
      zone, project: where; no project: gcloud's own.
      accelerator_type: `v5p-64`; empty: it is there already, and is not made.
      runtime_version: of the machines.
      spot: cheaper, and may be preempted.
      options: further options of `queued-resources create`.
      connection: `--internal-ip` or `--tunnel-through-iap`, for hosts without an address of their own.
    """

    name: str
    zone: str
    project: str = ""
    accelerator_type: str = ""
    runtime_version: str = ""
    spot: bool = False
    options: tuple[str, ...] = ()
    connection: tuple[str, ...] = ()

    def _command(self, group: str, verb: str, *words: str) -> list[str]:
        project = [f"--project={self.project}"] if self.project else []
        track = ["alpha"] if "--tunnel-through-iap" in words else []  # only there has it tunnels to TPU VMs
        return ["gcloud", *track, "compute", "tpus", group, verb, *words, f"--zone={self.zone}", *project, "--quiet"]

    def describe_request(self) -> list[str]:
        """The state of the queued resource."""
        return self._command("queued-resources", "describe", self.name, "--format=json")

    def describe_node(self) -> list[str]:
        """The state of the machines."""
        return self._command("tpu-vm", "describe", self.name, "--format=json")

    def create(self) -> list[str]:
        """Asks for the machines."""
        spot = ["--spot"] if self.spot else []
        return self._command(
            "queued-resources", "create", self.name, f"--node-id={self.name}",
            f"--accelerator-type={self.accelerator_type}", f"--runtime-version={self.runtime_version}",
            *spot, *self.options, "--async",
        )  # fmt: skip

    def delete(self) -> list[str]:
        """Gives the machines back, and takes the request out of the queue."""
        return self._command("queued-resources", "delete", self.name, "--force")

    def ssh(self, worker: int | str, command: str) -> list[str]:
        """Runs a command on a host, or on `all`."""
        flags = [f"--ssh-flag={flag}" for flag in _SSH_FLAGS]
        words = (f"--worker={worker}", *self.connection, *flags, f"--command={command}")
        return self._command("tpu-vm", "ssh", self.name, *words)

    def copy(self, source: str, target: str) -> list[str]:
        """Copies a file or folder to all hosts."""
        return self._command("tpu-vm", "scp", "--recurse", "--worker=all", *self.connection, source,
                             f"{self.name}:{target}")  # fmt: skip


class Failed(Exception):
    """A command of gcloud that failed; its text is what it said."""


def answer(command: Sequence[str], timeout: float = 300.0) -> dict[str, Any] | None:
    """What a command says, as JSON; None: there is no such thing.

    Raises:
      Failed: it failed.
    """
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise Failed(f"no answer in {timeout:g} s") from None
    return read_answer(found.returncode, found.stdout, found.stderr)


def read_answer(code: int, out: str, err: str) -> dict[str, Any] | None:
    """See `answer`."""
    if code:
        if "not_found" in err.lower() or "not found" in err.lower():
            return None
        raise Failed(" ".join(err.split())[-400:] or f"exit code {code}")
    try:
        return json.loads(out) if out.strip() else {}
    except ValueError:
        raise Failed(f"no JSON: {out[:100]!r}") from None


def insist(call: Callable[[], Any], *, tries: int, sleep: Callable[[float], None] = time.sleep) -> Any:
    """The answer of a call that may fail for a while: the network, or gcloud's own limits.

    Raises:
      Failed: it failed each time.
    """
    for attempt in range(tries):
        try:
            return call()
        except Failed:
            if attempt == tries - 1:
                raise
            sleep(min(60.0, 2.0**attempt))
    raise AssertionError


def default_runtime(accelerator_type: str) -> str:
    """The runtime of a type of slice.

    Raises:
      ConfigError: it is not in the table.
    """
    kind = accelerator_type.partition("-")[0]
    if kind not in RUNTIME_VERSIONS:
        raise ConfigError(
            f"--accelerator-type: {accelerator_type!r}: its runtime is not known here",
            f"Known: {', '.join(RUNTIME_VERSIONS)} (as in v5p-64); or write --runtime-version.",
        )
    return RUNTIME_VERSIONS[kind]
