"""`jtrain pretrain [CONFIG] [--flags]`: the same as `train` with that task; works without a config file."""

from __future__ import annotations

from jtrain.cli import args as arguments
from jtrain.cli.train import start

USAGE = "jtrain pretrain [CONFIG] [--flags]"


def run(args: list[str]) -> int:
    """Trains and returns the exit code."""
    if arguments.wants_help(args):
        arguments.print_help(args, USAGE)
        return 0
    return start(arguments.parse_config(args, USAGE, optional=True, defaults={"task": "pretrain"}))
