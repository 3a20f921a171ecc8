"""Figures of embeddings: retrieval over a whole set, and zero-shot classification. On the host, in blocks.

Legend: N rows, D size of an embedding, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_BLOCK = 1024


def recalls(
    queries: np.ndarray, items: np.ndarray, partner: np.ndarray, ks: Sequence[int] = (1, 5)
) -> dict[int, tuple[float, float]]:
    """How many queries have one of their partners among the k items that are nearest to them.

    Of items that are equally near, partners count as the last: embeddings that are all the same recall nothing.

    Args:
      queries: vectors of length one [N, D].
      items: the same [N, D].
      partner: [N]: query i and item j are partners where partner[i] == partner[j].
      ks: the numbers k.

    Returns:
      k -> (queries that have one, queries).
    """
    hits = dict.fromkeys(ks, 0)
    for begin in range(0, len(queries), _BLOCK):
        scores = queries[begin : begin + _BLOCK].astype(np.float64) @ items.T.astype(np.float64)
        own = partner[begin : begin + _BLOCK, None] == partner[None]
        best = np.where(own, scores, -np.inf).max(1)
        before = (~own & (scores >= best[:, None])).sum(1)
        for k in ks:
            hits[k] += int((before < k).sum())
    return {k: (float(hits[k]), float(len(queries))) for k in ks}


def zero_shot(images: np.ndarray, prompts: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """How many images are nearest to their class: the mean of its prompts, brought to length one (Radford et al. 2021,
    section 3.1.4).

    Args:
      images: vectors of length one [N, D].
      prompts: vectors of length one [C, templates, D].
      labels: class of every image [N]; -1: none, the image does not count.

    Returns:
      (images that are, images that count).
    """
    classes = prompts.astype(np.float64).mean(1)
    classes /= np.maximum(np.linalg.norm(classes, axis=-1, keepdims=True), 1e-12)
    counts = labels >= 0
    found = (images[counts].astype(np.float64) @ classes.T).argmax(1)
    return float((found == labels[counts]).sum()), float(counts.sum())
