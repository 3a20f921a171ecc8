"""Images with texts as rows: from JSONL and Parquet files, npz arrays, or records in memory.

A record has an image, and a text or a label:
  image         what `jtrain.data.images.read_image` takes; a path is relative to the file of the record
  text          or `caption`: a text, or several, of which every pass takes one
  label         number or name of one of the classes; without a text a template says it: "a photo of a cat"
An npz has these as arrays (or `images`, `texts`, `captions`, `labels`).

Which text or template a row has, and which record it is, are functions of (seed, number of the row). Images are read
when their row is. Legend: n rows asked for, L tokens. A batch of rows has
  pixels          float32 [n, height, width, channels]
  input_ids       int32 [n, L]
  attention_mask  int32 [n, L]  1 for tokens, 0 for padding
  text_key        int32 [n, 2]  equal where texts are
  label           int32 [n]     the class; -1: none
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from jtrain.data.captions import CaptionEncoder, text_keys
from jtrain.data.examples import CHUNK_BYTES
from jtrain.data.files import find_files, kind_of, open_file
from jtrain.data.images import ImageTransform
from jtrain.data.order import DATA_STREAM, key64
from jtrain.data.rows import Batch, epoch_order
from jtrain.data.sources import Bad, plan_chunks, read_records
from jtrain.data.unicode import check_unicode
from jtrain.errors import DataError

_TEXT_STREAM = 0x74657874
_REMEDY = 'A record is {"image": PATH, "text": ...}; data.text_field and contrastive.image_field name the fields.'


@dataclass(frozen=True)
class Fields:
    """Names of a record's fields, and the classes that labels stand for."""

    image: str = "image"
    text: str = "text"
    label: str = "label"
    classes: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()

    def texts_of_class(self, label: int) -> tuple[str, ...]:
        """Every template with the name of the class in it."""
        return tuple(template.replace("{}", self.classes[label]) for template in self.templates)


@dataclass(frozen=True)
class Pair:
    """A record that has been looked at.

    Attributes:
      image: as `read_image` takes it.
      texts: those that it may have.
      label: its class; -1: none.
      name: for messages.
      folder: what the path of the image is relative to.
      templated: whether the texts are the templates of its class.
    """

    image: Any
    texts: tuple[str, ...]
    label: int
    name: str
    folder: str | None
    templated: bool = False


def read_pairs(source: Any, fields: Fields, *, field: str) -> list[Pair]:
    """The records of a path, or of records in memory.

    Args:
      source: a path, glob, folder, URL; a sequence of records; or a mapping of arrays.
      fields: what they have.
      field: of the config or the argument, for messages.

    Raises:
      DataError: a record without an image, or with neither text nor label; it is named. No record at all.
    """
    pairs: list[Pair] = []
    if isinstance(source, str):
        for path in find_files(source, field=field):
            pairs += _of_file(path, fields)
    elif isinstance(source, Mapping):
        pairs = _of_arrays(source, fields, field, None)
    elif isinstance(source, bytes) or not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        raise DataError(f"{field} is a {type(source).__name__}", "Give paths, a list of records, or a dict of arrays.")
    else:
        pairs = [_pair(source[n], fields, f"{field}[{n}]", None) for n in range(len(source))]
    if not pairs:
        where = f"{field}: {source}" if isinstance(source, str) else field
        raise DataError(f"{where} holds no record", _REMEDY)
    return pairs


