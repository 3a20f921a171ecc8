"""`jtrain generate MODEL --prompt TEXT`: text from a Hugging Face folder, a run, an export or a preset."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jtrain.cli import args as arguments
from jtrain.cli.options import parse
from jtrain.errors import ConfigError, DataError

USAGE = "jtrain generate MODEL (--prompt TEXT ... | --prompts-file FILE) [--chat] [--max-new-tokens 64] [--json]"
HELP = f"""usage: {USAGE}

  MODEL                 a Hugging Face folder, a run or one of its checkpoints, an export, what jtrain import made, or a
                        preset (random weights)
  --prompt              a text to continue; may come several times
  --prompts-file        a text file with a prompt a line, or .jsonl with prompt, messages or input_ids; - reads lines
                        from standard input
  --chat                texts are what a user says: they go through the model's chat template
  --max-new-tokens      of each prompt (64)
  --temperature         0 (the default) takes the likeliest token
  --top-k --top-p --min-p --repetition-penalty
                        as in transformers; unused by default
  --stop                a string that ends the text; may come several times
  --seed                of the draws (0): that of a token depends on it, the prompt's number and the position
  --batch-size          prompts that are computed together; by default all
  --mesh                devices, such as fsdp=2,tensor=4; by default one
  --dtype               float32 (default), bfloat16 or float16
  --step                a step of a run; by default its newest intact checkpoint
  --tokenizer           bytes, a file or a folder; by default the model's own
  --json                one object, {{"generations": [...]}}, with ids and log-probabilities of the model itself

The text goes to standard output, that of a single prompt as it grows."""
_KINDS = {
    "prompt": list,
    "prompts-file": str,
    "chat": bool,
    "max-new-tokens": int,
    "temperature": float,
    "top-k": int,
    "top-p": float,
    "min-p": float,
    "repetition-penalty": float,
    "stop": list,
    "seed": int,
    "batch-size": int,
    "mesh": str,
    "dtype": str,
    "step": int,
    "tokenizer": str,
    "json": bool,
}
_SAMPLING = ("max-new-tokens", "temperature", "top-k", "top-p", "min-p", "repetition-penalty", "stop", "seed")


def run(args: list[str]) -> int:
    """Generates and prints, and returns the exit code."""
    if arguments.wants_help(args):
        print(HELP)
        return 0
    (path,), given = parse(args, USAGE, ("MODEL",), _KINDS)
    prompts = _prompts(given)
    arguments.start_devices()
    from jtrain.data.tokenizers import load_tokenizer
    from jtrain.tasks.generate import generate
    from jtrain.tasks.generation_request import GenerateOptions
    from jtrain.tasks.loading import load_model

    sampling = {name.replace("-", "_"): given[name] for name in _SAMPLING if name in given}
    GenerateOptions(**sampling)  # what is wrong with them is said before the model is read
    model = load_model(path, given.get("dtype", "float32"), given.get("mesh"), given.get("step"))
    if "tokenizer" in given:
        model = dataclasses.replace(model, tokenizer=load_tokenizer(given["tokenizer"]))
    live = len(prompts) == 1 and not given.get("json")
    started = time.perf_counter()
    found = generate(
        model, prompts, batch_size=given.get("batch-size", 0), stream=_print_piece if live else None, **sampling
    )
    seconds = time.perf_counter() - started
    if given.get("json"):
        rows = [{"prompt": prompt, **dataclasses.asdict(row)} for prompt, row in zip(prompts, found, strict=True)]
        print(json.dumps({"generations": rows}, ensure_ascii=False))
    elif live:
        print(flush=True)
    else:
        for number, row in enumerate(found):
            print(f"--- {number}\n{row.text}", flush=True)
    count = sum(len(row.ids) for row in found)
    print(f"{count} tokens in {seconds:.1f} s, compiling included", file=sys.stderr)
    return 0


def _print_piece(row: int, piece: str) -> None:
    print(piece, end="", flush=True)


def _prompts(given: Mapping[str, Any]) -> list[Any]:
    """Texts, token ids and conversations."""
    texts: list[Any] = list(given.get("prompt", ()))
    if "prompts-file" in given:
        texts += _from_file(given["prompts-file"])
    if not texts:
        raise ConfigError("generate: there is no prompt", "write --prompt TEXT, or --prompts-file FILE")
    if not given.get("chat"):
        return texts
    return [[{"role": "user", "content": text}] if isinstance(text, str) else text for text in texts]


def _from_file(name: str) -> list[Any]:
    try:
        lines = sys.stdin.read() if name == "-" else Path(name).expanduser().read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"--prompts-file: {name}: {why}", "give a text file, .jsonl, or -") from error
    numbered = [(number, line) for number, line in enumerate(lines.splitlines(), start=1) if line.strip()]
    if not name.endswith((".jsonl", ".json")):
        return [line for _, line in numbered]
    return [_record(line, f"{name}:{number}") for number, line in numbered]


def _record(line: str, where: str) -> Any:
    remedy = 'a line is {"prompt": "..."}, {"messages": [...]} or {"input_ids": [...]}'
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"--prompts-file: {where} is not JSON: {error}", remedy) from error
    found = [record[key] for key in ("prompt", "messages", "input_ids") if isinstance(record, dict) and key in record]
    if len(found) != 1 or not isinstance(found[0], str | list) or not found[0]:
        raise DataError(f"--prompts-file: {where} holds no prompt", remedy)
    return found[0]
