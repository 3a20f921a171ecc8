"""`jtrain distill [CONFIG] [--flags]`: a student learns from a teacher; works without a config file."""

from __future__ import annotations

from jtrain.cli import task_verb


def run(args: list[str]) -> int:
    """Trains and returns the exit code."""
    return task_verb.run(args, "distill")
