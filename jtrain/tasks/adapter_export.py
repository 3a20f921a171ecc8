"""Adapters of a run as a PEFT folder, and those of a PEFT folder for a run."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jtrain.checkpoint.hf import peft
from jtrain.checkpoint.hf.companions import shortened
from jtrain.checkpoint.staging import staged
from jtrain.config.yaml_file import read_yaml
from jtrain.errors import CheckpointError, ConfigError
from jtrain.models.config import DecoderConfig
from jtrain.models.decoder import Decoder
from jtrain.models.families import Family
from jtrain.models.lora import Lora, projection_shapes
from jtrain.tasks.adapters import load_adapters
from jtrain.tasks.companion_files import family_for
from jtrain.tasks.opened import RunModel, open_model, run_of


class ExportedAdapter(NamedTuple):
    """What an export has made: the folder, bytes of the weights, and modules with an adapter."""

    path: str
    size: int
    modules: int


def export_adapter(
    run: str | os.PathLike[str], out: str | os.PathLike[str], *, step: int | None = None
) -> ExportedAdapter:
    """Writes a run's adapters as a folder that `peft.PeftModel.from_pretrained(base, OUT)` loads, in float32.

    The folder is read again and compared before it gets its name.

    Args:
      run: a run directory or one of its checkpoints, trained with `model.lora`.
      out: a folder that does not exist, or is empty.
      step: of the run; by default its newest intact checkpoint.

    Raises:
      ConfigError: the run has no adapters, `out` holds something, a decoder that no family of Hugging Face has.
      CheckpointError: there is no intact checkpoint; what was read again is not what was written.
    """
    opened = open_model(run, step)
    if not isinstance(opened, RunModel) or opened.lora is None:
        raise ConfigError(f"{os.fspath(run)} has no adapters", "leave --lora out, or give a run with model.lora.rank")
    lora, decoder = opened.lora, opened.decoder
    if decoder.images is not None:
        raise ConfigError(
            f"{os.fspath(run)} has trained its projector beside the adapters, which a folder of adapters does not hold",
            "leave --lora out: the whole model is written, with the adapters merged",
        )
    adapters = load_adapters(opened.path, decoder, lora)
    shapes, layers, modules = _modules(decoder, family_for(decoder, opened.companions))
    files = peft.adapter_files(lora, adapters, modules, _base(opened.path))
    with staged(out, sum(map(len, files.values()))) as folder:
        for name, data in files.items():
            (folder / name).write_bytes(data)
        again = peft.AdapterFolder(folder)
        read = again.adapters(again.lora(), modules, shapes, layers)
        _compare(adapters, read, lora.scale / again.lora().scale, shapes)
    used = sum(any(f"{part.path}/lora_a" in adapters for part in module.parts) for module in modules)
    return ExportedAdapter(os.fspath(out), len(files[peft.WEIGHTS]), used)


def read_adapter(path: str, decoder: DecoderConfig, family: Family) -> tuple[Lora, dict[str, np.ndarray]]:
    """Settings and numbers of a PEFT folder, for a decoder of this family.

    Raises:
      ConfigError: there is no adapter, or one of a kind that is not read.
      CheckpointError: it is damaged, or of another model.
    """
    folder = peft.AdapterFolder(path)
    shapes, layers, modules = _modules(decoder, family)
    lora = folder.lora()
    arrays = folder.adapters(lora, modules, shapes, layers)
    targets = sorted({name.rpartition("/")[0] for name in arrays})
    return folder.lora(targets=tuple(targets)), arrays


def _compare(written: peft.Adapters, read: peft.Adapters, share: float, shapes: Mapping[str, Any]) -> None:
    """Sees that every A B (which a fused module holds with more ranks) and every length is the one that was written."""
    for path, (shape, inputs) in shapes.items():
        if f"{path}/lora_a" not in written:
            continue
        fan_in = math.prod(shape[:inputs])

        def product(arrays: peft.Adapters, path: str = path, fan_in: int = fan_in) -> np.ndarray:
            a, b = (arrays[f"{path}/{name}"].astype(np.float64) for name in ("lora_a", "lora_b"))
            return a.reshape(len(a), fan_in, -1) @ b.reshape(len(b), b.shape[1], -1)

        same = f"{path}/lora_a" in read and np.allclose(product(written) * share, product(read), rtol=1e-6, atol=1e-12)
        if same and f"{path}/lora_magnitude" in written:
            same = np.array_equal(written[f"{path}/lora_magnitude"], read[f"{path}/lora_magnitude"])
        if not same:
            raise CheckpointError(f"the adapter of {path} is another one when it is read again", "a bug in jtrain")


def _modules(
    decoder: DecoderConfig, family: Family
) -> tuple[dict[str, tuple[tuple[int, ...], int]], dict[str, int], list[peft.Module]]:
    shapes: dict[str, tuple[tuple[int, ...], int]] = {}

    def look() -> None:
        with nnx.use_eager_sharding(False):
            shapes.update(projection_shapes(Decoder(decoder, nnx.Rngs(0))))

    jax.eval_shape(look)
    leading = decoder.first_k_dense_replace
    layers = {path: leading if path.startswith("dense_") else decoder.num_hidden_layers - leading for path in shapes}
    return shapes, layers, peft.modules(family.tensors(decoder), shapes)


def _base(path: str) -> str | None:
    """What the run began with: its name on the hub, or that of its folder, whose place is nobody's business."""
    from jtrain.checkpoint import layout

    file = run_of(layout.run_path(path)) / "config.yaml"
    if not file.exists():
        return None
    data, _ = read_yaml(file.read_text(), str(file))
    return shortened((data or {}).get("model", {}).get("path"), "path")
