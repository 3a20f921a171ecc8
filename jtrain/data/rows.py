"""Rows of tokens from stores and plans: training rows in an endless shuffled stream, evaluation rows in order.

Shape legend: n rows asked for, L tokens of a row, V vocabulary. A batch of rows is a dict of arrays:
  input_ids     int32 [n, L]
  labels        int32 [n, L]  the token at each place; IGNORE where it is not a target (first of a segment, padding)
  segment_ids   int32 [n, L]  0 in padding, then 1, 2, ... for the documents of the row
  position_ids  int32 [n, L]  from 0 in every segment
  bytes         int32 [n]     UTF-8 bytes that the row's targets stand for; 0 where the tokenizer cannot tell
Rows of a model that sees have `pixel_values` besides, float32 [n, I, height, width, channels]: the images in the order
of their tokens, zeros behind them. I is the same for all rows that make a batch: 1, or the next power of two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from jtrain.data.image_rows import PlannedImages, Transform, gather_pixels, image_slots
from jtrain.data.order import DATA_STREAM, Mixture, key64, permute
from jtrain.data.packing import Plan
from jtrain.data.store import TokenStore
from jtrain.errors import ConfigError, DataError

IGNORE = -100
Batch = dict[str, np.ndarray]


class Rows(Protocol):
    """What a loader reads: row n of an endless sequence (training), or of one that ends in padding (evaluation)."""

    def __len__(self) -> int:
        """Rows of one epoch."""
        ...

    def rows(self, indices: np.ndarray) -> Batch:
        """Rows by number, at any n >= 0: arrays with a leading axis n."""
        ...


class PackedRows:
    """The planned rows of one store, in the order of the plan.

    Args:
      store: the tokens.
      plan: the pieces of each row.
      token_bytes: int [V], UTF-8 bytes that each token stands for, or None: not known.
      pad_id: token that stands in padding; it is never attended to and never a target.
      edges: the stretch of the store that was planned; by default all of it.
      title: what the source holds, in words.
      transform: of images, where the store has any.
    """

    def __init__(
        self,
        store: TokenStore,
        plan: Plan,
        *,
        token_bytes: np.ndarray | None = None,
        pad_id: int = 0,
        edges: np.ndarray | None = None,
        title: str = "",
        transform: Transform | None = None,
    ):
        self.plan = plan
        self.store = store
        self.edges = store.edges if edges is None else edges
        self.title = title
        self.images = PlannedImages(store, plan, transform) if store.images and transform else None
        self._tokens = np.asarray(store.tokens)
        self._targets = None if store.targets is None else np.asarray(store.targets)
        self._token_bytes = None if token_bytes is None else np.asarray(token_bytes, np.int32)
        self._pad_id = pad_id

    def __len__(self) -> int:
        return self.plan.rows

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """Tokens of rows by number, int64 [n]."""
        before = self._before
        return before[self.plan.first[np.asarray(indices) + 1]] - before[self.plan.first[indices]]

    @cached_property
    def _before(self) -> np.ndarray:
        """Tokens of the plan before each piece, and of all of them."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.plan.lengths, dtype=np.int64)])

    def rows(self, indices: np.ndarray) -> Batch:
        """Rows by number in [0, len)."""
        plan, length = self.plan, self.plan.max_length
        shape = (len(indices), length)
        first = plan.first[indices]
        pieces_each = plan.first[np.asarray(indices) + 1] - first
        # Every row ends with one more slot, its padding (often of no tokens), so that the slots tile the output.
        slots_each = pieces_each + 1
        slot_first = np.cumsum(slots_each) - slots_each
        padding = slot_first + pieces_each
        within = _ramps(slots_each)
        is_piece = np.ones(len(within), bool)
        is_piece[padding] = False
        piece = (np.repeat(first, slots_each) + within)[is_piece]

        sizes = np.zeros(len(within), np.int64)
        sizes[is_piece] = plan.lengths[piece]
        if len(indices):
            sizes[padding] = length - np.add.reduceat(sizes, slot_first)
        target = np.cumsum(sizes) - sizes
        source = np.zeros(len(within), np.int64)
        source[is_piece] = plan.starts[piece]

        segment = (within + 1).astype(np.int32)
        segment[padding] = 0
        segment_ids = np.repeat(segment, sizes)
        places = np.arange(segment_ids.size) + np.repeat(source - target, sizes)
        # clip: the padding's own places may lie outside; they are overwritten below.
        ids = self._tokens.take(places, mode="clip").astype(np.int32)
        positions = np.arange(segment_ids.size, dtype=np.int32) - np.repeat(target.astype(np.int32), sizes)
        labels = ids.copy()
        if self._targets is not None:
            labels[self._targets.take(places, mode="clip") == 0] = IGNORE
        labels[target[is_piece]] = IGNORE
        if sizes[padding].any():
            padded = segment_ids == 0
            ids[padded] = self._pad_id
            positions[padded] = 0
            labels[padded] = IGNORE
        return {
            "input_ids": ids.reshape(shape),
            "labels": labels.reshape(shape),
            "segment_ids": segment_ids.reshape(shape),
            "position_ids": positions.reshape(shape),
            "bytes": self._count_bytes(ids, labels).reshape(shape).sum(1, dtype=np.int32),
        }

    def _count_bytes(self, ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
        if self._token_bytes is None:
            return np.zeros_like(ids)
        return self._token_bytes.take(ids, mode="clip") * (labels != IGNORE)


class TrainRows:
    """An endless stream of rows; row n is a function of (seed, n) alone.

    Without weights the sources are one pool, and an epoch is one pass over all of it in an order of its own. With
    weights, source s gives its share of every stretch of the stream and starts its own next epoch when it is used
    up; an epoch of the stream is then as many rows as the sources hold together.

    Args:
      sources: the rows of each source.
      seed: chooses the permutations.
      weights: one positive number a source, or empty.
      shuffle: False: the sources' own order, the same in every epoch.
      buckets: lengths that a batch may be cut to (see `batch_length`), rising; empty: it never is.

    Raises:
      DataError: there are no rows, or nothing in them to predict.
    """

    def __init__(
        self,
        sources: Sequence[PackedRows],
        *,
        seed: int,
        weights: Sequence[float] = (),
        shuffle: bool = True,
        buckets: Sequence[int] = (),
    ):
        if weights and len(weights) != len(sources):
            raise ConfigError(
                f"data.weights has {len(weights)} numbers for {len(sources)} sources", "Give one weight a source."
            )
        self.sources = tuple(sources)
        self._sizes = [len(source) for source in sources]
        if not self._sizes or not min(self._sizes if weights else [sum(self._sizes)]):
            raise DataError("the training data holds no rows", "Check data.train: the files may be empty.")
        _check_targets("the training data", self.sources)
        self._offsets = np.cumsum([0, *self._sizes])
        self._seed = seed
        self._shuffle = shuffle
        self.buckets = tuple(buckets)
        self._mixture = Mixture(weights) if weights else None
        self.fingerprint = _fingerprint(sources, list(weights), shuffle)

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __getitem__(self, index: int) -> Batch:
        """Row n >= 0, without the leading axis."""
        return {name: values[0] for name, values in self.rows(np.asarray([index])).items()}

    def rows(self, indices: np.ndarray) -> Batch:
        """Rows of the stream by number, at any n >= 0."""
        source, row = self.row_ids(indices)
        return _gather(self.sources, source, row)

    def places(self, indices: np.ndarray) -> np.ndarray:
        """Number of each row in `in_order`, int64 [n]."""
        source, row = self.row_ids(indices)
        return self._offsets[source] + row

    def in_order(self) -> EvalRows:
        """All rows once, in the order of the sources."""
        return EvalRows(self.sources, buckets=self.buckets)

    def batch_length(self, indices: np.ndarray) -> int | None:
        """The length to which these rows are cut where they make one batch: the first bucket that holds them all.

        A function of the rows alone, so that every process comes to the same. None: they keep their length.
        """
        return _bucket(self.sources, *self.row_ids(indices), self.buckets)

    def image_slots(self, indices: np.ndarray) -> int:
        """I of these rows where they make one batch, a function of the rows alone; 0: the model does not see."""
        return image_slots(self.sources, *self.row_ids(indices))

    def row_ids(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where rows of the stream come from: (source, row of that source), int64 [n] each."""
        indices = np.asarray(indices, np.int64)
        if self._mixture is None:
            pooled = epoch_order(indices, len(self), key64(self._seed, DATA_STREAM), self._shuffle)
            source = np.searchsorted(self._offsets, pooled, side="right") - 1
            return source, pooled - self._offsets[source]
        source, place = self._mixture.locate(indices)
        row = np.empty_like(place)
        for number in np.unique(source).tolist():
            mine = source == number
            key = key64(self._seed, DATA_STREAM, number)
            row[mine] = epoch_order(place[mine], self._sizes[number], key, self._shuffle)
        return source, row


class EvalRows:
    """Rows in order, once. Rows past the end hold no target, so that a last partial batch is counted exactly.

    Raises:
      DataError: there are no rows, or nothing in them to predict.
    """

    def __init__(self, sources: Sequence[PackedRows], *, buckets: Sequence[int] = ()):
        self.sources = tuple(sources)
        self.buckets = tuple(buckets)
        self._offsets = np.cumsum([0, *(len(source) for source in sources)])
        if not len(self):
            raise DataError("the evaluation data holds no rows", "Check data.eval: the files may be empty.")
        _check_targets("the evaluation data", self.sources)
        self.fingerprint = _fingerprint(sources, [], False)

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __getitem__(self, index: int) -> Batch:
        return {name: values[0] for name, values in self.rows(np.asarray([index])).items()}

    def rows(self, indices: np.ndarray) -> Batch:
        """Rows by number, at any n >= 0; those from len on have no live label, no segment and no bytes."""
        indices = np.asarray(indices, np.int64)
        past = indices >= len(self)
        batch = _gather(self.sources, *self._places(np.where(past, 0, indices)))
        if past.any():
            for name in batch:  # of pairs with a prefix: chosen_labels, ...
                if name.endswith(("labels", "segment_ids", "position_ids", "bytes")):
                    batch[name][past] = IGNORE if name.endswith("labels") else 0
        return batch

    def places(self, indices: np.ndarray) -> np.ndarray:
        """The numbers themselves; those from len on are no row."""
        return np.asarray(indices, np.int64)

    def in_order(self) -> EvalRows:
        """These rows."""
        return self

    def batch_length(self, indices: np.ndarray) -> int | None:
        """See `TrainRows.batch_length`; rows past the end have no length."""
        indices = np.asarray(indices, np.int64)
        return _bucket(self.sources, *self._places(indices[indices < len(self)]), self.buckets)

    def image_slots(self, indices: np.ndarray) -> int:
        """See `TrainRows.image_slots`."""
        return image_slots(self.sources, *self._places(np.where(np.asarray(indices) < len(self), indices, 0)))

    def _places(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        source = np.searchsorted(self._offsets, indices, side="right") - 1
        return source, indices - self._offsets[source]


def _bucket(sources: Sequence[PackedRows], source: np.ndarray, row: np.ndarray, buckets: Sequence[int]) -> int | None:
    if not buckets:
        return None
    longest = max(int(sources[n].lengths(row[source == n]).max(initial=0)) for n in range(len(sources)))
    return next(bucket for bucket in buckets if bucket >= longest)


def _check_targets(what: str, sources: Sequence[PackedRows]) -> None:
    """Two tokens make one target: without any, the loss would be 0 and nothing would be learned."""
    if max(int(source.plan.lengths.max(initial=0)) for source in sources) < 2:
        raise DataError(f"{what} holds nothing to predict: no document has two tokens", "Give longer documents.")


def epoch_order(places: np.ndarray, size: int, key: int, shuffle: bool = True) -> np.ndarray:
    """Items at `places` of an endless sequence of passes over range(size), each pass in an order of its own."""
    places = np.asarray(places, np.int64)
    epoch, within = np.divmod(places, size)
    if not shuffle:
        return within
    result = np.empty_like(within)
    for number in np.unique(epoch).tolist():
        mine = epoch == number
        result[mine] = permute(within[mine], size, key64(key, number))
    return result


def _gather(sources: Sequence[PackedRows], source: np.ndarray, row: np.ndarray) -> Batch:
    """Rows of several sources in the order asked for."""
    if len(sources) == 1:
        batch = sources[0].rows(row)
    else:
        parts = [(np.flatnonzero(source == number), read.rows) for number, read in enumerate(sources)]
        batch = merge([(places, read(row[places])) for places, read in parts if len(places)], len(source))
    if slots := image_slots(sources, source, row):
        batch["pixel_values"] = gather_pixels(sources, source, row, slots)
    return batch


def merge(parts: Sequence[tuple[np.ndarray, Batch]], count: int) -> Batch:
    """One batch of `count` rows from parts and the places of their rows."""
    batch = {name: np.empty((count, *values.shape[1:]), values.dtype) for name, values in parts[0][1].items()}
    for places, part in parts:
        for name, values in part.items():
            batch[name][places] = values
    return batch


def _ramps(sizes: np.ndarray) -> np.ndarray:
    """0 ... size - 1 for each size, one behind the other."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _fingerprint(sources: Sequence[PackedRows], *parts: object) -> str:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=16)
    for source in sources:
        digest.update(source.store.fingerprint.encode())
        # A plan follows from the store and these: its ends tell the held-out part, a sample of rows the packing.
        plan = source.plan
        digest.update(repr((plan.max_length, plan.rows, len(plan.starts))).encode())
        for array in (plan.first[:: max(1, plan.rows // 1024)], plan.starts[:1], plan.starts[-1:]):
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
