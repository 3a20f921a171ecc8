"""The folder on this machine of a model that is named otherwise: a GGUF file."""

from __future__ import annotations

import hashlib
import os
import re

from jtrain.checkpoint.gguf.folder import gguf_to_folder, is_gguf
from jtrain.data.cache import cache_folder
from jtrain.errors import CheckpointError, ConfigError


def local_folder(model: str) -> str:
    """The folder that a model lies in; a GGUF file is first written as a Hugging Face folder into the user's cache.

    Raises:
      ConfigError, CheckpointError: the file is missing, damaged, or of a kind that is not read.
      StorageError: the cache can't be written.
    """
    if not is_gguf(model) or os.path.isdir(model):
        return model
    try:
        state = os.stat(model)
    except OSError as error:
        raise ConfigError(f"{model}: {error.strerror}", "give the path of a GGUF file, or of a folder") from error
    if not state.st_size:
        raise CheckpointError(f"{model} is empty", "download it again")
    stamp = f"{os.path.realpath(model)} {state.st_size} {state.st_mtime_ns}"
    name = re.sub(r"[^\w.-]", "_", os.path.basename(model).removesuffix(".gguf"))[:80]
    folder = cache_folder() / "models" / f"{name}-{hashlib.blake2b(stamp.encode(), digest_size=8).hexdigest()}"
    if not folder.exists():
        try:
            gguf_to_folder(model, folder)
        except ConfigError:
            if not folder.exists():  # another process was faster
                raise
    return str(folder)
