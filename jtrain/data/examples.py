"""Examples: records that become documents of tokens with a mask of targets, and perhaps a number.

A kind of training says by an encoder how a record is read (`jtrain/data/conversations.py` for SFT). Records are encoded
by chunks, in several processes, into the same memory-mapped caches as texts; `targets` lies beside the tokens. Never
imports jax.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np

from jtrain.data.cache import CacheOptions
from jtrain.data.files import find_files, kind_of
from jtrain.data.sources import Bad, Chunk, digest_of, plan_chunks, read_records
from jtrain.data.store import StoredImages, TokenStore
from jtrain.data.tokenise import AnyRecipe, ChunkResult, ExampleRecipe, token_dtype
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import DataError, StorageError

log = logging.getLogger("jtrain.data")

_SHOWN = 200
CHUNK_BYTES, PARALLEL_BYTES = 1 << 20, 2 << 20
"""Examples cost more than plain text: smaller chunks, and several processes for smaller files."""


class Example(NamedTuple):
    """A document of tokens.

    Attributes:
      ids: its tokens.
      targets: 1 where a token may be a target of the loss, else 0; as long as ids. (The first token of a document has
        nothing before it and never is one, whatever stands here.)
      value: a number that comes with it, such as a label or a margin.
      images: what is kept of its images, in the order of their tokens (`jtrain/data/image_conversations.py`).
    """

    ids: Sequence[int]
    targets: Sequence[int]
    value: float = 0.0
    images: Sequence[bytes] = ()


Encoder = Callable[[Mapping[str, Any]], Sequence[Example]]
"""Reads a record: its documents (one for SFT, two for a pair; none: it is empty and left out).

Raises:
  DataError: the record can't be used; it counts as a bad record (`data.on_bad_record`), and its number is added.
