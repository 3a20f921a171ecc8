"""`jtrain contrastive [CONFIG] [--flags]`: trains CLIP or SigLIP; works without a file, and says what it chose."""

from __future__ import annotations

from jtrain.cli import task_verb


def run(args: list[str]) -> int:
    """Trains and returns the exit code."""
    return task_verb.run(args, "contrastive")
