"""Tokenised documents in memory or in a memory-mapped file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class StoredImages:
    """Images of documents, in the order of their tokens.

    Attributes:
      data: uint8 [bytes], what is kept of them, one behind the other.
      edges: int64 [images + 1]; image n is data[edges[n]:edges[n + 1]].
      starts: int64 [images], the first token of each, in the store.
      tokens: how many tokens each has.
      folder: what their paths are relative to.
    """

    data: np.ndarray
    edges: np.ndarray
    starts: np.ndarray
    tokens: int
    folder: str = ""

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> bytes:
        return self.data[self.edges[number] : self.edges[number + 1]].tobytes()


@dataclass(frozen=True)
class TokenStore:
    """Documents of tokens, one behind the other.

    Attributes:
      tokens: uint16 or uint32 [tokens]; memory-mapped where it comes from a cache.
      edges: int64 [documents + 1]; document d is tokens[edges[d]:edges[d + 1]].
      fingerprint: hex digest of what the tokens were made from, whatever the paths.
      path: folder of the cache, or None; plans are kept there.
      targets: uint8 [tokens], 1 where a token may be a target of the loss; None: all of them.
      values: float32 [documents], a number that came with each document (see `Example.value`); None: there is none.
      images: of the documents of a model that sees; None: it reads text alone.
      bad_records: how many records could not be used and were left out.
    """

    tokens: np.ndarray
    edges: np.ndarray
    fingerprint: str
    path: Path | None = None
    targets: np.ndarray | None = None
    values: np.ndarray | None = None
    images: StoredImages | None = None
    bad_records: int = 0

    @classmethod
    def from_documents(
        cls,
        documents: Iterable[Sequence[int]],
        targets: Iterable[Sequence[int]] | None = None,
        values: Sequence[float] | None = None,
    ) -> TokenStore:
        """A store in memory, of token ids; with masks as long as the documents, and a number for each."""
        arrays = [np.asarray(document, np.uint32) for document in documents]
        edges = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int64)
        tokens = np.concatenate(arrays) if arrays else np.zeros(0, np.uint32)
        digest = hashlib.blake2b(tokens.tobytes() + edges.tobytes(), digest_size=16)
        mask = None if targets is None else np.concatenate([np.zeros(0, np.uint8), *(_bytes(row) for row in targets)])
        numbers = None if values is None else np.asarray(values, np.float32)
        for array in (mask, numbers):
            if array is not None:
                digest.update(array.tobytes())
        return cls(tokens, edges, digest.hexdigest(), None, mask, numbers)


def _bytes(row: Sequence[int]) -> np.ndarray:
    return np.asarray(row, np.uint8)
