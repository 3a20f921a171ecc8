"""`jtrain launch tpu CONFIG --name NAME --zone ZONE`."""

from __future__ import annotations

import shlex
from typing import Any

from jtrain import __version__
from jtrain.cli.launch import supervise
from jtrain.errors import ConfigError
from jtrain.launch.gcloud import Slice, default_runtime
from jtrain.launch.job import Job, need_program
from jtrain.launch.supervisor import WORKER_ENVIRONMENT, say
from jtrain.launch.tpu import PYTHON, Setup, Tpu, install_command
from jtrain.progress import ATTEMPT

USAGE = "jtrain launch tpu CONFIG --name NAME --zone ZONE [--create --accelerator-type TYPE] [--options] [--flags]"
OPTIONS: dict[str, type] = {
    "name": str, "zone": str, "project": str, "create": bool, "accelerator-type": str, "runtime-version": str,
    "spot": bool, "network": str, "subnetwork": str, "service-account": str, "internal-ip": bool, "iap": bool,
    "copy": str, "install": str, "python": str, "delete": bool, "dry-run": bool,
}  # fmt: skip
HELP = f"""usage: {USAGE}

Runs `jtrain train CONFIG` on every host of a TPU slice by gcloud ssh, and watches it as `jtrain launch local` does. The
run directory has to be a URL (--run_dir gs://BUCKET/NAME): the disks of a slice go with it.

  --name NAME              the slice (TPU VM)
  --zone, --project        where it is
  --create                 make it, by a queued resource; a slice that was preempted is deleted and made again, and the
                           run goes on from its newest durable step
  --accelerator-type TYPE  v5p-64, v6e-16, v5litepod-8, ...
  --runtime-version NAME   by default the one that JAX runs on, for types that are known here
  --spot                   cheaper machines that may be preempted
  --network, --subnetwork, --service-account
                           of the machines
  --internal-ip, --iap     machines without an address of their own; ssh from the same network, or by a tunnel
  --copy DIR               a folder with CONFIG, and data or code, that is copied to every host
  --install COMMAND        how a host gets jtrain, run in the folder of the run; by default into an environment of its
                           own: the project that is copied, or else jtrain=={__version__}. '' for not at all
  --python PATH            an interpreter there, in place of that of the environment
  --delete                 give the slice back when the run has ended, however it ended
  --dry-run                print the commands, and run nothing

A maintenance that is announced is told of; shortly before it begins the run saves. --max-restarts and
--max-infra-restarts as in `jtrain launch local --help`."""


def launch(job: Job, options: dict[str, Any]) -> int:
    """Runs, and returns the exit code."""
    platform = Tpu(job, slice_of(options), setup_of(options))
    if options.get("dry-run"):
        _print(platform, slice_of(options))
        return 0
    need_program(
        "gcloud", "Install the Google Cloud CLI (https://cloud.google.com/sdk/docs/install), or use --dry-run."
    )
    try:
        return supervise(platform, job)
    finally:
        if options.get("delete"):
            platform.delete()
        elif options.get("create"):
            say(f"the slice is kept, and costs; to give it back: {shlex.join(slice_of(options).delete())}")


def slice_of(options: dict[str, Any]) -> Slice:
    """The slice that the options name.

    Raises:
      ConfigError: one is missing, or says nothing without another.
    """
    for name in ("name", "zone"):
        if not options.get(name):
            raise ConfigError(f"--{name} is missing", f"usage: {USAGE}")
    kind = options.get("accelerator-type", "")
    if options.get("create") and not kind:
        raise ConfigError("--create without --accelerator-type", "Write --accelerator-type v5p-64, or another type.")
    making = ("accelerator-type", "runtime-version", "spot", "network", "subnetwork", "service-account")
    for name in making:
        if options.get(name) and not options.get("create"):
            raise ConfigError(
                f"--{name} without --create: the slice is there already", "Leave it out, or write --create."
            )
    if options.get("internal-ip") and options.get("iap"):
        raise ConfigError("--internal-ip beside --iap: two ways to one host", "Keep one of them.")
    further = [f"--{name}={options[name]}" for name in ("network", "subnetwork", "service-account") if name in options]
    inside = bool(options.get("internal-ip") or options.get("iap"))
    return Slice(
        options["name"],
        options["zone"],
        options.get("project", ""),
        kind,
        options.get("runtime-version") or (default_runtime(kind) if kind else ""),
        bool(options.get("spot")),
        tuple([*further, "--internal-ips"] if inside else further),
        ("--internal-ip",) if options.get("internal-ip") else ("--tunnel-through-iap",) if options.get("iap") else (),
    )


def setup_of(options: dict[str, Any]) -> Setup:
    """What a host needs."""
    folder, python = options.get("copy", ""), options.get("python", PYTHON)
    install = install_command(folder, __version__)
    if python != PYTHON:
        install = f"{python} -m pip install 'jtrain[tpu]=={__version__}'"
    return Setup(folder, options.get("install", install), python)


def _print(platform: Tpu, tpu: Slice) -> None:
    def show(title: str, *commands: list[str]) -> None:
        print("\n".join([f"# {title}", *map(shlex.join, commands)]))

    show("whether the slice is READY: at the start, and every minute", tpu.describe_node())
    if tpu.accelerator_type:
        show("it is not there: asked for, and waited for until it is", tpu.create(), tpu.describe_request())
        show("it was preempted: deleted, and asked for again", tpu.delete())
    show("once, on all hosts", *platform.setup_commands())
    worker = platform.worker(0, {**WORKER_ENVIRONMENT, ATTEMPT: "1"})
    show("on each host at the same time, --worker=0 and so on", list(worker.command))
