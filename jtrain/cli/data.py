"""`jtrain data prepare | inspect`: tokenise once to the cache; show what the rows really hold."""

from __future__ import annotations

import json
import sys
from typing import Any

from jtrain.cli import args as arguments
from jtrain.config.names import nearest
from jtrain.config.schema import Config
from jtrain.errors import ConfigError

PREPARE = "jtrain data prepare [CONFIG] [--flags] [--json]"
INSPECT = "jtrain data inspect [CONFIG] [--flags] [--rows 2] [--json]"
HELP = f"""usage: {PREPARE}
       {INSPECT}

  prepare  tokenises data.train and data.eval to the cache (data.cache_dir) and plans the rows; a run of the same
           data, tokenizer and max_length then starts at once
  inspect  prints sizes, packing efficiency and the first rows as text: what is not a target of the loss stands
           in [[ ]]"""


def run(args: list[str]) -> int:
    """Prepares or prints, and returns the exit code."""
    if not args or arguments.wants_help(args):
        print(HELP)
        return 0
    what, rest = args[0], args[1:]
    if what not in ("prepare", "inspect"):
        meant = nearest(what, ("prepare", "inspect"))
        remedy = f"Did you mean {meant}?" if meant else f"usage: {PREPARE}\n  or {INSPECT}"
        raise ConfigError(f"data: {what!r} is neither prepare nor inspect", remedy)
    as_json = "--json" in rest
    rest = [arg for arg in rest if arg != "--json"]
    rows, rest = _rows(rest) if what == "inspect" else (0, rest)
    config = arguments.parse_config(rest, INSPECT if what == "inspect" else PREPARE, optional=True)
    found = _describe(config, rows)
    if what == "prepare":
        del found["examples"]
    print(json.dumps(found, indent=2, ensure_ascii=False) if as_json else _text(found), flush=True)
    return 0


def _describe(config: Config, rows: int) -> dict[str, Any]:
    from jtrain.data.build import build_data
    from jtrain.data.inspect import describe
    from jtrain.tasks.source import tokenizer_of

    tokenizer = tokenizer_of(config)
    train, evaluation = build_data(config, tokenizer)
    return describe(train, evaluation, tokenizer, rows)


def _rows(args: list[str]) -> tuple[int, list[str]]:
    """The value of --rows, and the other arguments."""
    for place, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name == "--rows":
            value = value if equals else (args[place + 1] if place + 1 < len(args) else "")
            if not value.isdecimal():
                raise ConfigError(f"--rows: {value!r} is not a number of rows", "Write e.g. --rows 2.")
            return int(value), args[:place] + args[place + (1 if equals else 2) :]
    return 2, args


def _text(found: dict[str, Any]) -> str:
    lines = [f"tokenizer  {found['tokenizer']} ({found['vocab_size']} tokens)"]
    for split in ("train", "eval"):
        sizes = found[split]
        if sizes is None:
            continue
        lines.append(
            f"{split:<10} {sizes['rows']:,} rows of {sizes['max_length']} · {sizes['tokens']:,} tokens · "
            f"{sizes['documents']:,} documents · {sizes['fill']:.2%} full"
        )
        for source in sizes["sources"]:
            if "form" in source:
                lines.append(
                    f"{'':<10} {source['examples']:,} examples: {source['form']} · {source['left_out']:,} without a "
                    f"token to learn left out · {source['cut']:,} longer than a row"
                )
    for row in found.get("examples", ()):
        lines.append("")
        lines.append(
            f"row {row['row']} (source {row['source']}, its row {row['source_row']}): {row['tokens']} tokens, "
            f"{row['targets']} targets, {row['bytes']} bytes"
        )
        for number, segment in enumerate(row["segments"], 1):
            parts = (span["text"] if span["target"] else f"[[{span['text']}]]" for span in segment)
            lines.append(f"  segment {number}: " + _dim("".join(parts)))
    return "\n".join(lines)


def _dim(text: str) -> str:
    """Greys what stands in [[ ]] on a terminal."""
    return text.replace("[[", "\x1b[2m[[").replace("]]", "]]\x1b[0m") if sys.stdout.isatty() else text
