"""`jtrain train CONFIG [--flags]`: runs the task that the config names."""

from __future__ import annotations

from collections.abc import Callable

from jtrain.cli import args as arguments
from jtrain.cli.failure import RunFailed
from jtrain.config.schema import Config
from jtrain.errors import JtrainError

USAGE = "jtrain train CONFIG [--flags]"


def run(args: list[str]) -> int:
    """Trains and returns the exit code."""
    if arguments.wants_help(args):
        arguments.print_help(args, USAGE)
        return 0
    return start(arguments.parse_config(args, USAGE, optional=False))


def start(config: Config, run_task: Callable[[Config], int] | None = None) -> int:
    """Runs the task of a checked config, by default with `jtrain.tasks.run`."""
    from jtrain import tasks

    try:
        return (run_task or tasks.run)(config)
    except JtrainError:
        raise
    except Exception as error:
        from jtrain.parallel.lost import as_peer_lost

        raise as_peer_lost(error) or RunFailed(config.run_dir) from error
