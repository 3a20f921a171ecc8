"""Errors that every process of a run has to see alike: packed as JSON on one process, raised on all."""

from __future__ import annotations

import dataclasses
from typing import Any

from etils import epath

from jtrain.checkpoint import files
from jtrain.errors import ConfigError, JtrainError, PeerLostError, StorageError

_KINDS: dict[str, type[JtrainError]] = {e.__name__: e for e in (ConfigError, PeerLostError, StorageError)}


@dataclasses.dataclass(frozen=True)
class Failure:
    """What went wrong, on whichever process.

    Attributes:
      kind: name of the error's class; anything else than ours is a bug.
      message, remedy: as in `JtrainError`.
      lasting: whether to try again is useless.
    """

    kind: str
    message: str
    remedy: str | None = None
    lasting: bool = False

    def error(self) -> Exception:
        """The exception to raise."""
        if self.kind in _KINDS:
            return _KINDS[self.kind](self.message, self.remedy)
        return RuntimeError(self.message)

    def pack(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def unpack(packed: dict[str, Any] | None) -> Failure | None:
    """The inverse of `Failure.pack`; None stays None."""
    return None if packed is None else Failure(**packed)


def describe(error: BaseException, path: epath.Path | str, doing: str) -> Failure:
    """Gives an exception its class, path and remedy. A full or broken disk is a StorageError, whoever noticed it."""
    if isinstance(error, JtrainError):
        kinds = [kind.__name__ for kind in type(error).__mro__]
        kind = next((kind for kind in kinds if kind in _KINDS), kinds[0])
        return Failure(kind, error.message, error.remedy, lasting=not isinstance(error, StorageError))
    number = files.storage_errno(error)
    if number is not None:
        storage = files.storage_error(path, number, doing)
        return Failure("StorageError", storage.message, storage.remedy, lasting=files.cannot_heal(number))
    text = f"{path}: {doing}: {type(error).__name__}: {error}"
    if isinstance(error, TimeoutError) or "DEADLINE_EXCEEDED" in text:
        return Failure("PeerLostError", text, "look for the first error of the other processes", lasting=True)
    return Failure(type(error).__name__, text, lasting=True)
