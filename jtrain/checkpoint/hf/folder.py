"""A Hugging Face folder with safetensors: checked before a byte of a tensor is read.

Only files inside the folder are read, and nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  numpy knows bfloat16 after it
import numpy as np
from safetensors import SafetensorError

from jtrain.checkpoint.hf.companions import EXTRA_TEMPLATES, NAMES, Companions
from jtrain.checkpoint.hf.tensor_file import open_tensors
from jtrain.checkpoint.hf.weights import Entry
from jtrain.errors import CheckpointError, ConfigError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
MAX_JSON_BYTES = 256 << 20
"""Of a JSON file: the index of the largest published models has 10 MB."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_CONVERT = (
    "convert it where you trust the file, with transformers: "
    "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR, safe_serialization=True)"
)


class HfFolder:
    """The tensors and small files of a Hugging Face folder (`jtrain.checkpoint.hf.weights.Weights`).

    Args:
      path: the folder.

    Raises:
      ConfigError: there is no such folder, or it holds no model.
      CheckpointError: a file is missing, damaged, outside of the folder, or of a type that is not read.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        self._root = Path(self.path)
        self._headers: dict[str, dict[str, Entry]] = {}
        self._handles: dict[str, Any] = {}
        self.companions = read_companions(self._root)
        self._files = self._find()
        self.entries: Mapping[str, Entry] = {
            name: entry for file in dict.fromkeys(self._files.values()) for name, entry in self._header(file).items()
        }
        self._check_index()

    @property
    def folder(self) -> str:
        """The folder itself."""
        return self.path

    def read(self, name: str) -> np.ndarray:
        """One tensor; `ml_dtypes.bfloat16` where it is BF16.

        Raises:
          CheckpointError: the file can't be read.
        """
        return self._open(self._files[name], lambda tensors: tensors.get_tensor(name))

    def _find(self) -> dict[str, str]:
        """Name of every tensor -> its file; all in one file where there is no index."""
        quantised = self.companions.config.get("quantization_config")
        if quantised:
            method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
            raise CheckpointError(
                f"{self._root / CONFIG}: quantization_config: the weights are quantised ({method})",
                "load it with transformers in bfloat16 (it dequantises), and save_pretrained it to another folder",
            )
        if self._exists(WEIGHTS):
            return dict.fromkeys(self._header(WEIGHTS), WEIGHTS)
        if self._exists(INDEX):
            return self._index()
        names = sorted(entry.name for entry in self._root.iterdir())
        pickles = [name for name in names if name.endswith(_PICKLES)]
        if pickles:
            raise CheckpointError(
                f"{self.path} has its weights in {pickles[0]}: a pickle, which can run any code when it is read",
                _CONVERT,
            )
        others = [name for name in names if name.endswith(".safetensors")]
        if "adapter_model.safetensors" in others:
            raise CheckpointError(f"{self.path} is a PEFT adapter, not a model", "give the folder of its base model")
        if others:
            raise CheckpointError(
                f"{self.path} holds {', '.join(others[:4])}, but neither {WEIGHTS} nor {INDEX}",
                "download the index as well; it says which file holds which tensor",
            )
        raise CheckpointError(
            f"{self.path} holds no weights ({WEIGHTS})", f"there are: {', '.join(names) or 'no files'}"
        )

    def _index(self) -> dict[str, str]:
        where = self._root / INDEX
        index = read_json(self._root, INDEX)
        table = index.get("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(v, str) for v in table.values()):
            raise CheckpointError(f"{where} has no weight_map (tensor -> file)", "download it again")
        for file in dict.fromkeys(table.values()):
            if not self._exists(file):
                count = sum(value == file for value in table.values())
                raise CheckpointError(
                    f"{self.path}: the shard {file} is missing; the index has {count} of {len(table)} tensors in it",
                    "download it again",
                )
        return table

    def _check_index(self) -> None:
        absent = [f"{name} ({file})" for name, file in self._files.items() if name not in self.entries]
        extra = [name for name in self.entries if name not in self._files]
        wrong = [
            f"{name} ({file})"
            for name, file in self._files.items()
            if name in self.entries and name not in self._header(file)
        ]
        if absent or extra or wrong:
            lists = (("in the index only", absent), ("in a shard only", extra), ("in another shard", wrong))
            lines = [f"  {title} ({len(names)}): {', '.join(names[:12])}" for title, names in lists if names]
            raise CheckpointError(
                f"{self._root / INDEX} does not fit the shards:\n" + "\n".join(lines),
                "files of two downloads are mixed: download the folder again",
            )

    def _exists(self, name: str) -> bool:
        return inside(self._root, name).is_file()

    def _header(self, file: str) -> dict[str, Entry]:
        """Name -> type and shape of a shard's tensors, in the order of the file."""

        def read(tensors: Any) -> dict[str, Entry]:
            slices = ((name, tensors.get_slice(name)) for name in tensors.offset_keys())
            return {name: Entry(part.get_dtype(), tuple(part.get_shape())) for name, part in slices}

        if file not in self._headers:
            self._headers[file] = self._open(file, read)
        return self._headers[file]

    def _open(self, file: str, use: Callable[[Any], Any]) -> Any:
        path = inside(self._root, file)
        try:
            if file not in self._handles:
                self._handles[file] = open_tensors(path)
            return use(self._handles[file])
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} is damaged or cut off ({path.stat().st_size:,} bytes): {error}", "download it again"
            ) from error
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from error


def inside(folder: Path, name: str) -> Path:
    """The path of a file that lies in `folder`, also through links.

    The hub's cache keeps its files beside the snapshots, as links from them: those are followed.

    Raises:
      CheckpointError: the name leads out of the folder.
    """
    path = folder / name
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    target = path.resolve()
    named = Path(name)
    if named.is_absolute() or ".." in named.parts or not any(target.is_relative_to(place) for place in allowed):
        raise CheckpointError(
            f"{folder}: the file {name!r} lies outside of the folder ({target})",
            "don't use a folder that you did not make or download as a whole",
        )
    return path


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file's mapping.

    Raises:
      CheckpointError: it can't be read, or is no mapping.
    """
    path = inside(folder, name)
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has {size:,} bytes", f"a file of this kind has at most {MAX_JSON_BYTES:,}")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}", "download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is a JSON {type(value).__name__}, not a mapping", "download it again")
    return value


def read_companions(folder: Path) -> Companions:
    """config.json and the small files beside it.

    Raises:
      ConfigError: there is no such folder, or no config.json in it.
      CheckpointError: config.json is damaged, or a file lies outside of the folder.
    """
    if not folder.exists():
        raise ConfigError(f"{folder} does not exist", "give a folder with config.json and model.safetensors")
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file", "give the folder that holds config.json and model.safetensors")
    if not inside(folder, CONFIG).is_file():
        if (folder / "adapter_config.json").is_file():
            raise ConfigError(f"{folder} is a PEFT adapter, not a model", "give the folder of its base model")
        names = sorted(entry.name for entry in folder.iterdir())
        raise ConfigError(
            f"{folder} holds no {CONFIG}",
            f"give the folder of a model; there are: {', '.join(names[:8]) or 'no files'}",
        )
    files = {}
    extra = folder / EXTRA_TEMPLATES
    templates = [f"{EXTRA_TEMPLATES}/{path.name}" for path in sorted(extra.glob("*.jinja"))] if extra.is_dir() else []
    for name in (*NAMES, *templates):
        path = inside(folder, name)
        if path.is_file():
            files[name] = path.read_bytes()
    return Companions(read_json(folder, CONFIG), files)
