"""Renders chat templates in a process of its own: `python -m jtrain.data.chat_worker`, spoken to in lines of JSON.

A template is a program that comes with a model. The sandbox keeps it from Python's insides; that it neither runs for
ever nor fills the memory is up to the operating system here, which no trick of a template gets around: a limit on
address space, and a timer of processor time that ends the process. This end imports nothing but jinja2.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

SOURCE = "<template>"  # the file name that jinja2 gives to code made from a string


class Refused(Exception):
    """The template called raise_exception."""


class TooLong(Exception):
    """More output than allowed."""


class Misplaced(Exception):
    """A generation block whose text does not go straight to the output."""


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: notes where in the output the text between them lies."""

    tags = {"generation"}  # noqa: RUF012

    def __init__(self, environment: jinja2.Environment):
        super().__init__(environment)
        self.length = 0
        self.spans: list[tuple[int, str]] = []

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        text = caller()
        self.spans.append((self.length, text))
        return text


class Namespace(jinja2.utils.Namespace):
    """namespace(...), but for names with an underscore, which reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can't hold {name!r}")


def _raise_exception(message: Any = "") -> None:
    raise Refused(str(message))


def _strftime_now(pattern: str) -> str:
    """Today's date; SOURCE_DATE_EPOCH (seconds since 1970, UTC) fixes it, so that data made twice is the same."""
    fixed = os.environ.get("SOURCE_DATE_EPOCH")
    return time.strftime(pattern, time.gmtime(int(fixed)) if fixed else time.localtime())


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers has it: no HTML escapes, letters as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment() -> jinja2.Environment:
    """The environment that chat templates are written for (transformers/utils/chat_template_utils.py)."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=Namespace)
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
    return environment


def render(environment: Any, template: Any, variables: dict[str, Any], most: int) -> dict[str, Any]:
    """{text, spans: [[begin, end], ...] of the generation blocks}, in characters."""
    tracker = environment.extensions[Generation.identifier]
    tracker.length, tracker.spans = 0, []
    parts = []
    for part in template.generate(variables):
        parts.append(part)
        tracker.length += len(part)
        if tracker.length > most:
            raise TooLong
    text = "".join(parts)
    spans = [(begin, begin + len(inside), inside) for begin, inside in tracker.spans]
    if any(text[begin:end] != inside for begin, end, inside in spans):
        raise Misplaced
    return {"text": text, "spans": [(begin, end) for begin, end, _ in spans]}


def describe(error: BaseException) -> dict[str, Any]:
    """What went wrong, and the template's line where it did."""
    line = getattr(error, "lineno", None)
    place = error.__traceback__
    while place is not None:
        if place.tb_frame.f_code.co_filename == SOURCE:
            line = place.tb_lineno
        place = place.tb_next
    kinds = (
        (Refused, "refused"),
        (TooLong, "output"),
        (Misplaced, "misplaced"),
        (jinja2.exceptions.SecurityError, "security"),
        (jinja2.exceptions.TemplateSyntaxError, "syntax"),
        ((MemoryError, OverflowError, RecursionError), "size"),
    )
    kind = next((name for types, name in kinds if isinstance(error, types)), "failed")
    message = re.sub(r"\s+", " ", str(error))[:500]
    if kind == "failed" and not isinstance(error, jinja2.exceptions.TemplateError):
        message = f"{type(error).__name__}: {message}"
    return {"error": kind, "message": message, "line": line}


@contextlib.contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """SIGPROF, which ends the process, after so much processor time: also inside of a long call into C."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> int:
    """First line: the memory; then a request a line: {template, jobs: [variables, ...], characters, seconds}."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the parent, which closes the pipe
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    memory = json.loads(sys.stdin.readline())["memory"]
    with contextlib.suppress(ValueError, OSError):  # systems without such a limit
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    environment = make_environment()
    compiled = functools.lru_cache(32)(environment.from_string)
    for line in sys.stdin:
        found: list[dict[str, Any]] = []
        try:
            request = json.loads(line)
            with _processor_time(request["seconds"]):
                template = compiled(request["template"])
            for job in request["jobs"]:
                with _processor_time(request["seconds"]):
                    found.append(render(environment, template, job, request["characters"]))
        except Exception as error:
            found.append(describe(error))
        request = None
        try:
            print(json.dumps(found), file=answers, flush=True)
        except BrokenPipeError:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
