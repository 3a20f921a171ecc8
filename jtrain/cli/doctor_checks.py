"""How `jtrain doctor` examines: every check by itself, in bounded time, and none can take another down."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jtrain.errors import JtrainError
from jtrain.redaction import redact_text

Status = Literal["ok", "warn", "fail"]
GIB = 2**30


class Check(NamedTuple):
    """What was found.

    Attributes:
      name: what was looked at; the same for the same thing in every version.
      status: ok, warn (a run may go on) or fail (it would end).
      value: what there is, in a line.
      remedy: what to do; None where all is well.
    """

    name: str
    status: Status
    value: str
    remedy: str | None = None


class Examination(NamedTuple):
    """A check to be made: its name, the function, and how long it may take."""

    name: str
    look: Callable[[], Check | Iterable[Check]]
    seconds: float = 20.0


def examine(examinations: Sequence[Examination]) -> list[Check]:
    """Makes all checks at once, each on a thread of its own, and returns what they found in their order.

    One that raises has failed with its error; one that does not answer in time is left behind (its thread can't hold
    the program up) and has failed, too.
    """
    answers: list[queue.SimpleQueue[list[Check]]] = []
    begun = time.monotonic()
    for examination in examinations:
        answer: queue.SimpleQueue[list[Check]] = queue.SimpleQueue()
        answers.append(answer)
        thread = threading.Thread(
            target=lambda one=examination, into=answer: into.put(_look(one)),
            name=f"doctor-{examination.name}",
            daemon=True,
        )
        thread.start()
    found: list[Check] = []
    for examination, answer in zip(examinations, answers, strict=True):
        left = max(0.0, begun + examination.seconds - time.monotonic())
        try:
            found += answer.get(timeout=left)
        except queue.Empty:
            remedy = "something that it asks does not answer: a file system, the network or a driver"
            found.append(Check(examination.name, "fail", f"no answer in {examination.seconds:.0f} s", remedy))
    return [Check(c.name, c.status, redact_text(c.value), c.remedy and redact_text(c.remedy)) for c in found]


def _look(examination: Examination) -> list[Check]:
    try:
        found = examination.look()
        return [found] if isinstance(found, Check) else list(found)
    except JtrainError as error:
        return [Check(examination.name, "fail", error.message, error.remedy)]
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return [Check(examination.name, "fail", f"could not be looked at: {text}", "see whether that is so by hand")]


class Output(NamedTuple):
    """What a program printed; None where it failed, and then why."""

    text: str | None
    failure: str = ""


def output(command: Sequence[str], seconds: float, *, env: Mapping[str, str] | None = None, given: str = "") -> Output:
    """Runs a program; past the time its whole group is killed.

    Args:
      command: the program and its arguments.
      seconds: its time.
      env: its environment; by default ours.
      given: its standard input.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(given, timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Output(None, f"no answer in {seconds:.0f} s")
    if process.returncode == 0:
        return Output(out)
    said = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "")
    return Output(None, said[:400] or f"it ended with {process.returncode}")


class Answer(NamedTuple):
    """What a probe has found; None where it failed, and then why."""

    found: dict[str, Any] | None
    failure: str = ""


def probe(what: str, request: Mapping[str, Any], seconds: float) -> Answer:
    """Asks `jtrain.cli.doctor_probe`, which uses jax, in a process of its own: a driver may hang or crash."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "jtrain.cli.doctor_probe", what]
    text, failure = output(command, seconds, env={**os.environ, "PYTHONPATH": path}, given=json.dumps(request))
    lines = [line for line in (text or "").splitlines() if line.startswith("{")]
    return Answer(json.loads(lines[-1])) if lines else Answer(None, failure or "it printed nothing")


def size(number: float) -> str:
    """Bytes in the unit that suits them."""
    for limit, unit in ((2**40, "TiB"), (GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return f"{number:.0f} bytes"
