"""A GGUF file written as a Hugging Face folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np

from jtrain.checkpoint.gguf.weights import GgufWeights
from jtrain.checkpoint.hf.folder import CONFIG
from jtrain.checkpoint.hf.writer import Planned, nbytes, plan_shards, write
from jtrain.checkpoint.staging import check_target, staged

_SHARD_BYTES = 5_000_000_000
_HALVES = {"F16": "float16", "BF16": "bfloat16"}


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether the name is that of a GGUF file."""
    return os.fspath(path).lower().endswith(".gguf")


def gguf_to_folder(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Writes config.json, safetensors, tokenizer.json, tokenizer_config.json and generation_config.json.

    Quantised tensors become float32, one after the other; a file of one 16-bit type keeps that type where no number
    changes by it.

    Args:
      path: the file.
      out: the folder; it appears when it is complete.

    Returns:
      The folder.

    Raises:
      ConfigError: `out` holds something, or the file is of a kind that is not read.
      CheckpointError: the file is missing, damaged or cut short.
      StorageError: the folder can't be written.
    """
    out = Path(out)
    check_target(out)
    weights = GgufWeights(path)
    dtype = _dtype(weights)
    wanted = np.dtype(getattr(ml_dtypes, dtype, dtype))
    planned = [Planned(name, entry.shape, dtype) for name, entry in weights.entries.items()]
    with staged(out, sum(nbytes(tensor) for tensor in planned)) as folder:
        config = {**weights.companions.config, "dtype": dtype, "torch_dtype": dtype}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name, content in weights.companions.files.items():
            (folder / name).write_bytes(content)
        shards = plan_shards(planned, _SHARD_BYTES)
        write(folder, shards, lambda name: weights.read(name).astype(wanted, copy=False))
    return out


def _dtype(weights: GgufWeights) -> str:
    """The 16-bit type of all matrices, where the vectors (which are float32 in such files) lose nothing in it."""
    matrices = {entry.dtype for entry in weights.entries.values() if len(entry.shape) > 1}
    if len(matrices) != 1 or (word := matrices.pop()) not in _HALVES:
        return "float32"
    half = np.dtype(getattr(ml_dtypes, _HALVES[word], _HALVES[word]))
    vectors = (weights.read(name) for name, entry in weights.entries.items() if len(entry.shape) == 1)
    exact = all(np.array_equal(v.astype(half).astype(np.float32), v.astype(np.float32)) for v in vectors)
    return half.name if exact else "float32"
