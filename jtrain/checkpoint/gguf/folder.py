"""A GGUF file written as a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

from jtrain.checkpoint.gguf.architectures import Renamed, config_json, renamed_tensors
from jtrain.checkpoint.gguf.reader import GgufFile
from jtrain.checkpoint.gguf.vocabulary import special_ids, tokenizer_files
from jtrain.checkpoint.hf.writer import Planned, plan_shards, write
from jtrain.errors import ConfigError, StorageError

_SHARD_BYTES = 5_000_000_000


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
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty", "name another folder")
    file = GgufFile(path)
    ids = special_ids(file, len(file.get("tokenizer.ggml.tokens", [])))
    config = config_json(file, {f"{name}_id": number for name, number in ids.items() if name != "unk_token"})
    tokenizer, settings = tokenizer_files(file)
    tensors = {tensor.name: tensor for tensor in renamed_tensors(file)}
    dtype = _dtype(file, tensors)
    config["dtype"] = config["torch_dtype"] = dtype
    small = {
        "config.json": config,
        "tokenizer_config.json": {**settings, "model_max_length": config["max_position_embeddings"]},
        "generation_config.json": {f"{name}_id": number for name, number in ids.items() if name != "unk_token"},
    }
    wanted = np.dtype(getattr(ml_dtypes, dtype, dtype))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            for name, content in small.items():
                (work / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            (work / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
            planned = [Planned(tensor.name, tensor.shape) for tensor in tensors.values()]
            shards = plan_shards(planned, dtype, _SHARD_BYTES)
            write(work, shards, dtype, lambda name: tensors[name].read().astype(wanted, copy=False))
            if out.exists():
                out.rmdir()
            work.chmod(0o755)
            work.rename(out)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise StorageError(
            f"{out} can't be written: {error.strerror or error}", "free space, or name another"
        ) from error
    return out


def _dtype(file: GgufFile, tensors: dict[str, Renamed]) -> str:
    """The 16-bit type of all matrices, where the vectors (which are float32 in such files) lose nothing in it."""
    matrices = {file.types[name] for name, shape in file.shapes.items() if len(shape) > 1}
    words = {"F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
    if len(matrices) != 1 or (kind := matrices.pop()) not in words:
        return "float32"
    vectors = (tensor.read() for tensor in tensors.values() if len(tensor.shape) == 1)
    exact = all(np.array_equal(v.astype(words[kind]).astype(np.float32), v.astype(np.float32)) for v in vectors)
    return words[kind].name if exact else "float32"
