"""`jtrain doctor [CONFIG] [--flags] [--json]`: what would keep a run from starting, or end it later."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from functools import partial

from jtrain.cli import args as arguments
from jtrain.cli import doctor_machine as machine
from jtrain.cli import doctor_run as run_checks
from jtrain.cli import doctor_storage as storage
from jtrain.cli.doctor_checks import Check, Examination, examine
from jtrain.config.schema import Config
from jtrain.errors import ConfigError, Exit

USAGE = "jtrain doctor [CONFIG] [--flags] [--json]"
HELP = f"""usage: {USAGE}

Looks at this machine, and with CONFIG at what its run needs: versions against those that were tested, devices and
their driver, memory, ports, clocks, limits, credentials (whether they are there), the run directory's speed and free
space against the checkpoints that are kept, every data path's first record, the tokenizer. Nothing is trained, and
nothing is left behind. Exit code 0, or 64 where a check has failed. On several hosts start it on each of them.

  --json   one object with `checks`: name, status (ok, warn, fail), value, remedy"""


def run(args: list[str]) -> int:
    """Examines and prints, and returns the exit code."""
    if arguments.wants_help(args):
        print(HELP)
        return 0
    as_json = "--json" in args
    checks = checks_of([arg for arg in args if arg != "--json"])
    if as_json:
        print(json.dumps({"checks": [check._asdict() for check in checks]}, indent=2))
    else:
        _print(checks)
    return int(Exit.CONFIG if any(check.status == "fail" for check in checks) else Exit.DONE)


def checks_of(args: list[str]) -> list[Check]:
    """All checks; a config that can't be read has failed, and the machine is looked at all the same."""
    given = bool(args)
    first: list[Check] = []
    config = Config()
    try:
        config = arguments.parse_config(args, USAGE, optional=True)
        if given:
            first = [Check("config", "ok", f"task {config.task}, run_dir {config.run_dir}")]
    except ConfigError as error:
        first, given = [Check("config", "fail", error.message, error.remedy)], False
    return first + examine(examinations(config, given))


def examinations(config: Config, given: bool) -> list[Examination]:
    """The checks in the order in which they are shown.

    Args:
      config: the run's, or the defaults.
      given: whether it is a run's.
    """
    gpus = os.path.exists("/proc/driver/nvidia/version")
    places = [*config.data.train, *(config.data.eval if isinstance(config.data.eval, tuple) else ())]
    kept = [config.run_dir, config.checkpoint.backup or ""]
    names = [*places, *kept, config.data.tokenizer or "", config.model.path or ""]
    waits = run_checks.DEVICE_SECONDS + run_checks.STATE_SECONDS + 30
    found = [
        Examination("versions", machine.installed_versions),
        Examination("driver", machine.driver),
        Examination("devices", partial(run_checks.devices_and_memory, config, given), waits),
        Examination("ports", partial(run_checks.ports, config)),
        Examination("clock", partial(storage.clock, config)),
        Examination("ulimits", partial(machine.ulimits, gpus)),
        Examination("credentials", lambda: machine.credentials(os.environ, names)),
        Examination("compile_cache", partial(run_checks.compile_cache, config)),
    ]
    if given:
        for field, paths in (("data.train", config.data.train), ("data.eval", places[len(config.data.train) :])):
            for number, place in enumerate(paths):
                name = f"{field}[{number}]"
                found.append(Examination(name, partial(run_checks.data, config, place, name), 60))
        found.append(Examination("tokenizer", partial(run_checks.tokenizer, config), 60))
    return found


def _print(checks: list[Check]) -> None:
    colours = {"ok": "\x1b[32m", "warn": "\x1b[33m", "fail": "\x1b[31m"} if sys.stdout.isatty() else {}
    width = max(len(check.name) for check in checks)
    for check in checks:
        begin, end = colours.get(check.status, ""), "\x1b[0m" if colours else ""
        print(f"{begin}{check.status:<4}{end}  {check.name:<{width}}  {check.value}")
        if check.remedy and check.status != "ok":
            print(f"{'':<{width + 8}}{check.remedy}")
    counts = Counter(check.status for check in checks)
    print(f"{len(checks)} checks: {counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed")
