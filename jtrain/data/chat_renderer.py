"""The parent's end of `jtrain.data.chat_worker`: one process for all templates, started when it is first needed."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jtrain.errors
from jtrain.errors import DataError

_MEMORY = 1 << 30
_START_SECONDS = 120.0
# No tokens and keys: a template has no business with them, whatever it found a way to.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "HOME", "LANG", "LC_ALL", "TZ", "SOURCE_DATE_EPOCH")
_SLACK = 20  # wall time over processor time: a machine may be busy, or asleep


@dataclass(frozen=True)
class Limits:
    """What a chat template may take.

    Attributes:
      source_characters: of the template itself.
      output_characters: of one rendered conversation.
      seconds: of processor time, for one rendering.
    """

    source_characters: int = 1 << 20
    output_characters: int = 1 << 24
    seconds: float = 10.0


class Renderer:
    """A process that renders, and is started again when a template took it down. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(
        self, template: str, jobs: Sequence[dict[str, Any]], limits: Limits, name: str
    ) -> tuple[list[dict[str, Any]], DataError | None]:
        """Renders the jobs in order, until one fails.

        Returns:
          (what was rendered: {text, spans} of each, the error of the job behind these or None).
        """
        request = {
            "template": template,
            "jobs": list(jobs),
            "characters": limits.output_characters,
            "seconds": limits.seconds,
        }
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            try:
                answer = self._ask(line, _START_SECONDS + _SLACK * limits.seconds * (1 + len(jobs)))
            except BaseException:
                self._stop()  # half of a request or an answer may be in the pipes
                raise
            if answer is None:
                code = self._stop()
                what = f"takes more than {limits.seconds:g} s" if code in (-signal.SIGPROF, None) else _ended(code)
                return [], DataError(f"{name} {what}", "Look for a loop that does not end, or grows with each turn.")
        found = json.loads(answer)
        if found and "error" in found[-1]:
            return found[:-1], _error(found[-1], name, limits)
        return found, None

    def _ask(self, line: bytes, seconds: float) -> bytes | None:
        """The answer to a request; None: the process ended, or did not answer in time."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            return None
        deadline = time.monotonic() + seconds
        parts: list[bytes] = []
        while not parts or not parts[-1].endswith(b"\n"):
            if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            part = os.read(process.stdout.fileno(), 1 << 20)
            if not part:
                return None
            parts.append(part)
        return b"".join(parts)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            package = str(Path(jtrain.errors.__file__).parents[1])
            path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jtrain.data.chat_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**{name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}, "PYTHONPATH": path},
            )
            self._owner = os.getpid()  # a forked child must not speak into its parent's pipes
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"memory": _MEMORY}).encode() + b"\n")
        return self._process

    def _stop(self) -> int | None:
        """Ends the process; gives its exit code where it had ended by itself."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.5)  # its pipe closes a moment before its exit code is there
        code = process.poll()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        return code

    def close(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
        self._stop()


def _ended(code: int) -> str:
    return f"ended the process that rendered it (exit code {code})"


def _error(found: dict[str, Any], name: str, limits: Limits) -> DataError:
    where = f"{name}, line {found['line']}" if found["line"] else name
    message = found["message"]
    messages = {
        "refused": (f"{name} refuses the conversation: {message}", "Mend the messages: their order, roles or fields."),
        "output": (
            f"{name} writes more than {limits.output_characters:,} characters",
            "Look for a loop that does not end, or shorten the conversation.",
        ),
        "misplaced": (
            f"{name} has a generation block whose text does not go straight to the output",
            "Write {% generation %} outside of macros, set blocks and filters.",
        ),
        "security": (f"{where} reaches for what a template may not touch: {message}", "Use another template."),
        "syntax": (f"{where} is not a template: {message}", "It is in the language of jinja2."),
        "size": (f"{where} asks for too much: {message or 'memory'}", "Look for large ranges, repeats and recursion."),
    }
    text, remedy = messages.get(found["error"], (f"{where} fails: {message}", "Check the fields of the messages."))
    return DataError(text, remedy)


RENDERER = Renderer()
atexit.register(RENDERER.close)
