"""The program `jtrain`: finds the verb, runs it, and turns what goes wrong into a message and an exit code.

Nothing heavy is imported here: a verb's module is imported when the verb is called.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jtrain.cli.failure import cause_of, describe_bug
from jtrain.errors import INTERRUPTED, ConfigError, Exit, JtrainError, Preempted
from jtrain.observe.goodput import program_begins
from jtrain.redaction import redact_text

EXIT_SECONDS = 60.0
"""What the interpreter may take to end when all is done."""


class Verb(NamedTuple):
    """A word of the command line, the module with its `run(args) -> int`, and what it does."""

    name: str
    module: str
    summary: str


VERBS = (
    Verb("train", "train", "run the task that CONFIG names: jtrain train CONFIG [--flags]"),
    Verb("pretrain", "pretrain", "train a language model on text: jtrain pretrain [CONFIG] [--flags]"),
    Verb("sft", "sft", "fine-tune a model on examples: jtrain sft --model.path DIR --data.train chat.jsonl"),
    Verb("dpo", "dpo", "train on preferences: jtrain dpo --model.path DIR --data.train pairs.jsonl"),
    Verb("reward", "reward", "train a reward model on pairs: jtrain reward --model.path DIR --data.train pairs.jsonl"),
    Verb("distill", "distill", "learn from a teacher: jtrain distill --distill.teacher DIR --data.train chat.jsonl"),
    Verb("contrastive", "contrastive", "train CLIP or SigLIP: jtrain contrastive --data.train images_and_texts.jsonl"),
    Verb("launch", "launch", "start every process, and again: jtrain launch local | tpu | slurm | gke CONFIG"),
    Verb("import", "import_", "a Hugging Face folder as a checkpoint: jtrain import HF_DIR OUT"),
    Verb("export", "export", "a run as a Hugging Face folder, logits compared: jtrain export RUN OUT"),
    Verb("generate", "generate", "text from a model: jtrain generate MODEL --prompt TEXT"),
    Verb("eval", "eval", "loss, perplexity and scores of a model: jtrain eval MODEL --data FILE"),
    Verb("data", "data", "prepare: tokenise once to a cache; inspect: show what a batch really holds"),
    Verb("config", "config", "show: the resolved config; schema: JSON schema for editors; docs: the reference page"),
    Verb("replay", "replay", "make the update of a repro bundle again: jtrain replay RUN/bundles/step-N"),
    Verb("explain", "explain", "every parameter's axes, spec and bytes; every collective of the compiled step"),
    Verb("doctor", "doctor", "versions, devices, memory, disk, data, limits: jtrain doctor [CONFIG] [--flags]"),
    Verb("drill", "drill", "the rehearsal before a long run: train, kill, resume, compare: jtrain drill CONFIG"),
    Verb("bench", "bench", "figures of this machine: trainer overhead, loader, saves, start-up"),
)


def main(argv: Sequence[str] | None = None, run: Callable[[list[str]], int] | None = None) -> int:
    """Runs the command line and returns the exit code (see `jtrain.errors.Exit`).

    Args:
      argv: the arguments after the program's name; those of the process by default.
      run: what is done with them; by default what the verb says, which is the first of them.
    """
    if argv is None:
        program_begins()
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    messages = logging.StreamHandler()
    messages.setFormatter(_WithoutSecrets("%(levelname)s: %(message)s"))
    if not debug:
        messages.addFilter(_has_no_traceback)
    logging.basicConfig(level=logging.WARNING, handlers=[messages])
    try:
        return _ends(int((run or _dispatch)(args)), argv is None)
    except BrokenPipeError:  # `jtrain config docs | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(Exit.DONE)
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            print(redact_text("".join(traceback.format_exception(cause_of(error)))), file=sys.stderr, end="")
        return _ends(_ended_by(error, debug), argv is None)


def _ends(code: int, own: bool) -> int:
    """The end of the program, in bounded time: a thread that never ends would hold up the interpreter.

    Args:
      code: its exit code.
      own: whether it is a program of ours, and not a call within another.
    """
    lost = sys.modules.get("jtrain.parallel.lost")
    if own and lost:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # on a full disk; the interpreter would try again, and end with a code of its own
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if code == Exit.PREEMPTED_SAVED:  # there is no time to lose
            lost.leave(code, "preempted")
        lost.leave_within(EXIT_SECONDS, code)
    return code


class _WithoutSecrets(logging.Formatter):
    """What libraries log may hold the URL or the header that they were given."""

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record))


def _has_no_traceback(record: logging.LogRecord) -> bool:
    """Leaves out what Orbax logs of a failed save, a traceback for each of its threads and tasks: our line says it."""
    return not (record.name in ("absl", "asyncio") and record.exc_info)


def _ended_by(error: BaseException, debug: bool) -> int:
    """Says what went wrong, and returns the exit code; with several processes it ends this one here and now."""
    lost = sys.modules.get("jtrain.parallel.lost")  # a program without a run in it has no other processes
    prefix = lost.prefix() if lost else ""
    cause = cause_of(error)
    if isinstance(error, Preempted):  # agreed with the others: one of them says it
        code, text = int(error.exit_code), "" if prefix else error.message
    elif isinstance(error, JtrainError):
        code, text = int(error.exit_code), f"error: {prefix}{error}"
    elif isinstance(error, KeyboardInterrupt):
        code, text = INTERRUPTED, "interrupted"
    else:
        code, text = int(Exit.BUG), f"error: {prefix}{describe_bug(error, debug=debug)}"
    if text:
        with contextlib.suppress(OSError):  # of a disk that is full the exit code tells, too
            print(redact_text(text), file=sys.stderr, flush=True)
    if lost and lost.several():
        lost.leave(code, redact_text(f"{type(cause).__name__}: {cause}".splitlines()[0]))
    return code


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help())
        return int(Exit.DONE if args else Exit.CONFIG)
    if args[0] == "--version":
        from jtrain import __version__

        print(f"jtrain {__version__}")
        return int(Exit.DONE)
    name, rest = args[0], args[1:]
    verb = next((verb for verb in VERBS if verb.name == name), None)
    if verb is None:
        from jtrain.config.names import nearest

        meant = nearest(name, [verb.name for verb in VERBS])
        known = f"Verbs: {', '.join(verb.name for verb in VERBS)}."
        raise ConfigError(f"{name!r} is not a verb", f"Did you mean {meant!r}? {known}" if meant else known)
    return importlib.import_module(f"jtrain.cli.{verb.module}").run(rest)


def _help() -> str:
    verbs = "\n".join(f"  {verb.name:<10} {verb.summary}" for verb in VERBS)
    return f"""usage: jtrain VERB ... [--debug]

A JAX/Flax trainer over a named mesh of devices.

{verbs}

`jtrain VERB --help` says more; `jtrain train --help` lists every field. --debug shows tracebacks; --version.
First steps: jtrain train demo"""
