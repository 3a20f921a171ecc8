"""Metadata and tensors of a GGUF file, through the `gguf` package (the extra of that name)."""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

import numpy as np

from jtrain.errors import CheckpointError, ConfigError

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""Types of tensors that are read; the quantised ones become float32."""
_DAMAGED = "download it again: it may be cut short"


class GgufFile:
    """A GGUF file, mapped into memory: a tensor is read when it is asked for.

    Attributes:
      path: of the file.
      metadata: key -> number, string or list.
      shapes: tensor name -> shape, rows first.
      types: tensor name -> one of `TYPES`.

    Raises:
      ConfigError: the `gguf` package is missing, or a tensor has a type that is not read.
      CheckpointError: the file is missing, damaged or cut short.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        try:
            import gguf
        except ImportError as error:
            raise ConfigError(
                f"{path} is a GGUF file, and the package gguf is not installed", "pip install 'jtrain[gguf]'"
            ) from error

        class Strict(gguf.GGUFReader):
            """The package's reader takes what lies behind the end of the file for empty."""

            def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
                if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                    raise EOFError("the file ends too early")
                return super()._get(offset, dtype, count, override_order)

        try:
            self._reader = Strict(self.path)
            fields = self._reader.fields.items()
            self.metadata = {key: field.contents() for key, field in fields if not key.startswith("GGUF.")}
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} does not exist", "check the path") from error
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error.strerror or error}", _DAMAGED) from error
        except (ValueError, EOFError, LookupError, TypeError, OverflowError, MemoryError) as error:
            # A number that stands for no type of tensor is a ValueError too: then the file is newer than the package.
            remedy = "update the package gguf" if "GGMLQuantizationType" in str(error) else _DAMAGED
            raise CheckpointError(f"{path} is no whole GGUF file: {error}", remedy) from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.shapes = {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in self._tensors.items()}
        self.types = {name: tensor.tensor_type.name for name, tensor in self._tensors.items()}
        strange = {name: kind for name, kind in self.types.items() if kind not in TYPES}
        if strange:
            name, kind = next(iter(strange.items()))
            raise ConfigError(
                f"{path}: {name} (and {len(strange) - 1} more) is quantised as {kind}",
                f"take a file of the types {', '.join(TYPES)}",
            )

    @cached_property
    def architecture(self) -> str:
        """The word of `general.architecture`."""
        return str(self.get("general.architecture"))

    def get(self, key: str, default: Any = ...) -> Any:
        """A value of the metadata.

        Raises:
          CheckpointError: it is missing, and there is no default.
        """
        value = self.metadata.get(key, default)
        if value is ...:
            raise CheckpointError(f"{self.path} has no {key} in its metadata", "it holds no whole model")
        return value

    def own(self, key: str, default: Any = ...) -> Any:
        """A value under the name of the architecture: `llama.block_count` for `block_count`."""
        return self.get(f"{self.architecture}.{key}", default)

    def read(self, name: str) -> np.ndarray:
        """A tensor: float32, or float16 / bfloat16 where it lies so on disk."""
        import gguf

        tensor, kind = self._tensors[name], self.types[name]
        if kind in ("F32", "F16"):
            array = np.asarray(tensor.data)
        elif kind == "BF16":
            import ml_dtypes

            array = np.asarray(tensor.data).view(np.uint16).view(ml_dtypes.bfloat16)
        else:
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return array.reshape(self.shapes[name])
