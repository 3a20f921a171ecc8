"""Packing plans: which pieces of which documents share a row. Planned once over the lengths, then indexed.

A plan is three arrays: pieces, sorted by row, as (start in the token stream, length), and the first piece of each
row. Every piece is a segment of its row: attention and positions do not cross it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from jtrain.errors import ConfigError

Packing = Literal["best_fit", "best_fit_split", "concat", "none"]
Truncation = Literal["keep_start", "keep_end"]
PLAN_VERSION = 1


@dataclass(frozen=True)
class Plan:
    """Rows of pieces.

    Attributes:
      starts: int64 [pieces], place in the token stream.
      lengths: int32 [pieces], tokens; at least 1.
      first: int64 [rows + 1]; row r holds the pieces first[r] ... first[r + 1] - 1.
      max_length: tokens that a row can hold.
    """

    starts: np.ndarray
    lengths: np.ndarray
    first: np.ndarray
    max_length: int

    @property
    def rows(self) -> int:
        return len(self.first) - 1

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def fill(self) -> float:
        """Share of the rows' places that hold a token."""
        return self.tokens / max(1, self.rows * self.max_length)


def plan_rows(edges: np.ndarray, max_length: int, packing: Packing) -> Plan:
    """Plans the rows of consecutive documents.

    best_fit: documents that fit are never cut; longer ones are cut into pieces of max_length, and the tails are
    packed like documents. Best-fit decreasing (Johnson 1973). Rows are in the order of their first document.
    concat: the stream, cut every max_length tokens; only the last row can have padding.
    none: one document (or one piece of a longer one) a row.

    Args:
      edges: int64 [documents + 1], rising; document d is the tokens edges[d] ... edges[d + 1] - 1.
      max_length: tokens of a row.
    """
    edges = np.asarray(edges, np.int64)
    if packing == "concat":
        cuts = np.arange(edges[0], edges[-1], max_length)
        starts = np.union1d(edges[:-1][np.diff(edges) > 0], cuts)
        lengths = np.diff(np.append(starts, edges[-1]))
        return _plan(starts, lengths, (starts - edges[0]) // max_length, len(cuts), max_length)
    return _pack(*_cut(edges, max_length), max_length, packing)


def plan_examples(
    edges: np.ndarray,
    targets: np.ndarray,
    max_length: int,
    packing: Packing,
    truncation: Truncation = "keep_start",
    images: np.ndarray | None = None,
    image_tokens: int = 0,
) -> Plan:
    """Plans the rows of examples: pieces (of `concat`: rows) without a live target are left out.

    best_fit: examples that share rows; of one that is longer than a row, its start or its end.
    best_fit_split: examples that share rows; a longer one is cut into pieces, the tails packed like examples.
    concat: the stream, cut every max_length tokens.
    none: one example a row, longer ones as in best_fit.

    Args:
      edges: as in `plan_rows`.
      targets: [tokens], 1 where a token may be a target; the first token of a piece never is one.
      max_length: tokens of a row.
      truncation: which part of a longer example stays.
      images: int64 [images], where an image of `image_tokens` tokens begins, rising; none is cut: what stays of a
        longer example ends before it (or, of keep_end, begins behind it).

    Raises:
      ConfigError: images, and a packing that cuts the stream anywhere.
    """
    edges = np.asarray(edges, np.int64)
    if images is not None and len(images) and packing in ("concat", "best_fit_split"):
        raise ConfigError(
            f"data.packing: {packing} cuts documents anywhere, and there are images in them",
            "Write data.packing: none or best_fit, which cut an example before an image.",
        )
    if packing == "concat":
        plan = plan_rows(edges, max_length, packing)
        row = np.repeat(np.arange(plan.rows), np.diff(plan.first))
        kept = np.zeros(plan.rows, bool)
        kept[row[_live(plan.starts, plan.lengths, targets)]] = True
        number = np.cumsum(kept) - 1
        stays = kept[row]
        return _plan(plan.starts[stays], plan.lengths[stays], number[row[stays]], int(kept.sum()), max_length)
    if packing == "best_fit_split":
        starts, lengths = _cut(edges, max_length)
    else:
        lengths = np.minimum(np.diff(edges), max_length)
        starts = edges[:-1] if truncation == "keep_start" else edges[1:] - lengths
        if images is not None and len(images):
            ends = starts + lengths
            if truncation == "keep_start":
                ends = _outside(ends, images, image_tokens, 0)
            else:
                starts = _outside(starts, images, image_tokens, image_tokens)
            lengths = ends - starts
    live = _live(starts, lengths, targets)
    return _pack(starts[live], lengths[live], max_length, packing)


def _outside(cuts: np.ndarray, images: np.ndarray, size: int, side: int) -> np.ndarray:
    """Cuts in the stream, those inside of an image moved to its beginning (`side` 0) or its end (`side` = its size)."""
    last = np.searchsorted(images, cuts, side="left") - 1  # the last image that begins before the cut
    begin = images[np.maximum(last, 0)]
    inside = (last >= 0) & (cuts < begin + size)
    return np.where(inside, begin + side, cuts)


def _live(starts: np.ndarray, lengths: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Which pieces have a target behind their first token."""
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(targets, dtype=np.int64)])
    return before[starts + lengths] > before[np.minimum(starts + 1, starts + lengths)]


def _pack(starts: np.ndarray, lengths: np.ndarray, max_length: int, packing: Packing) -> Plan:
    """Rows of pieces: one each, or by best fit."""
    if packing == "none":
        return _plan(starts, lengths, np.arange(len(starts)), len(starts), max_length)
    descending = np.argsort(-lengths, kind="stable")
    bins = np.empty(len(lengths), np.int64)
    bins[descending], count = _best_fit(lengths[descending], max_length)
    _, first_piece = np.unique(bins, return_index=True)
    rank = np.empty(count, np.int64)
    rank[np.argsort(first_piece)] = np.arange(count)
    return _plan(starts, lengths, rank[bins], count, max_length)


def split_edges(edges: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Holds out the last `fraction` of the tokens: (edges of the first part, edges of the held-out part).

    The cut is the document boundary that is nearest, if that holds out between half and twice of what was asked
    for; otherwise (few documents, or one) it goes through a document.
    """
    begin, end = int(edges[0]), int(edges[-1])
    wanted = fraction * (end - begin)
    inner = edges[1:-1]
    if len(inner):
        boundary = int(inner[np.argmin(np.abs(inner - (end - wanted)))])
        if wanted / 2 <= end - boundary <= wanted * 2:
            place = int(np.searchsorted(edges, boundary))
            return edges[: place + 1], edges[place:]
    cut = end - round(wanted)
    place = int(np.searchsorted(edges, cut))
    cut_edge = np.asarray([cut], np.int64)
    return (
        np.concatenate([edges[:place], cut_edge]),
        np.concatenate([cut_edge, edges[place:] if edges[place] != cut else edges[place + 1 :]]),
    )


def split_documents(edges: np.ndarray, fraction: float, unit: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Holds out the last `fraction` of the documents, whole ones: (edges of the first part, of the held-out part).

    Args:
      edges: as in `plan_rows`.
      fraction: in (0, 1).
      unit: documents that belong together (the two of a pair).
    """
    groups = (len(edges) - 1) // unit
    cut = unit * (groups - min(groups - 1, max(1, round(fraction * groups))))
    return edges[: cut + 1], edges[cut:]


def _cut(edges: np.ndarray, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of at most max_length tokens, in stream order: (starts, lengths)."""
    counts = -(-np.diff(edges) // max_length)
    document = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = edges[document] + within * max_length
    return starts, np.minimum(edges[document + 1] - starts, max_length)


def _best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Best-fit of lengths in descending order: (bin of each, number of bins).

    Works on classes: all bins with the same free space are alike, and so are all pieces of one length, so a whole
    run of equal pieces is placed at once. `free` has bit r set when a bin with r free places exists.
    """
    result = np.empty(len(lengths), np.int64)
    bins_by_space: dict[int, list[int]] = {}
    free = 0
    count = 0
    values, run_starts = np.unique(-lengths, return_index=True)
    run_ends = np.append(run_starts, len(lengths))[1:]
    for length, place, end in zip((-values).tolist(), run_starts.tolist(), run_ends.tolist(), strict=True):
        while place < end:
            candidates = free >> length
            if candidates:
                space = length + (candidates & -candidates).bit_length() - 1
                available = bins_by_space[space]
                # The tightest bin stays the tightest after a piece of this length, so it takes all it can.
                each = space // length
                wanted = -(-(end - place) // each)
                taken = available[-wanted:]
                del available[-wanted:]
                if not available:
                    free &= ~(1 << space)
            else:
                space = capacity
                each = capacity // length
                wanted = -(-(end - place) // each)
                taken = list(range(count, count + wanted))
                count += wanted
            placed = min(end - place, each * len(taken))
            result[place : place + placed] = np.repeat(np.asarray(taken), each)[:placed]
            place += placed
            last = placed - each * (len(taken) - 1)
            for space_left, bins in ((space - each * length, taken[:-1]), (space - last * length, taken[-1:])):
                if bins and space_left:
                    bins_by_space.setdefault(space_left, []).extend(bins)
                    free |= 1 << space_left
    return result, count


def _plan(starts: np.ndarray, lengths: np.ndarray, row: np.ndarray, rows: int, max_length: int) -> Plan:
    order = np.argsort(row, kind="stable")
    first = np.zeros(rows + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=rows), out=first[1:])
    return Plan(starts[order].astype(np.int64), lengths[order].astype(np.int32), first, max_length)
