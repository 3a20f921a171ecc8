"""`jtrain reward [CONFIG] [--flags]`: trains a reward model; works without a config file, and says what it chose."""

from __future__ import annotations

from jtrain.cli import task_verb


def run(args: list[str]) -> int:
    """Trains and returns the exit code."""
    return task_verb.run(args, "reward")