def _of_file(path: str, fields: Fields) -> list[Pair]:
    if path.lower().endswith(".npz"):
        try:
            with open_file(path) as file, np.load(file, allow_pickle=False) as content:
                arrays = {name: content[name] for name in content.files}
        except (ValueError, OSError, EOFError) as error:
            raise DataError(f"{path} is no npz of arrays: {error}", "Write it with numpy.savez.") from error
        except Exception as error:  # zipfile.BadZipFile, zlib.error
            raise DataError(f"{path} is damaged: {error}", "Write it anew with numpy.savez.") from error
        return _of_arrays(arrays, fields, path, os.path.dirname(path))
    kind, folder, pairs, number = kind_of(path), os.path.dirname(path), [], 0
    for chunk in plan_chunks(path, kind, CHUNK_BYTES, 1 << 62):
        for record in read_records(chunk, fields.text):
            number += 1
            name = f"{path}: {'line' if kind == 'jsonl' else 'record'} {number}"
            if isinstance(record, Bad):
                raise DataError(f"{name} {record.reason}", record.remedy)
            if record is not None:
                pairs.append(_pair(record, fields, name, folder))
    return pairs


def _of_arrays(arrays: Mapping[str, Any], fields: Fields, name: str, folder: str | None) -> list[Pair]:
    wanted = {
        fields.image: (fields.image, "images"),
        fields.text: (fields.text, "texts", "caption", "captions"),
        fields.label: (fields.label, "labels"),
    }
    found = {ours: next((arrays[one] for one in names if one in arrays), None) for ours, names in wanted.items()}
    held = {ours: array for ours, array in found.items() if array is not None}
    lengths = {ours: next(iter(_shape(array)), None) for ours, array in held.items()}
    if fields.image not in held or len(set(lengths.values())) != 1 or None in lengths.values():
        has = ", ".join(f"{one} {_shape(array)}" for one, array in arrays.items()) or "nothing"
        raise DataError(f"{name} has {has}", "Give images, and texts or labels, of one length.")
    return [
        _pair({ours: array[n] for ours, array in held.items()}, fields, f"{name}: record {n + 1}", folder)
        for n in range(len(held[fields.image]))
    ]


def _shape(array: Any) -> list[int]:
    """The shape of an array, the length of another sequence; nothing of a single value."""
    if isinstance(array, str | bytes | Mapping) or not (hasattr(array, "__getitem__") and hasattr(array, "__len__")):
        return []
    return list(getattr(array, "shape", None) or ([] if hasattr(array, "shape") else [len(array)]))


def _pair(record: Any, fields: Fields, name: str, folder: str | None) -> Pair:
    if not isinstance(record, Mapping):
        raise DataError(f"{name} is a {type(record).__name__}, no record", _REMEDY)
    image, text = record.get(fields.image), record.get(fields.text)
    if text is None and fields.text == "text":
        text = record.get("caption")
    label = _label(record.get(fields.label), fields, name)
    if image is None:
        raise DataError(f"{name} has no {fields.image!r}; its fields are {', '.join(map(str, record))}", _REMEDY)
    templated = text is None and label >= 0 and bool(fields.templates)
    if templated:
        texts: Any = fields.texts_of_class(label)
    else:
        texts = (text,) if isinstance(text, str) else text.tolist() if isinstance(text, np.ndarray) else text
        if not isinstance(texts, list | tuple) or not texts or not all(isinstance(t, str) and t for t in texts):
            shown = "nothing" if text is None else repr(text)[:60]
            hint = " (labels need contrastive.classes)" if text is None and record.get(fields.label) is not None else ""
            raise DataError(f"{name} has {shown} as {fields.text!r}{hint}", _REMEDY)
    try:
        check_unicode(texts)
    except DataError as error:
        raise DataError(f"{name}: {error.message}", error.remedy) from error
    return Pair(image, tuple(map(str, texts)), label, name, folder, templated)


def _label(value: Any, fields: Fields, name: str) -> int:
    if value is None or not fields.classes:
        return -1
    if isinstance(value, str):
        if value in fields.classes:
            return fields.classes.index(value)
    elif isinstance(value, int | np.integer) and not isinstance(value, bool) and 0 <= value < len(fields.classes):
        return int(value)
    raise DataError(
        f"{name} has the label {value!r}, and contrastive.classes has {len(fields.classes)} names",
        f"Write a number from 0 to {len(fields.classes) - 1}, or one of {', '.join(fields.classes[:10])}.",
    )


