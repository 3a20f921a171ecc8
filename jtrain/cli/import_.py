"""`jtrain import HF_DIR OUT`: a Hugging Face folder as a checkpoint of our own."""

from __future__ import annotations

from jtrain.cli import args as arguments
from jtrain.cli.options import Kinds, parse
from jtrain.errors import ConfigError

USAGE = "jtrain import HF_DIR OUT [--vision CLIP_DIR] [--dtype float32] [--mesh fsdp=4]"
HELP = f"""usage: {USAGE}

  HF_DIR   a folder with config.json and safetensors, a GGUF file, or org/name[@revision] of the hub
  OUT      a folder that does not exist: becomes a checkpoint that model.path, checkpoint.init_from, load_model and
           generate take
  --vision a folder of CLIP or SigLIP: a new model that sees, of its encoder and the text model of HF_DIR; the projector
           between them is drawn (--seed), and the image token is --image-token (default <image>), added where the
           tokenizer has none
  --dtype  float32 (default), bfloat16 or float16: the type of the weights
  --mesh   devices that hold the weights on their way; by default one

Every tensor is accounted for: one that is missing or left over is an error that names it. Training can also begin
from the folder itself: jtrain pretrain --model.path HF_DIR ..."""


def run(args: list[str]) -> int:
    """Imports, and returns the exit code."""
    if arguments.wants_help(args):
        print(HELP)
        return 0
    kinds: Kinds = {"dtype": str, "mesh": str, "vision": str, "seed": int, "image-token": str}
    (source, out), options = parse(args, USAGE, ("HF_DIR", "OUT"), kinds)
    for name in ("seed", "image-token"):
        if name in options and "vision" not in options:
            raise ConfigError(f"--{name} without --vision: nothing of it is drawn or added", f"usage: {USAGE}")
    from pathlib import Path

    from jtrain.checkpoint.staging import check_target

    check_target(Path(out).expanduser())  # before anything heavy
    arguments.start_devices()
    placed = {"dtype": options.get("dtype", "float32"), "mesh": options.get("mesh")}
    if "vision" in options:
        from jtrain.tasks.image_import import import_with_vision

        more = {name.replace("-", "_"): options[name] for name in ("seed", "image-token") if name in options}
        done = import_with_vision(source, options["vision"], out, **placed, **more)
    else:
        from jtrain.tasks.importing import import_model

        done = import_model(source, out, **placed)
    print(
        f"imported {source} ({done.model_type}, {done.parameters:,} parameters) to {done.path}: "
        f"{done.size / 2**20:,.1f} MiB in {done.dtype}"
    )
    return 0
