"""`jtrain export RUN OUT`: a run, a checkpoint or a folder as a Hugging Face folder."""

from __future__ import annotations

from typing import Any

from jtrain.cli import args as arguments
from jtrain.cli.options import parse
from jtrain.errors import ConfigError

USAGE = "jtrain export RUN OUT [--dtype bfloat16] [--step N] [--max-shard-size 5GB] [--mesh fsdp=4] [--lora merged]"
HELP = f"""usage: {USAGE}

  RUN               a run directory, one of its checkpoints, what jtrain import made, or a Hugging Face folder
  OUT               a folder that does not exist: becomes one that transformers loads
  --dtype           float32, bfloat16 or float16; by default the type that the weights are stored in
  --step            a step of the run; by default its newest intact checkpoint
  --max-shard-size  size of a file of weights (5GB)
  --mesh            devices that hold the weights on their way; by default one
  --lora            of a run with adapters; merged (by default): into the kernels; adapter: them alone, as a PEFT folder

The folder is read again, and its logits on a fixed batch compared with those of the run, before it gets its name."""


def run(args: list[str]) -> int:
    """Exports, and returns the exit code."""
    if arguments.wants_help(args):
        print(HELP)
        return 0
    kinds = {"dtype": str, "step": int, "max-shard-size": str, "mesh": str, "lora": str}
    (source, out), options = parse(args, USAGE, ("RUN", "OUT"), kinds)
    if options.get("lora", "merged") not in ("merged", "adapter"):
        raise ConfigError(f"--lora {options['lora']}", "write --lora merged or --lora adapter")
    from pathlib import Path

    from jtrain.checkpoint.staging import check_target

    check_target(Path(out).expanduser())  # before anything heavy
    arguments.start_devices()
    if options.get("lora") == "adapter":
        return _adapter(source, out, options)
    from jtrain.tasks.dual_encoder import OpenedDual, is_dual, load_dual_encoder
    from jtrain.tasks.dual_export import export_dual_encoder
    from jtrain.tasks.exporting import SHARD_SIZE, export
    from jtrain.tasks.loading import load_opened
    from jtrain.tasks.opened import open_model

    step, mesh, limit = options.get("step"), options.get("mesh"), options.get("max-shard-size", SHARD_SIZE)
    if is_dual(source):
        dual = load_dual_encoder(source, mesh=mesh, step=step)
        dtype = options.get("dtype", OpenedDual(source, step).dtype)
        done = export_dual_encoder(dual, out, dtype=dtype, max_shard_size=limit)
    else:
        opened = open_model(source, step)
        dtype = options.get("dtype", opened.dtype)
        done = export(load_opened(opened, mesh=mesh), out, dtype=dtype, max_shard_size=limit)
    files = "1 file" if done.files == 1 else f"{done.files} files"
    print(f"exported {source} to {done.path}: {done.size / 2**20:,.1f} MiB of {done.dtype} in {files}")
    print(
        f"logits of what was written, read again: largest difference {done.difference:.3g} (largest logit "
        f"{done.scale:.3g})"
    )
    for note in done.notes:
        print(f"note: {note}")
    return 0


def _adapter(source: str, out: str, options: dict[str, Any]) -> int:
    given = [f"--{name}" for name in ("dtype", "max-shard-size", "mesh") if name in options]
    if given:
        raise ConfigError(f"{', '.join(given)} with --lora adapter", "an adapter is one small file in float32")
    from jtrain.tasks.adapter_export import export_adapter

    done = export_adapter(source, out, step=options.get("step"))
    print(f"exported the adapters of {source} to {done.path}: {done.modules} modules, {done.size / 2**20:,.1f} MiB")
    return 0
