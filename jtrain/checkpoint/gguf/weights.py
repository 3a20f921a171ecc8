"""A GGUF file seen as a Hugging Face folder, without writing one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np

from jtrain.checkpoint.gguf.architectures import config_json, renamed_tensors
from jtrain.checkpoint.gguf.reader import GgufFile
from jtrain.checkpoint.gguf.vocabulary import special_ids, tokenizer_files
from jtrain.checkpoint.hf.companions import Companions
from jtrain.checkpoint.hf.weights import Entry
from jtrain.data.cache import cache_folder
from jtrain.errors import StorageError


class GgufWeights:
    """The tensors of a GGUF file under Hugging Face's names (`jtrain.checkpoint.hf.weights.Weights`).

    Args:
      path: the file.

    Raises:
      ConfigError: the `gguf` package is missing, or the file holds an architecture, a quantisation or a tokenizer that
        is not read.
      CheckpointError: the file is missing, damaged or cut short.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        file = GgufFile(path)
        ids = special_ids(file, len(file.get("tokenizer.ggml.tokens", [])))
        ids = {f"{name}_id": number for name, number in ids.items() if name != "unk_token"}
        config = config_json(file, ids)
        self._tensors = {tensor.name: tensor for tensor in renamed_tensors(file)}
        self.entries: Mapping[str, Entry] = {
            name: Entry(tensor.dtype, tensor.shape) for name, tensor in self._tensors.items()
        }
        tokenizer, settings = tokenizer_files(file)
        contents = {
            "tokenizer_config.json": _json({**settings, "model_max_length": config["max_position_embeddings"]}),
            "generation_config.json": _json(ids),
            "tokenizer.json": tokenizer.encode(),
        }
        self.companions = Companions(config, contents)

    def read(self, name: str) -> np.ndarray:
        """One tensor; float32 where it is quantised."""
        return self._tensors[name].read()

    @cached_property
    def folder(self) -> str:
        """A folder of the user's cache that holds the tokenizer's files: a tokenizer is loaded from a path.

        Raises:
          StorageError: it can't be written.
        """
        files = self.companions.files
        digest = hashlib.blake2b(b"".join(files[name] for name in sorted(files)), digest_size=12).hexdigest()
        folder = cache_folder() / "gguf" / digest
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                _write(folder / name, content)
        except OSError as error:
            raise StorageError(
                f"{folder} can't be written: {error.strerror or error}", "set JTRAIN_CACHE_DIR to another folder"
            ) from error
        return str(folder)


def _write(path: Path, content: bytes) -> None:
    if path.exists() and path.read_bytes() == content:
        return
    work = path.with_name(f".{path.name}-{os.getpid()}")
    work.write_bytes(content)
    work.replace(path)


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
