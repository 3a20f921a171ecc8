"""`jtrain import HF_DIR OUT`: a Hugging Face folder as a checkpoint of our own."""

from __future__ import annotations

from jtrain.cli import args as arguments
from jtrain.cli.options import parse

USAGE = "jtrain import HF_DIR OUT [--dtype float32] [--mesh fsdp=4]"
HELP = f"""usage: {USAGE}

  HF_DIR   a folder with config.json and safetensors, a GGUF file, or org/name[@revision] of the hub
  OUT      a folder that does not exist: becomes a checkpoint that model.path, checkpoint.init_from, load_model and
           generate take
  --dtype  float32 (default), bfloat16 or float16: the type of the weights
  --mesh   devices that hold the weights on their way; by default one

Every tensor is accounted for: one that is missing or left over is an error that names it. Training can also begin
from the folder itself: jtrain pretrain --model.path HF_DIR ..."""


def run(args: list[str]) -> int:
    """Imports, and returns the exit code."""
    if arguments.wants_help(args):
        print(HELP)
        return 0
    (source, out), options = parse(args, USAGE, ("HF_DIR", "OUT"), {"dtype": str, "mesh": str})
    from pathlib import Path

    from jtrain.checkpoint.staging import check_target

    check_target(Path(out).expanduser())  # before anything heavy
    arguments.start_devices()
    from jtrain.tasks.importing import import_model

    done = import_model(source, out, dtype=options.get("dtype", "float32"), mesh=options.get("mesh"))
    print(
        f"imported {source} ({done.model_type}, {done.parameters:,} parameters) to {done.path}: "
        f"{done.size / 2**20:,.1f} MiB in {done.dtype}"
    )
    return 0
