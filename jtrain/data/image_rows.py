"""Pixels of rows: how many images the rows of a batch have room for, and the images themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jtrain.data.image_processor import ImageProcessor
from jtrain.errors import DataError

if TYPE_CHECKING:
    from jtrain.data.packing import Plan
    from jtrain.data.rows import PackedRows
    from jtrain.data.store import TokenStore

Transform = Callable[[bytes, str], np.ndarray]
"""From what a store keeps of an image, and the folder of its path, to its pixels, float32 [height, width, channels]."""


def transform_of(images: ImageProcessor | None) -> Transform | None:
    """The transform of a model's images; None: it does not see."""
    if images is None:
        return None
    from jtrain.data.image_conversations import open_payload

    return lambda payload, folder: images.transform(open_payload(payload, folder))


class PlannedImages:
    """The images of the planned rows of one store.

    Args:
      store: with images.
      plan: the pieces of each row.
      transform: of the images.
    """

    def __init__(self, store: TokenStore, plan: Plan, transform: Transform):
        assert store.images is not None
        self._store, self._images, self._transform, self._plan = store, store.images, transform, plan
        starts = np.asarray(plan.starts)
        self._first, self._end = np.searchsorted(self._images.starts, [starts, starts + plan.lengths])
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._end - self._first)])
        self.counts = before[plan.first[1:]] - before[plan.first[:-1]]
        """Images of each row, int64 [rows]."""

    def pixels(self, row: int) -> list[np.ndarray]:
        """The images of a row, in the order of their tokens.

        Raises:
          DataError: one is missing or damaged.
        """
        pieces = range(int(self._plan.first[row]), int(self._plan.first[row + 1]))
        return [self.image(n) for piece in pieces for n in range(int(self._first[piece]), int(self._end[piece]))]

    def image(self, number: int) -> np.ndarray:
        """An image of the store."""
        try:
            return self._transform(self._images[number], self._images.folder)
        except DataError as error:  # it was there when the records were read
            example = int(np.searchsorted(self._store.edges, self._images.starts[number], side="right")) - 1
            raise DataError(f"{error.message} (of example {example})", error.remedy) from error


def image_slots(sources: Sequence[PackedRows], source: np.ndarray, row: np.ndarray) -> int:
    """Images that the rows of a batch have room for: the most that one of them has, and then the next power of two.

    One at least where any source has images: batches without any have no program of their own. 0: no source has.
    """
    if all(one.images is None for one in sources):
        return 0
    counts = [one.images.counts[row[source == n]] for n, one in enumerate(sources) if one.images is not None]
    most = max(int(count.max(initial=0)) for count in counts)
    return 1 << max(most - 1, 0).bit_length()


def gather_pixels(sources: Sequence[PackedRows], source: np.ndarray, row: np.ndarray, slots: int) -> np.ndarray:
    """The images of rows, float32 [n, I, height, width, channels]; zeros where a row has fewer."""
    places = zip(source.tolist(), row.tolist(), strict=True)
    planned = [(sources[number].images, at) for number, at in places]
    found = [[] if images is None else images.pixels(at) for images, at in planned]
    shape = next((image.shape for images in found for image in images), None)
    if shape is None:  # none of these rows has one: that of any
        shape = next(one.images.image(0).shape for one in sources if one.images is not None)
    pixels = np.zeros((len(found), slots, *shape), np.float32)
    for place, images in enumerate(found):
        for slot, image in enumerate(images):
            pixels[place, slot] = image
    return pixels
