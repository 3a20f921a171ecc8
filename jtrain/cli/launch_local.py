"""`jtrain launch local CONFIG --hosts N`."""

from __future__ import annotations

from typing import Any

from jtrain.cli.launch import supervise
from jtrain.launch.hosts import parse_hosts
from jtrain.launch.job import Job, shell
from jtrain.launch.local import Local
from jtrain.launch.supervisor import WORKER_ENVIRONMENT
from jtrain.progress import ATTEMPT

USAGE = "jtrain launch local CONFIG [--hosts N | N:M] [--dry-run] [--flags]"
OPTIONS: dict[str, type] = {"hosts": str, "dry-run": bool}
HELP = f"""usage: {USAGE}

Starts N processes of `jtrain train CONFIG` on this machine, prints their output with their numbers, and watches them.
When one is lost, or the run hangs or fails, all of them are killed and started again from the newest durable step.

  --hosts N      number of processes (1)
  --hosts N:M    M of them; when some are lost the run goes on with at least N, with the same global batch and data,
                 and with all again when they come back
  --dry-run      print the commands, and run nothing
  --max-restarts N, --max-infra-restarts N
                 fields of the config (faults): after errors of the run, in all; and after lost machines, hangs and full
                 disks, in a row without a new durable step. Preemptions count for nothing.

SIGTERM and Ctrl-C are passed on to the run, which saves and ends. The exit code is that of the run; 70 for a crash loop
(the same error at the same durable step three times)."""


def launch(job: Job, options: dict[str, Any]) -> int:
    """Runs, and returns the exit code."""
    platform = Local(job, *parse_hosts(options.get("hosts", "1")))
    if not options.get("dry-run"):
        return supervise(platform, job)
    for worker in platform.workers({**WORKER_ENVIRONMENT, ATTEMPT: "1"}):
        print(f"# {worker.host}\n{shell(worker.command, worker.environment)}")
    return 0
