"""`jtrain bench [FIGURE...] [--json]`: figures of this machine, as ratios measured in one process."""

from __future__ import annotations

import json
import sys
from typing import Any

from jtrain.cli import args as arguments
from jtrain.cli.options import parse
from jtrain.config.names import nearest
from jtrain.errors import ConfigError

FIGURES = {
    "trainer": "a Trainer's step against a hand-written jitted loop of the same model",
    "loader": "tokens a second and core from the cache",
    "save": "time that an asynchronous save of 512 MiB blocks, against the save's own time",
    "help": "`jtrain --help`",
    "startup": "process start to the end of the first step, cold and with the compile cache",
    "hlo": "lines of the compiled step at 32 layers against 4",
    "decode": "tokens/s of generate on --model, for 1 and 8 rows, against transformers where --peer has it",
    "sft": "tokens/s of SFT on --model, against TRL's SFTTrainer where --peer has it",
    "mfu": "a training step of --preset on the devices at hand: tokens/s, TFLOP/s, MFU",
}
USAGE = "jtrain bench [FIGURE...] [--preset NAME] [--model MODEL] [--peer PYTHON] [--task TASK] [--json]"
_KINDS = {"preset": str, "model": str, "peer": str, "task": str, "json": bool}
HELP = f"""usage: {USAGE}

Measures and prints; all figures unless some are named.

  --preset  what mfu trains (llama-tiny)
  --model   what decode generates with: whatever jtrain generate takes (smollm2-135m, random weights); what sft trains:
            a folder with a chat template (the bundled tiny one)
  --peer    an interpreter with transformers, trl and torch (JTRAIN_BENCH_PEER; for decode this one, if it has them)
  --task    a figure by its task: --task sft is sft

""" + "\n".join(f"  {name:<9} {text}" for name, text in FIGURES.items())


def run(args: list[str]) -> int:
    """Measures and prints, and returns the exit code."""
    if arguments.wants_help(args):
        print(HELP)
        return 0
    names, options = parse(args, USAGE, ("FIGURE",) * len(FIGURES), _KINDS, optional=len(FIGURES))
    as_json = options.get("json", False)
    names += [options["task"]] if "task" in options else []
    for name in names:
        if name not in FIGURES:
            meant = nearest(name, FIGURES)
            known = f"Figures: {', '.join(FIGURES)}."
            raise ConfigError(f"bench: {name!r} is no figure", f"Did you mean {meant!r}? {known}" if meant else known)
    arguments_of = {
        "mfu": (options.get("preset", "llama-tiny"),),
        "sft": (options.get("model"), options.get("peer")),
        "decode": (options.get("model", "smollm2-135m"), options.get("peer")),
    }
    from jtrain.cli import figures

    found: dict[str, Any] = {}
    for name in names or FIGURES:
        print(f"measuring {name}: {FIGURES[name]}", file=sys.stderr, flush=True)
        measured = getattr(figures, name)(*arguments_of.get(name, ()))
        found |= measured
        if not as_json:
            for key, figure in measured.items():
                print(_line(key, figure), flush=True)
    if as_json:
        print(json.dumps({"figures": found}, indent=2))
    return 0


def _line(name: str, figure: dict[str, Any]) -> str:
    value = figure["value"]
    text = f"{name:<24} {value:,.4g} {figure['unit']}" if value is not None else f"{name:<24} unknown"
    if figure["ratio"] is not None:
        text += f" | ratio {figure['ratio']:.4f}"
    return f"{text} | against {figure['against']}" if figure["against"] else text
