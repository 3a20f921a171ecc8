"""`jtrain import`: a Hugging Face folder as a checkpoint of our own."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import jax

import jtrain
from jtrain.checkpoint import arrays
from jtrain.checkpoint.checkpoints import Checkpoints
from jtrain.checkpoint.hf.companions import Companions
from jtrain.checkpoint.staging import staged
from jtrain.tasks.dual_encoder import is_dual
from jtrain.tasks.loaded import LoadedModel
from jtrain.tasks.loading import load_model
from jtrain.tasks.model_folder import ModelFolder, write_model_folder


class Imported(NamedTuple):
    """What an import has made.

    Attributes:
      path: the folder.
      parameters: number of parameters.
      size: bytes of the arrays.
      dtype: type of the parameters.
      model_type: the family.
    """

    path: str
    parameters: int
    size: int
    dtype: str
    model_type: str


def import_model(
    model: str | os.PathLike[str], out: str | os.PathLike[str], *, dtype: str = "float32", mesh: Any = None
) -> Imported:
    """Writes a checkpoint that `checkpoint.init_from`, `model.path` and `load_model` take.

    Args:
      model: whatever `load_model` takes; a Hugging Face folder as a rule.
      out: a folder that does not exist, or is empty.
      dtype: type of the parameters; runs keep them in float32, but for `bf16-true`.
      mesh: devices that hold the weights on their way.

    Raises:
      ConfigError, CheckpointError: as `load_model`; `out` holds something.
      StorageError: the disk is full or can't be written; nothing is left behind.
    """
    if is_dual(model):
        from jtrain.tasks.dual_export import import_dual_encoder  # which is made of parts of this module

        return import_dual_encoder(model, out, dtype=dtype, mesh=mesh)
    loaded = load_model(model, dtype=dtype, mesh=mesh)
    state = {"params": loaded.params, "variables": loaded.variables}
    size = arrays.size_bytes(arrays.flatten(state).values())
    with staged(out, size) as folder:
        save(loaded, folder, {"imported": os.fspath(model)})
    count = sum(leaf.size for leaf in jax.tree.leaves(loaded.params))
    return Imported(os.fspath(out), count, size, dtype, str(loaded.source.config.get("model_type")))


def save(model: LoadedModel, folder: str | os.PathLike[str], meta: dict[str, Any]) -> None:
    """Writes a model as step 0 below `folder`, with what `load_model` needs beside it."""
    with Checkpoints(folder, async_save=False) as checkpoints:
        checkpoints.save(0, {"params": model.params, "variables": model.variables}, meta | versions())
        bytes_ = model.tokenizer is not None and model.tokenizer.spec == "bytes"
        companions = Companions(model.source.config, model.source.files)
        write_model_folder(checkpoints.run_dir, ModelFolder(model.decoder, companions, bytes=bytes_))
        checkpoints.wait()


def versions() -> dict[str, Any]:
    """What made a checkpoint, for its JSON."""
    return {"versions": {"jtrain": jtrain.__version__, "jax": jax.__version__}}
