"""`jtrain launch slurm CONFIG --hosts N`."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import Any

from jtrain.cli.launch import one_of
from jtrain.errors import ConfigError
from jtrain.launch.hosts import parse_hosts
from jtrain.launch.job import Job, need_program
from jtrain.launch.slurm import Batch, follow, logs, script, submit

USAGE = "jtrain launch slurm CONFIG [--hosts N | N:M] [--gpus-per-node G] [--options] [--flags]"
OPTIONS: dict[str, type] = {
    "hosts": str, "gpus-per-node": int, "per": str, "job-name": str, "partition": str, "account": str, "time": str,
    "sbatch": list, "setup": list, "python": str, "container-image": str, "container-mounts": str,
    "signal-seconds": int, "array": str, "vary": str, "follow": bool, "dry-run": bool,
}  # fmt: skip
HELP = f"""usage: {USAGE}

Submits a batch job that runs `jtrain train CONFIG` on N nodes. By its exit code it puts itself back into the queue: 10
and 11 (preempted) as often as need be; 12, 13 and killed processes up to faults.max_infra_restarts times in a row
without a new durable step; the same at the same step three times is a crash loop (exit 70). Other codes end it.

  --hosts N | N:M          nodes (1); with N:M Slurm gives what it has
  --gpus-per-node G        GPUs of a node
  --per node | gpu         what has a process (node)
  --partition, --account, --time, --job-name
                           options of sbatch by the same names
  --sbatch OPTION          further ones, without dashes: --sbatch qos=high --sbatch constraint=h100
  --setup COMMAND          shell commands before the run: --setup 'module load cuda'; may come several times
  --python PATH            the interpreter on the nodes ({sys.executable})
  --container-image IMAGE, --container-mounts A:B
                           runs in a container (pyxis)
  --signal-seconds N       the run saves so long before the time limit (300)
  --array INDICES          several runs, each in its own folder below the run directory; --vary FIELD gives a field the
                           index (--array 0-3 --vary seed)
  --follow                 show the log, and return the exit code of the job
  --dry-run                print the batch script, and submit nothing

The log lies in the run directory, slurm-JOB.out; a requeued job goes on with it."""


def launch(job: Job, options: dict[str, Any]) -> int:
    """Submits, and returns the exit code."""
    batch = batch_of(job, options)
    text = script(job, batch)
    if options.get("dry-run"):
        print(text, end="")
        return 0
    need_program("sbatch", "Run it where jobs are submitted (a login node), or use --dry-run.")
    number = submit(text, job)
    log = logs(job) / f"slurm-{number}{'_*' if batch.array else ''}.out"
    print(f"job {number} is submitted; its log: {log}; scancel --signal=USR1 --batch {number} saves and requeues it")
    if not options.get("follow"):
        return 0
    return follow(number, job, lambda said: print(said, end="", flush=True), time.sleep)


def batch_of(job: Job, options: dict[str, Any]) -> Batch:
    """What the options ask of Slurm.

    Raises:
      ConfigError: a value that can't be.
    """
    for name, least in (("gpus-per-node", 0), ("signal-seconds", 1)):
        if options.get(name, least) < least:
            raise ConfigError(f"--{name}: {options[name]}", f"Write a number of at least {least}.")
    if options.get("follow") and options.get("array"):
        raise ConfigError("--follow beside --array: there are several logs", "Leave out --follow.")
    common = [f"{name}={options[name]}" for name in ("partition", "account", "time") if name in options]
    further = [option.removeprefix("--") for option in options.get("sbatch", [])]
    for option in further:
        if not re.fullmatch(r"[a-z][a-z-]*(=[^\n]*)?", option):
            raise ConfigError(f"--sbatch: {option!r} is no option of sbatch", "Write it as qos=high.")
    default = re.sub(r"[^\w.-]", "-", Path(job.config.run_dir).name) or "jtrain"
    return Batch(
        options.get("job-name", default),
        parse_hosts(options.get("hosts", "1")),
        one_of(options, "per", ("node", "gpu"), "node"),
        options.get("gpus-per-node", 0),
        (*common, *further),
        tuple(options.get("setup", ())),
        options.get("python", sys.executable),
        options.get("container-image", ""),
        options.get("container-mounts", ""),
        options.get("signal-seconds", 300),
        options.get("array", ""),
        options.get("vary", ""),
    )
