"""`jtrain eval MODEL --data FILE`: what a model scores on texts, examples and tasks."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jtrain.cli import args as arguments
from jtrain.cli.options import parse
from jtrain.errors import ConfigError, StorageError

USAGE = "jtrain eval MODEL (--data FILE ... [--metrics bleu,rouge] | --tasks NAMES) [--json]"
HELP = f"""usage: {USAGE}

  MODEL                 a Hugging Face folder, a run or one of its checkpoints, an export, what jtrain import made, or a
                        preset (random weights)
  --data                texts, prompts with completions, or messages: files, folders, globs or URLs
  --max-length          tokens of a row; by default what the model takes, of texts at most 2048
  --stride              long texts: windows that overlap, this many tokens apart; by default pieces
  --packing             best_fit or none: the figures are the same; by default best_fit for texts, none for examples
  --truncation          keep_start or keep_end: what is scored of an example longer than a row; by default an error
  --text-field          field of a record that holds a text (text)
  --on-bad-record       fail (the default) or skip: what a record that can't be read does
  --no-eos              texts and completions end without the end token
  --all-tokens          of prompts with completions, the prompts are scored as well
  --assistant-only-loss of messages, what the assistant writes is scored
  --chat-template       one of the model's templates by name, or a .jinja file
  --metrics             bleu, chrf, ter, rouge, exact_match: scores of the model's own answers to the data's prompts
  --max-new-tokens      of an answer (128)
  --predictions         a file for prompts, answers and references, a JSON object a line
  --tasks               of lm-eval: names of tasks, groups or tags; needs no --data
  --include-path        a folder with tasks of your own (.yaml)
  --num-fewshot         examples before each question; by default as the task has it
  --apply-chat-template questions go through the chat template, examples as turns of their own
  --system-instruction  the system's message
  --limit               answers no more prompts, and of each task no more documents, than these
  --batch-size          rows that are computed together, over all devices (8)
  --mesh                devices, such as fsdp=2,tensor=4; by default one
  --dtype               float32 (default), bfloat16 or float16
  --step                a step of a run; by default its newest intact checkpoint
  --tokenizer           bytes, a file or a folder; by default the model's own
  --json                one object on standard output

