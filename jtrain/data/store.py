"""Tokenised documents in memory or in a memory-mapped file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class TokenStore:
    """Documents of tokens, one behind the other.

    Attributes:
      tokens: uint16 or uint32 [tokens]; memory-mapped where it comes from a cache.
      edges: int64 [documents + 1]; document d is tokens[edges[d]:edges[d + 1]].
      fingerprint: hex digest of what the tokens were made from, whatever the paths.
      path: folder of the cache, or None; plans are kept there.
    """

    tokens: np.ndarray
    edges: np.ndarray
    fingerprint: str
    path: Path | None = None

    @classmethod
    def from_documents(cls, documents: Iterable[Sequence[int]]) -> TokenStore:
        """A store in memory, of token ids."""
        arrays = [np.asarray(document, np.uint32) for document in documents]
        edges = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int64)
        tokens = np.concatenate(arrays) if arrays else np.zeros(0, np.uint32)
        digest = hashlib.blake2b(tokens.tobytes() + edges.tobytes(), digest_size=16)
        return cls(tokens, edges, digest.hexdigest())
