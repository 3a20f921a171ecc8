"""`jtrain launch local | tpu | slurm | gke CONFIG [--options] [--flags]`: starts every process of a run."""

from __future__ import annotations

import importlib
from typing import Any

from jtrain.cli import args as arguments
from jtrain.cli.options import parse
from jtrain.config import ladder, layers, names
from jtrain.config.names import nearest
from jtrain.errors import ConfigError
from jtrain.launch.attempt import Limits
from jtrain.launch.job import Job, make_job
from jtrain.launch.restarts import Restarts
from jtrain.launch.supervisor import Platform, Supervisor

LAUNCHERS = {
    "local": "n processes on this machine",
    "tpu": "all hosts of a TPU slice, by gcloud; the slice may be made, and made again when it is preempted",
    "slurm": "a batch job that puts itself back into the queue",
    "gke": "a JobSet on Kubernetes",
}
USAGE = "jtrain launch local | tpu | slurm | gke CONFIG [--options] [--flags]"
HELP = f"""usage: {USAGE}

Starts every process of a run, watches them, and starts them again from the newest durable step.

{chr(10).join(f"  {name:<6} {text}" for name, text in LAUNCHERS.items())}

  jtrain launch local demo --hosts 2
  jtrain launch tpu demo --name slice --zone us-central2-b --run_dir gs://bucket/demo --dry-run
  jtrain launch slurm demo --hosts 4 --gpus-per-node 8 --time 24:00:00 --dry-run
  jtrain launch gke demo --image registry/jtrain --tpu v5p --topology 4x4x4 --run_dir gs://bucket/demo --dry-run

`jtrain launch local --help` says more. --dry-run prints exactly what would run, and runs nothing."""


def run(args: list[str]) -> int:
    """Launches, and returns the exit code of the run."""
    if not args or args[0] in ("-h", "--help"):
        print(HELP)
        return 0
    name, rest = args[0], args[1:]
    if name not in LAUNCHERS:
        meant = nearest(name, LAUNCHERS)
        remedy = f"Did you mean {meant}? " if meant else ""
        raise ConfigError(f"{name!r} is no launcher", f"{remedy}Launchers: {', '.join(LAUNCHERS)}.")
    module = importlib.import_module(f"jtrain.cli.launch_{name}")
    if arguments.wants_help(rest):
        print(module.HELP)
        return 0
    own, rest = split(rest, module.OPTIONS)
    _, options = parse(own, module.USAGE, (), module.OPTIONS)
    check_options(rest, module.OPTIONS)
    return module.launch(make_job(*config_and_flags(rest, module.USAGE)), options)


def split(args: list[str], options: dict[str, type]) -> tuple[list[str], list[str]]:
    """The launcher's own options with their values, and everything else."""
    own: list[str] = []
    rest: list[str] = []
    queue = list(args)
    while queue:
        arg = queue.pop(0)
        name, equals, _ = arg[2:].partition("=")
        kind = options.get(name.replace("_", "-")) if arg.startswith("--") else None
        (own if kind else rest).append(arg)
        if kind and kind is not bool and not equals and queue:
            own.append(queue.pop(0))
    return own, rest


def check_options(rest: list[str], options: dict[str, type]) -> None:
    """What is no field, and near to an option of the verb itself, was meant as that.

    Raises:
      ConfigError: there is such a word.
    """
    for arg in rest:
        name = arg[2:].partition("=")[0]
        if not arg.startswith("--") or layers.known(names.plain(name)) or names.nearest_name(names.plain(name)):
            continue
        if (meant := nearest(name.replace("_", "-"), options)) is not None:
            raise ConfigError(f"--{name}: there is no such option", f"Did you mean --{meant}?")


def config_and_flags(rest: list[str], usage: str) -> tuple[str, list[str]]:
    """CONFIG, and the flags as they were typed.

    Raises:
      ConfigError: CONFIG is missing, or there is another argument.
    """
    from jtrain.config import flags, paths

    found, _ = flags.split(rest)
    if len(found) > 1:
        raise ConfigError(f"{found[1]!r} is one argument too many", f"usage: {usage}")
    if not found:
        raise ConfigError("CONFIG is missing", f"usage: {usage}\n  Recipes: {', '.join(paths.recipes())}.")
    at = rest.index(found[0])
    return found[0], rest[:at] + rest[at + 1 :]


def supervise(platform: Platform, job: Job) -> int:
    """Keeps the run going on a platform."""
    faults = job.config.faults
    again = not job.config.fast_dev_run  # it leaves no checkpoint to go on from
    restarts = Restarts(
        faults.max_restarts if again else 0, faults.max_infra_restarts if again else 0, seed=job.config.seed
    )
    return Supervisor(platform, restarts, Limits(ladder.outer_limits(faults))).run()


def one_of(options: dict[str, Any], name: str, choices: tuple[str, ...], default: str) -> str:
    """The value of an option that takes a few words.

    Raises:
      ConfigError: it is another one.
    """
    value = options.get(name, default)
    if value not in choices:
        raise ConfigError(f"--{name}: {value!r}", f"Write one of {', '.join(choices)}.")
    return value