Figures go to standard output, what was found in the data to standard error."""
_KINDS = {
    "data": tuple,
    "max-length": int,
    "stride": int,
    "packing": str,
    "truncation": str,
    "text-field": str,
    "on-bad-record": str,
    "no-eos": bool,
    "all-tokens": bool,
    "assistant-only-loss": bool,
    "chat-template": str,
    "metrics": tuple,
    "max-new-tokens": int,
    "limit": int,
    "predictions": str,
    "tasks": tuple,
    "include-path": str,
    "num-fewshot": int,
    "apply-chat-template": bool,
    "system-instruction": str,
    "batch-size": int,
    "mesh": str,
    "dtype": str,
    "step": int,
    "tokenizer": str,
    "json": bool,
}
_CHOICES = {
    "packing": ("best_fit", "none"),
    "truncation": ("keep_start", "keep_end"),
    "on-bad-record": ("fail", "skip"),
}
_COUNTS = ("max-length", "stride", "batch-size", "max-new-tokens", "limit")
_READING = (
    "max-length", "stride", "packing", "truncation", "text-field", "on-bad-record", "assistant-only-loss",
    "chat-template",
)  # fmt: skip
_NEEDS = {
    **dict.fromkeys(("max-new-tokens", "predictions"), ("metrics",)),
    **dict.fromkeys(("include-path", "num-fewshot", "apply-chat-template", "system-instruction"), ("tasks",)),
    **dict.fromkeys(("stride", "packing", "truncation", "text-field", "on-bad-record"), ("data",)),
    **dict.fromkeys(("no-eos", "all-tokens", "assistant-only-loss", "metrics"), ("data",)),
    "limit": ("metrics", "tasks"),
}
"""Options that only another one reads."""


def run(args: list[str]) -> int:
    """Evaluates, prints the figures, and returns the exit code."""
    if arguments.wants_help(args):
        print(HELP)
        return 0
    (path,), given = parse(args, USAGE, ("MODEL",), _KINDS)
    _check(given)
    metrics, tasks = _words(given, "metrics"), _words(given, "tasks")
    manager = None
    if metrics:
        from jtrain.tasks.text_scores import check_metrics

        check_metrics(metrics)
    if tasks:
        from jtrain.tasks.eval_tasks import evaluate_tasks, open_tasks

        manager = open_tasks(tasks, given.get("include-path"))
    arguments.start_devices()
    from jtrain.data.tokenizers import load_tokenizer
    from jtrain.tasks.loading import load_model

    model = load_model(path, given.get("dtype", "float32"), given.get("mesh"), given.get("step"))
    if "tokenizer" in given:
        model = dataclasses.replace(model, tokenizer=load_tokenizer(given["tokenizer"]))
    found: dict[str, Any] = {}
    unwritten: StorageError | None = None
    if "data" in given:
        found, unwritten = _on_data(model, given, metrics)
    table = ""
    if tasks:
        names = ("num-fewshot", "limit", "max-length", "chat-template", "apply-chat-template", "system-instruction")
        result = evaluate_tasks(
            model, tasks, manager=manager, batch_size=given.get("batch-size", 8), **_options(given, names)
        )
        found, table = found | {"tasks": result.results}, result.table
    if given.get("json"):
        print(json.dumps(_plain(found), ensure_ascii=False, allow_nan=False))
    else:
        _print(found)
        print(table, end="")
    if unwritten is not None:  # what was computed is not lost with the file
        raise unwritten
    return 0


def _on_data(model: Any, given: Mapping[str, Any], metrics: list[str]) -> tuple[dict[str, Any], StorageError | None]:
    """The figures of `--data`, and why the file of predictions could not be written."""
    from jtrain.tasks.evaluate import answer, evaluate, open_answers

    options = _options(given, _READING) | {"append_eos": "no-eos" not in given}
    if "all-tokens" in given:
        options["completion_only_loss"] = False
    running: dict[str, Any] = {"batch_size": given.get("batch-size", 8), "report": _report}
    evaluation = None
    if metrics:  # what is wrong with its data is said before anything is computed
        evaluation = open_answers(
            model,
            given["data"],
            metrics,
            examples=given.get("limit"),
            max_new_tokens=given.get("max-new-tokens", 128),
            samples=given.get("limit", sys.maxsize) if "predictions" in given else 0,
            **options,
        )
    found: dict[str, Any] = evaluate(model, given["data"], **options, **running)
    if evaluation is None:
        return found, None
    result = answer(model, evaluation, **running)
    found |= result.metrics | {"prompts_left_out": result.left_out, "signatures": result.signatures}
    return found, _write(given["predictions"], result.samples) if "predictions" in given else None


def _options(given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name.replace("-", "_"): given[name] for name in names if name in given}


def _words(given: Mapping[str, Any], name: str) -> list[str]:
    """Names, divided by spaces or commas, in brackets or not."""
    words = [word.strip(" []'\"") for text in given.get(name, ()) for word in text.split(",")]
    words = [word for word in words if word]
    if name in given and not words:
        raise ConfigError(f"--{name} is empty", "name one at least, or leave it out")
    return words


def _check(given: Mapping[str, Any]) -> None:
    """What is wrong with the options by themselves."""
    if "data" not in given and "tasks" not in given:
        raise ConfigError(
            "eval: there is nothing to evaluate on", "write --data FILE, or --tasks with names of lm-eval's"
        )
    for name, words in _CHOICES.items():
        if given.get(name, words[0]) not in words:
            raise ConfigError(f"--{name} {given[name]}", f"write {' or '.join(words)}")
    for name in _COUNTS:
        if given.get(name, 1) < 1:
            raise ConfigError(f"--{name} {given[name]}", "write a positive number, or leave it out")
    if "predictions" in given:
        _check_file(given["predictions"])
    if given.get("num-fewshot", 0) < 0:
        raise ConfigError(f"--num-fewshot {given['num-fewshot']}", "write 0 or a positive number")
    for name, needs in _NEEDS.items():
        if name in given and not any(need in given for need in needs):
            raise ConfigError(
                f"--{name} without --{needs[0]}, which alone reads it", f"leave it out, or write --{needs[0]}"
            )
    if "chat-template" in given and not ({"data", "apply-chat-template"} & set(given)):
        raise ConfigError("--chat-template without --apply-chat-template: no task reads it", "write both, or neither")


def _plain(value: Any) -> Any:
    """Figures as JSON has them: those that are no finite number (the perplexity of a large loss) are null."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print(found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        if isinstance(value, int):
            print(f"{name:<26} {value:,}")
        elif isinstance(value, float):
            print(f"{name:<26} {value:.6g}")


def _check_file(name: str) -> None:
    """Sees, before anything is computed, that predictions can be written there."""
    target = os.path.dirname(name) or "."
    if not name.strip() or os.path.isdir(name):
        what = "it is a folder" if name.strip() else "it has no name"
        raise ConfigError(f"--predictions {name!r}: {what}", "name a file, such as answers.jsonl")
    if not os.path.isdir(target):
        raise ConfigError(f"--predictions {name}: there is no folder {target}", "make it first")
    if not os.access(name if os.path.exists(name) else target, os.W_OK):
        raise ConfigError(f"--predictions {name}: it can't be written", "name another file, or change its permissions")


def _write(name: str, rows: list[dict[str, str]]) -> StorageError | None:
    try:
        with open(name, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    except OSError as error:
        return StorageError(f"--predictions {name}: {error.strerror}", "name a file that can be written")
    return None


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
