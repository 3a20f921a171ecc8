"""`jtrain drill CONFIG [--flags]`: the rehearsal before a long run."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from jtrain.cli import args as arguments
from jtrain.cli.drill_runs import Plan, processes_of
from jtrain.cli.launch import check_options, config_and_flags, split
from jtrain.cli.options import parse
from jtrain.config import load_config
from jtrain.config.schema import Config
from jtrain.errors import ConfigError, Exit, StorageError

USAGE = "jtrain drill CONFIG [--steps N] [--processes N] [--keep] [--json] [--flags]"
OPTIONS: dict[str, type] = {"steps": int, "processes": int, "keep": bool, "json": bool}
LEAST_STEPS = 8
HELP = f"""usage: {USAGE}

The rehearsal before a long run, on its real config, shortened: trains without faults; trains again, where each of two
processes is killed in turn and one is asked to leave, and is started again by the supervisor each time; compares all
bits and all rows of both; goes on from a checkpoint on another mesh. It works in a folder of its own beside run_dir,
which it removes at the end; the run itself is not touched.

  --steps N       updates of a run, a multiple of four ({LEAST_STEPS})
  --processes N   of a run; by default 2, where the devices can be divided over them, else 1
  --keep          leaves the folder; a rehearsal that fails leaves it, too
  --json          one object with `checks`, `recovery_seconds` (median, from a kill to the next update) and `goodput`

Exit code 0 where all is well; else that of the run that failed, 66 where bits differ, 65 where rows do."""


def run(args: list[str]) -> int:
    """Rehearses, prints the card, and returns the exit code."""
    if arguments.wants_help(args):
        print(HELP)
        return 0
    own, rest = split(args, OPTIONS)
    _, options = parse(own, USAGE, (), OPTIONS)
    check_options(rest, OPTIONS)
    source, flags = config_and_flags(rest, USAGE)
    steps = options.get("steps", LEAST_STEPS)
    if steps < LEAST_STEPS or steps % 4:
        raise ConfigError(f"--steps: {steps}", f"Write a multiple of four, {LEAST_STEPS} or more.")
    config = rehearsable(source, flags)
    plan = Plan(source, tuple(flags), steps)
    folder = working_folder(Path(config.run_dir))
    done = False
    try:
        from jtrain.cli.drill_rehearsal import Drill  # it imports jax

        processes = options.get("processes") or processes_of(plan, folder / "reference")
        drill = Drill(replace(plan, processes=processes), config, folder, _tell)
        code = drill.run()
        done = code == Exit.DONE
        print(json.dumps(drill.report(), indent=2) if options.get("json") else drill.card())
        return code
    finally:
        if options.get("keep") or (not done and any(folder.glob("*.log"))):
            _tell(f"the runs and what they printed are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def rehearsable(source: str, flags: list[str]) -> Config:
    """The config, of a run that can be rehearsed here.

    Raises:
      ConfigError: it can't be.
    """
    for flag in flags:
        if flag.lstrip("-").replace("-", "_").startswith("distributed"):
            raise ConfigError(f"{flag}: a rehearsal sets where its processes meet", "Leave it out.")
    config = load_config(source, flags)
    if "://" in config.run_dir:
        raise ConfigError(
            f"run_dir: {config.run_dir} is a URL: a rehearsal compares files of this machine",
            "Give --run_dir a folder on a disk that is as fast; jtrain doctor looks at the URL.",
        )
    if not config.data.train:
        raise ConfigError("data.train is empty: there is nothing to train on", "Give --data.train FILE.")
    return config


def working_folder(run_dir: Path) -> Path:
    """A new folder beside the run's, on the same file system.

    Raises:
      StorageError: it can't be made.
    """
    target = Path(os.path.abspath(run_dir.expanduser()))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{target.name}.drill-", dir=target.parent))
    except OSError as error:
        raise StorageError(
            f"{target.parent}: can't be written: {error.strerror}", "make it writable, or give another --run_dir"
        ) from error


def _tell(text: str) -> None:
    print(f"drill: {text}", file=sys.stderr, flush=True)