"""

ENCODERS = {
    "sft": "jtrain.data.conversations:sft_encoder",
    "sft_images": "jtrain.data.image_conversations:image_sft_encoder",
    "preference": "jtrain.data.pairs:preference_encoder",
}
"""Kind of a recipe -> `module:function`; `function(tokenizer, **recipe.options, title=recipe.title) -> Encoder`."""


def make_encoder(recipe: ExampleRecipe, tokenizer: Tokenizer) -> Encoder:
    """The encoder that a recipe names.

    Raises:
      DataError: its chat template is none, or the tokenizer lacks a token.
    """
    module, _, function = ENCODERS[recipe.kind].partition(":")
    more = {"folder": recipe.folder} if recipe.folder else {}
    return getattr(importlib.import_module(module), function)(tokenizer, **recipe.options, **more, title=recipe.title)


def tokenise_examples(chunk: Chunk, recipe: ExampleRecipe, tokenizer: Tokenizer, out: str) -> ChunkResult:
    """One chunk of a source to token files; see `tokenise_chunk`."""
    encode = make_encoder(recipe, tokenizer)
    result = ChunkResult()
    dtype = token_dtype(tokenizer.vocab_size)
    try:
        with contextlib.ExitStack() as stack:
            files = {name: stack.enter_context(open(f"{out}.{name}", "wb")) for name in ("lengths", *recipe.parts)}
            for record in read_records(chunk, recipe.options["text_field"]):
                found = record if record is None else _encode(encode, record)
                if isinstance(found, Bad):
                    result.bad.append({"index": result.records, **asdict(found)})
                    if len(result.bad) > recipe.bad_limit:
                        return result
                for example in () if found is None or isinstance(found, Bad) else found:
                    files["tokens"].write(np.asarray(example.ids, dtype).data)
                    files["targets"].write(np.asarray(example.targets, np.uint8).data)
                    files["lengths"].write(np.asarray([len(example.ids)], np.int64).data)
                    files["values"].write(np.asarray([example.value], np.float32).data)
                    for image in example.images:
                        files["images"].write(image)
                        files["image_lengths"].write(np.asarray([len(image)], np.int64).data)
                    result.documents += 1
                    result.tokens += len(example.ids)
                result.records += 1
    except OSError as error:
        raise StorageError(
            f"{out}.tokens can't be written: {error.strerror or error}", "Free space, or set data.cache_dir."
        ) from error
    return result


def example_store(
    records: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, options: CacheOptions, *, name: str
) -> TokenStore:
    """Encodes records in memory: a list of dicts, a `datasets.Dataset`, any sequence of records.

    Args:
      records: random access is used in order, once.
      tokenizer: of the model.
      options: with an `ExampleRecipe`; the policy for bad records.
      name: of the argument, for messages.

    Raises:
      DataError: no example at all, or more bad records than the policy allows; the first bad one is named.
    """
    assert isinstance(options.recipe, ExampleRecipe)
    encode = make_encoder(options.recipe, tokenizer)
    limit = options.max_bad_records if options.on_bad_record == "skip" else 0
    found: list[Example] = []
    bad = 0
    for index in range(len(records)):
        result = _encode(encode, records[index])
        if not isinstance(result, Bad):
            found += result
            continue
        bad += 1
        if bad > limit:
            raise DataError(f"{name}[{index}] {result.reason}", result.remedy)
    if bad:
        log.warning("%d records of %s can't be used and were left out", bad, name)
    if not found:
        raise DataError(f"{name} holds no example", "Every record of it is empty.")
    ids, targets, values, images = zip(*found, strict=True)
    store = replace(TokenStore.from_documents(ids, targets, values), bad_records=bad)
    if "image_token" not in options.recipe.options:
        return store
    payloads = [payload for of_example in images for payload in of_example]
    data = np.frombuffer(b"".join(payloads), np.uint8)
    return with_images(store, tokenizer, options.recipe, data, np.asarray([len(one) for one in payloads], np.int64))


def with_cached_images(store: TokenStore, tokenizer: Tokenizer, recipe: AnyRecipe) -> TokenStore:
    """A store of a cache with the images that lie beside its tokens."""
    assert isinstance(recipe, ExampleRecipe) and store.path is not None
    lengths = np.fromfile(store.path / "image_lengths.bin", np.int64)
    data = np.memmap(store.path / "images.bin", np.uint8, "r") if len(lengths) else np.zeros(0, np.uint8)
    return with_images(store, tokenizer, recipe, data, lengths)


def with_images(
    store: TokenStore, tokenizer: Tokenizer, recipe: ExampleRecipe, data: np.ndarray, lengths: np.ndarray
) -> TokenStore:
    """A store with the images of its examples.

    Args:
      store: the tokens.
      tokenizer: of the model.
      recipe: of the examples; says what the image token is, and how many an image has.
      data, lengths: what is kept of the images, one behind the other, and the bytes of each.
    """
    token = tokenizer.token_to_id(recipe.options["image_token"])
    size = recipe.options["image_tokens"]
    starts = np.flatnonzero(np.asarray(store.tokens) == token)[::size].astype(np.int64)
    assert len(starts) == len(lengths), "an image without its tokens"
    edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    fingerprint = store.fingerprint
    if store.path is None:  # that of a cache stands for the records, with all that is in them
        fingerprint = hashlib.blake2b(fingerprint.encode() + data.tobytes(), digest_size=16).hexdigest()
    return replace(store, images=StoredImages(data, edges, starts, size, recipe.folder), fingerprint=fingerprint)


def first_record(data: Any, text_field: str, *, field: str, name: str) -> Mapping[str, Any]:
    """The first record of a path, or of records in memory, that can be read at all.

    Args:
      data: the path or the records.
      text_field: of the config.
      field, name: the config's field, and the source in messages.

    Raises:
      DataError: there is no such file or no record, or it can't be read.
    """
    for record in iterate_records(data, text_field, field=field):
        return record
    raise DataError(f"{name} holds no record", "Check the path: its files are empty, or no line is a JSON object.")


def iterate_records(data: Any, text_field: str, *, field: str) -> Iterator[Mapping[str, Any]]:
    """The records of a path, or of records in memory, in order; those that can't be read are left out.

    Args, raises: see `first_record`; no record at all is no error.
    """
    if not isinstance(data, str):
        yield from (data[index] for index in range(len(data)))
        return
    for path in find_files(data, field=field):
        for chunk in plan_chunks(path, kind_of(path), CHUNK_BYTES, 1 << 62):
            for record in read_records(chunk, text_field):
                if isinstance(record, dict):
                    yield record


def example_options(options: CacheOptions, recipe: ExampleRecipe) -> CacheOptions:
    """The options of texts for examples of a recipe."""
    return replace(options, recipe=recipe, chunk_bytes=CHUNK_BYTES, parallel_bytes=PARALLEL_BYTES)


def _encode(encode: Encoder, record: Any) -> Sequence[Example] | Bad:
    if isinstance(record, Bad):
        return record
    try:
        return encode(record)
    except DataError as error:
        shown = repr(record)
        return Bad(
            f"can't be used: {error.message}", error.remedy or "Mend it.", shown[:_SHOWN], digest_of(shown.encode())
        )
