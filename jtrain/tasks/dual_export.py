"""Models of images and texts, out as Hugging Face folders and in as checkpoints of our own."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jtrain.checkpoint import arrays
from jtrain.checkpoint.checkpoints import Checkpoints
from jtrain.checkpoint.hf.folder import CONFIG
from jtrain.checkpoint.staging import staged
from jtrain.models.families.dual_encoder import dual_encoder_tensors
from jtrain.tasks.dual_encoder import LoadedDualEncoder, host, load_dual_encoder, write_dual_files
from jtrain.tasks.exporting import SHARD_SIZE, Exported, differences, rounded_to, write_folder
from jtrain.tasks.importing import Imported, versions


def export_dual_encoder(
    model: LoadedDualEncoder,
    out: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_size: str | int = SHARD_SIZE,
) -> Exported:
    """Writes a folder that transformers' CLIPModel or SiglipModel loads; see `jtrain.export`, which calls this.

    Returns:
      What was made; its logits are the scores of two images with two texts.
    """
    dtype = dtype or model.precision.name
    shape, rng = model.config, np.random.default_rng(0)
    vision = shape.vision
    size = (2, vision.image_size, vision.image_size, vision.num_channels)
    pixels = rng.normal(size=size).astype(np.float32)
    ids = rng.integers(0, shape.text.vocab_size, (2, shape.text.max_position_embeddings))

    def companions() -> dict[str, bytes]:
        config = {**model.files.companions.config, "dtype": dtype, "torch_dtype": dtype}
        return {**model.files.companions.files, CONFIG: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()}

    def compare(folder: Path) -> tuple[float, float]:
        before = rounded = host(model(pixels, ids))
        if dtype != model.precision.name:
            rounded = host(dataclasses.replace(model, params=rounded_to(model.params, dtype))(pixels, ids))
        again = load_dual_encoder(folder, model.precision.name, model.mesh, rules=model.rules)
        return differences(before, rounded, host(again(pixels, ids)))

    return write_folder(
        out,
        lambda: dual_encoder_tensors(shape),
        (model.params, model.variables),
        companions,
        compare,
        dtype=dtype,
        max_shard_size=max_shard_size,
        notes=() if model.tokenizer is not None else ("there is no tokenizer: the model was loaded without one",),
    )


def import_dual_encoder(
    model: str | os.PathLike[str], out: str | os.PathLike[str], *, dtype: str = "float32", mesh: Any = None
) -> Imported:
    """Writes a checkpoint that `model.path`, `checkpoint.init_from` and `load_dual_encoder` take; see `import_model`.

    Raises:
      ConfigError, CheckpointError: as `load_dual_encoder`; `out` holds something.
      StorageError: the disk is full or can't be written; nothing is left behind.
    """
    loaded = load_dual_encoder(model, dtype=dtype, mesh=mesh)
    state = {"params": loaded.params, "variables": loaded.variables}
    size = arrays.size_bytes(arrays.flatten(state).values())
    with staged(out, size) as folder, Checkpoints(folder, async_save=False) as checkpoints:
        checkpoints.save(0, state, {"imported": os.fspath(model)} | versions())
        write_dual_files(checkpoints.run_dir, loaded.files)
        checkpoints.wait()
    count = sum(leaf.size for leaf in jax.tree.leaves(loaded.params))
    return Imported(os.fspath(out), count, size, dtype, loaded.config.kind)