class ImageTextRows:
    """Pairs as rows: an endless shuffled stream, or once in order (rows past the end repeat the last).

    Args:
      pairs: the records.
      encode: of texts.
      transform: of images.
      shape: height, width and channels that the model takes.
      seed: of the stream and of the choice of texts; None: once, in order, every record with its first text (of a
        class: one template after the other).
      shuffle: False: the stream is in order, too.
      threads: that read images.

    Raises:
      DataError: the transform gives another size than the model takes.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        encode: CaptionEncoder,
        transform: ImageTransform,
        shape: tuple[int, int, int],
        *,
        seed: int | None,
        shuffle: bool = True,
        threads: int | None = None,
    ):
        self._pairs, self._encode, self._transform, self._shape = pairs, encode, transform, shape
        self._seed, self._shuffle = seed, shuffle
        self._threads = threads or min(8, os.cpu_count() or 1)
        self._pool: ThreadPoolExecutor | None = None
        digest = hashlib.blake2b(repr((len(pairs), shuffle, transform)).encode(), digest_size=16)
        for pair in pairs:
            image = pair.image if isinstance(pair.image, str) else hashlib.blake2b(_bytes(pair.image)).hexdigest()
            digest.update(repr((image, pair.texts, pair.label)).encode())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._pairs)

    def row_ids(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(0, record) of rows by number."""
        indices = np.asarray(indices, np.int64)
        if self._seed is None:
            record = np.minimum(indices, len(self) - 1)
        else:
            record = epoch_order(indices, len(self), key64(self._seed, DATA_STREAM), self._shuffle)
        return np.zeros_like(record), record

    def rows(self, indices: np.ndarray) -> Batch:
        """Rows by number, at any n >= 0.

        Raises:
          DataError: an image can't be read; its record is named.
        """
        records = self.row_ids(indices)[1].tolist()
        pairs = [self._pairs[record] for record in records]
        texts = [self._text(pair, index) for pair, index in zip(pairs, np.asarray(indices).tolist(), strict=True)]
        ids = self._encode(texts)
        return {
            "pixels": np.stack(self._images(pairs)) if pairs else np.zeros((0, *self._shape), np.float32),
            "input_ids": ids,
            "attention_mask": self._encode.lengths(ids).astype(np.int32),
            "text_key": text_keys(texts),
            "label": np.asarray([pair.label for pair in pairs], np.int32),
        }

    def first(self, count: int) -> ImageTextRows:
        """The first `count` of the pairs."""
        options = {"seed": self._seed, "shuffle": self._shuffle, "threads": self._threads}
        return ImageTextRows(self._pairs[:count], self._encode, self._transform, self._shape, **options)  # type: ignore[arg-type]

    def _text(self, pair: Pair, index: int) -> str:
        """The text that a pair has as row `index`."""
        count = len(pair.texts)
        if count == 1 or (self._seed is None and not pair.templated):
            return pair.texts[0]
        return pair.texts[index % count if self._seed is None else key64(self._seed, _TEXT_STREAM, index) % count]

    def _images(self, pairs: Sequence[Pair]) -> list[np.ndarray]:
        if len(pairs) == 1 or self._threads == 1:
            return [self._image(pair) for pair in pairs]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="images")
        return list(self._pool.map(self._image, pairs))

    def _image(self, pair: Pair) -> np.ndarray:
        try:
            image = self._transform(pair.image, folder=pair.folder)
        except DataError as error:
            raise DataError(f"{pair.name}: {error.message}", error.remedy) from error
        if image.shape != self._shape:
            raise DataError(
                f"{pair.name}: an image becomes {list(image.shape)}, and the model takes {list(self._shape)}",
                "Mend size and crop_size in preprocessor_config.json.",
            )
        return image


def _bytes(image: Any) -> bytes:
    if isinstance(image, Mapping):
        image = image.get("bytes") or str(image.get("path")).encode()
    if hasattr(image, "tobytes"):
        return image.tobytes()
    return image if isinstance(image, bytes) else repr(image).encode()
