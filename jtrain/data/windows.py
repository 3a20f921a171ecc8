"""Long documents as overlapping windows: every token is scored once, with what stands before it in its window."""

from __future__ import annotations

import numpy as np

from jtrain.data.packing import Plan
from jtrain.data.rows import IGNORE, Batch, PackedRows
from jtrain.data.store import TokenStore


class WindowRows(PackedRows):
    """Windows of `length` tokens, each `stride` tokens behind the one before it: one a row.

    Only the tokens that no window before it held are targets, so that each has at least `length - stride` tokens before
    it (those of the first window have what there is). This is the strided sliding window of Hugging Face's page
    "Perplexity of fixed-length models".

    Args:
      store: the documents; no window crosses two.
      length: tokens of a window.
      stride: 1 ... length - 1.
      token_bytes, pad_id, title: see `PackedRows`.
    """

    def __init__(
        self,
        store: TokenStore,
        length: int,
        stride: int,
        *,
        token_bytes: np.ndarray | None = None,
        pad_id: int = 0,
        title: str = "",
    ):
        edges = np.asarray(store.edges, np.int64)
        sizes = np.diff(edges)
        windows = np.where(sizes > 0, 1 + -(-np.maximum(sizes - length, 0) // stride), 0)
        document = np.repeat(np.arange(len(sizes)), windows)
        within = np.arange(len(document)) - np.repeat(np.cumsum(windows) - windows, windows)
        starts = edges[document] + within * stride
        lengths = np.minimum(edges[document + 1] - starts, length).astype(np.int32)
        plan = Plan(starts, lengths, np.arange(len(starts) + 1), length)
        super().__init__(store, plan, token_bytes=token_bytes, pad_id=pad_id, title=title)
        self._seen = np.where(within > 0, length - stride, 0)

    def rows(self, indices: np.ndarray) -> Batch:
        """Windows by number in [0, len)."""
        batch = super().rows(indices)
        seen = np.arange(self.plan.max_length) < self._seen[indices][:, None]
        labels = np.where(seen, IGNORE, batch["labels"])
        scored = self._count_bytes(batch["input_ids"], labels).sum(1, dtype=np.int32)
        return batch | {"labels": labels, "bytes": scored}
