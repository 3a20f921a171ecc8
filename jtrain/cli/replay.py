"""`jtrain replay BUNDLE [--flags] [--json]`: makes the update of a repro bundle again."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from jtrain.cli import args as arguments
from jtrain.config import flags
from jtrain.errors import CheckpointError, ConfigError

USAGE = "jtrain replay BUNDLE [--flags] [--json]"
HELP = f"""usage: {USAGE}

Makes the update of BUNDLE (RUN/bundles/step-N) again, and prints

  - its loss and gradient norm beside those of the run, and whether they are equal to the last bit;
  - where numbers first stop being finite: a parameter, the optimizer, the batch, a layer, the loss, or a gradient;
  - whether the state has the digest that it had, and what is not as it was (versions, devices, flags).

A run that its numbers end leaves a bundle; --faults.bundle_step N makes one of update N. Flags change the bundle's
config: jtrain replay BUNDLE --accelerator cpu --devices 1 --precision 32-true"""


def run(args: list[str]) -> int:
    """Replays and prints, and returns the exit code."""
    if arguments.wants_help(args):
        print(HELP)
        return 0
    as_json = "--json" in args
    positional, _ = flags.split([arg for arg in args if arg != "--json"])
    if len(positional) != 1:
        what = "BUNDLE is missing" if not positional else f"{positional[1]!r} is one argument too many"
        raise ConfigError(what, f"usage: {USAGE}")
    folder = positional[0]
    from jtrain.train.bundle import CONFIG, read_bundle

    said, _ = read_bundle(folder)
    rest = [os.path.join(folder, CONFIG) if arg == folder else arg for arg in args if arg != "--json"]
    config = arguments.parse_config(rest, USAGE, optional=False)
    print(f"replaying update {said['step']} of {said['run_dir']}", file=sys.stderr, flush=True)
    found = _replay(folder, said, config)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _print(found)
    return 0


def _replay(folder: str, said: dict[str, Any], config: Any) -> dict[str, Any]:
    from jtrain import tasks
    from jtrain.train.replay import replay

    task = tasks.trainer_of(said["task"])
    if said["trainer"] != task.__name__:
        raise CheckpointError(
            f"{folder} is of a Trainer with a model of its own",
            "in Python: jtrain.train.replay.replay(Trainer(...).program, BUNDLE)",
        )
    if said["task"] == "pretrain":
        from jtrain.cli.explanation import trainer_without_data

        trainer = trainer_without_data(config)
    else:
        trainer = task(config)
    return replay(trainer.program, folder)


def _print(found: dict[str, Any]) -> None:
    print(f"update {found['step']}, batch {found['batch']}: {found['reason']}")
    for step in found["steps"]:
        then = step["recorded"]
        same = "the same bits" if step["equal"] else "other bits"
        print(
            f"loss {step['loss']} (was {then['loss']}), grad_norm {step['grad_norm']} (was {then['grad_norm']}): {same}"
        )
        if not step["finite"] or step.get("spike"):
            print("not finite" if not step["finite"] else "a spike")
    state = found["state"]
    print("the state is the one that was saved" if state["equal"] else f"the state is another one: {state}")
    for place in found["nonfinite"]:
        layers = f", layers {place['layers']}" if place["layers"] else ""
        micro = f", micro-batches {place['micro_batches']}" if place["micro_batches"] else ""
        print(f"first not finite: {place['kind']} {place['name']}{layers}{micro}")
    if not found["nonfinite"]:
        print("all numbers are finite")
    for name, (then, now) in found["changed"].items():
        print(f"changed: {name} was {then}, is {now}")
