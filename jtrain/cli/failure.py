"""What the program says about an exception that is no user's mistake."""

from __future__ import annotations

import os
import traceback

from jtrain.redaction import redact_text


class RunFailed(Exception):
    """An unexpected exception (its cause) during a run, with the directory where the traceback is left."""

    def __init__(self, run_dir: str):
        super().__init__(run_dir)
        self.run_dir = run_dir


def cause_of(error: BaseException) -> BaseException:
    """The exception itself, without the wrapping of `RunFailed`."""
    return error.__cause__ if isinstance(error, RunFailed) and error.__cause__ else error


def describe_bug(error: BaseException, *, debug: bool) -> str:
    """Says that it is our mistake, and where the traceback is (with `debug` it has been shown)."""
    cause = cause_of(error)
    summary = "this is a bug in jtrain, please report it: " + " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
    if debug:
        return summary
    page = redact_text("".join(traceback.format_exception(cause)))
    file = _write(error.run_dir, page) if isinstance(error, RunFailed) else None
    return f"{summary}\n  " + (
        f"The traceback is in {file}." if file else "Run it again with --debug for the traceback."
    )


def _write(run_dir: str, page: str) -> str | None:
    if not os.path.isdir(run_dir):
        return None
    from jtrain.parallel.lost import process_id  # a run has imported jax anyway

    path = os.path.join(run_dir, f"error-{process_id()}.txt" if process_id() else "error.txt")
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(page)
    except OSError:
        return None
    return path
