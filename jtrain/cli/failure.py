"""What the program says about an exception that is no user's mistake."""

from __future__ import annotations

import os
import sys
import traceback

from jtrain.errors import Exit


class RunFailed(Exception):
    """An unexpected exception (its cause) during a run, with the directory where the traceback is left."""

    def __init__(self, run_dir: str):
        super().__init__(run_dir)
        self.run_dir = run_dir


def report_bug(error: Exception, *, debug: bool) -> int:
    """Says that it is our mistake, and where the traceback is; returns the exit code."""
    cause = error.__cause__ if isinstance(error, RunFailed) and error.__cause__ else error
    page = "".join(traceback.format_exception(cause))
    if debug:
        print(page, file=sys.stderr, end="")
    summary = " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
    file = _write(error.run_dir, page) if isinstance(error, RunFailed) and not debug else None
    remedy = f"The traceback is in {file}." if file else "Run it again with --debug for the traceback."
    lines = f"error: this is a bug in jtrain, please report it: {summary}" + ("" if debug else f"\n  {remedy}")
    print(lines, file=sys.stderr, flush=True)
    return int(Exit.BUG)


def _write(run_dir: str, page: str) -> str | None:
    if not os.path.isdir(run_dir):
        return None
    path = os.path.join(run_dir, "error.txt")
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(page)
    except OSError:
        return None
    return path
