"""`jtrain export RUN OUT`: a run, a checkpoint or a folder as a Hugging Face folder."""

from __future__ import annotations

from jtrain.cli import args as arguments
from jtrain.cli.options import parse

USAGE = "jtrain export RUN OUT [--dtype bfloat16] [--step N] [--max-shard-size 5GB] [--mesh fsdp=4]"
HELP = f"""usage: {USAGE}

  RUN               a run directory, one of its checkpoints, what jtrain import made, or a Hugging Face folder
  OUT               a folder that does not exist: becomes one that transformers loads
  --dtype           float32, bfloat16 or float16; by default the type that the weights are stored in
  --step            a step of the run; by default its newest intact checkpoint
  --max-shard-size  size of a file of weights (5GB)
  --mesh            devices that hold the weights on their way; by default one

The folder is read again, and its logits on a fixed batch compared with those of the run, before it gets its name."""


def run(args: list[str]) -> int:
    """Exports, and returns the exit code."""
    if arguments.wants_help(args):
        print(HELP)
        return 0
    kinds = {"dtype": str, "step": int, "max-shard-size": str, "mesh": str}
    (source, out), options = parse(args, USAGE, ("RUN", "OUT"), kinds)
    from pathlib import Path

    from jtrain.checkpoint.staging import check_target

    check_target(Path(out).expanduser())  # before anything heavy
    arguments.start_devices()
    from jtrain.tasks.exporting import SHARD_SIZE, export
    from jtrain.tasks.loading import load_opened
    from jtrain.tasks.opened import open_model

    opened = open_model(source, options.get("step"))
    done = export(
        load_opened(opened, mesh=options.get("mesh")),
        out,
        dtype=options.get("dtype", opened.dtype),
        max_shard_size=options.get("max-shard-size", SHARD_SIZE),
    )
    files = "1 file" if done.files == 1 else f"{done.files} files"
    print(f"exported {source} to {done.path}: {done.size / 2**20:,.1f} MiB of {done.dtype} in {files}")
    print(
        f"logits of what was written, read again: largest difference {done.difference:.3g} (largest logit "
        f"{done.scale:.3g})"
    )
    for note in done.notes:
        print(f"note: {note}")
    return 0
