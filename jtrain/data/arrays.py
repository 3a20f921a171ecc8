"""A user's own examples as rows: arrays, a list of dicts, a `datasets.Dataset`, any random-access sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jtrain.data.order import DATA_STREAM, key64
from jtrain.data.rows import IGNORE, Batch, epoch_order
from jtrain.errors import DataError

WEIGHT = "row_weight"


class ArrayRows:
    """Examples as rows, in an endless shuffled stream, or once in order.

    Every row gets `row_weight` float32: 1, or 0 for the rows that fill up the last batch of an evaluation. (`labels`
    of whole numbers are IGNORE there besides.) A loss that multiplies by it, and counts it, is exact.

    Args:
      data: arrays with one leading axis of examples by name, or a sequence of dicts of equal shapes.
      seed: chooses the permutation of each pass.
      shuffle: False: in order.
      once: True: rows from len on are filling, with weight 0; False: the next pass begins.

    Raises:
      DataError: no examples, arrays of different lengths, or what is not numbers by name.
    """

    def __init__(
        self,
        data: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        seed: int = 0,
        shuffle: bool = True,
        once: bool = False,
    ):
        if isinstance(data, Mapping):
            self._arrays = {name: np.asarray(array) for name, array in data.items()}
            self._examples: Sequence[Mapping[str, Any]] = ()
            lengths = {name: len(array) if array.ndim else 0 for name, array in self._arrays.items()}
            if len(set(lengths.values())) > 1:
                raise DataError(f"the arrays of a dataset have different lengths: {lengths}")
            self._size = next(iter(lengths.values()), 0)
        else:
            self._arrays = {}
            self._examples = data
            self._size = len(data)
        if not self._size:
            raise DataError("the dataset holds no examples")
        self._seed = seed
        self._shuffle = shuffle and not once
        self._once = once
        for name, values in self._read(np.zeros(1, np.int64)).items():
            if not isinstance(name, str) or values.dtype.kind in "OSUMm":
                raise DataError(
                    f"the dataset's {name!r} holds {values.dtype}", "Give numbers by name; leave the rest out."
                )

    @property
    def fingerprint(self) -> str:
        """Digest of names, shapes and the first and last example: enough to notice another dataset at resume."""
        ends = self._read(np.asarray([0, self._size - 1]))
        digest = hashlib.blake2b(repr((self._size, self._shuffle)).encode(), digest_size=16)
        for name in sorted(ends):
            digest.update(f"{name}{ends[name].shape}{ends[name].dtype}".encode() + ends[name].tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Batch:
        return {name: values[0] for name, values in self.rows(np.asarray([index])).items()}

    def row_ids(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(0, example) of rows by number."""
        example = epoch_order(indices, self._size, key64(self._seed, DATA_STREAM), self._shuffle)
        return np.zeros_like(example), example

    def rows(self, indices: np.ndarray) -> Batch:
        """Rows by number, at any n >= 0."""
        indices = np.asarray(indices, np.int64)
        batch = self._read(self.row_ids(indices)[1])
        past = indices >= self._size if self._once else np.zeros(len(indices), bool)
        batch[WEIGHT] = batch.get(WEIGHT, np.ones(len(indices), np.float32)) * ~past
        if past.any() and "labels" in batch and np.issubdtype(batch["labels"].dtype, np.signedinteger):
            batch["labels"][past] = IGNORE
        return batch

    def _read(self, examples: np.ndarray) -> Batch:
        if self._arrays:
            return {name: array[examples] for name, array in self._arrays.items()}
        found = [self._examples[int(example)] for example in examples]
        if not isinstance(found[0], Mapping):
            raise DataError(
                f"an example is a {type(found[0]).__name__}, not a dict", "Give arrays by name, or a sequence of dicts."
            )
        try:
            return {name: np.stack([np.asarray(item[name]) for item in found]) for name in found[0]}
        except (KeyError, ValueError) as error:
            raise DataError(
                f"examples {sorted(set(examples.tolist()))[:8]} differ in their fields or shapes: {error}",
                "Give every example the same fields, padded to the same shape.",
            ) from error


def as_rows(data: Any, *, seed: int | None, shuffle: bool = True) -> Any:
    """A user's data as rows: rows stay as they are, everything else becomes `ArrayRows`.

    Args:
      data: rows, a mapping of arrays, or a random-access sequence of dicts.
      seed: of the shuffled stream for training; None: once in order, for evaluation.
      shuffle: False: training in order, too.

    Raises:
      DataError: none of these.
    """
    if hasattr(data, "rows"):
        return data
    if not isinstance(data, Mapping) and not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise DataError(
            f"a {type(data).__name__} is no dataset", "Give arrays by name, or a sequence of dicts (random access)."
        )
    return ArrayRows(data, seed=seed or 0, shuffle=shuffle, once=seed is None)
