"""One chunk of a source to token files. Runs in the trainer's process or in a worker; never imports jax."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from jtrain.data.sources import Bad, Chunk, read_chunk
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import DataError, StorageError

_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 1 << 20
# The tokenizers library takes about 150 times a text's size in memory while it encodes it.
_LONG_CHARACTERS = 4 << 20
_PIECE_CHARACTERS = 1 << 20
# Where a space follows something else: a place where tokenizers cut, too.
_WORD_CUT = re.compile(r"(?<=\S)(?=\s)")


@dataclass(frozen=True)
class Recipe:
    """How texts become documents of tokens.

    Attributes:
      text_field: field of a record that holds the text.
      append_eos, prepend_bos: whether a document ends and begins with the tokenizer's token.
      bad_limit: bad records after which reading a chunk is of no use; 0: the first ends the run.
    """

    text_field: str = "text"
    append_eos: bool = True
    prepend_bos: bool = False
    bad_limit: int = 0


@dataclass(frozen=True)
class ExampleRecipe:
    """How whole records become documents of tokens with a mask of targets (`jtrain/data/examples.py`).

    Attributes:
      kind: which encoder reads the records; see `examples.ENCODERS`.
      options: its arguments, as JSON has them: with the contents of the files they decide the cache.
      bad_limit: as in `Recipe`.
      title: of the chat template, for messages; not a part of the cache's name.
      folder: what paths in the records are relative to; no part of it, either: the records may move with their files.
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    bad_limit: int = 0
    title: str = "the chat template"
    folder: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The files that its tokens come with; see `tokenise_chunk`."""
        of_images = ("images", "image_lengths") if "image_token" in self.options else ()
        return ("tokens", "targets", "values", *of_images)


AnyRecipe = Recipe | ExampleRecipe


def recipe_of(fields: dict[str, Any]) -> AnyRecipe:
    """The recipe of `dataclasses.asdict`."""
    return ExampleRecipe(**fields) if "kind" in fields else Recipe(**fields)


@dataclass
class ChunkResult:
    """What a chunk held.

    Attributes:
      records: records read, blank lines included.
      documents, tokens: written.
      bad: bad records: index within the chunk and the fields of `Bad`.
    """

    records: int = 0
    documents: int = 0
    tokens: int = 0
    bad: list[dict[str, Any]] = field(default_factory=list)


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def check_special_tokens(tokenizer: Tokenizer, recipe: AnyRecipe) -> None:
    """Raises:
    DataError: the recipe asks for a token that the tokenizer does not have.
    """
    if isinstance(recipe, ExampleRecipe):
        from jtrain.data.examples import make_encoder

        make_encoder(recipe, tokenizer)
        return
    for wanted, token, name in (
        (recipe.append_eos, tokenizer.eos_id, "append_eos"),
        (recipe.prepend_bos, tokenizer.bos_id, "prepend_bos"),
    ):
        if wanted and token is None:
            kind = "end" if name == "append_eos" else "begin"
            raise DataError(
                f"data.{name} is true, but the tokenizer {tokenizer.spec} has no {kind}-of-sequence token",
                f"Set data.{name}: false, or name the token in a tokenizer_config.json beside the tokenizer.",
            )


def tokenise_chunk(chunk: Chunk, recipe: AnyRecipe, tokenizer: Tokenizer, out: str) -> ChunkResult:
    """Writes `out`.tokens (token_dtype) and `out`.lengths (int64: tokens of each document, in order).

    Of examples also `out`.targets (uint8 a token) and `out`.values (float32 a document); with images `out`.images (what
    is kept of them, one behind the other) and `out`.image_lengths (int64: bytes of each).

    Raises:
      DataError: the file can't be read.
      StorageError: the token files can't be written.
    """
    if isinstance(recipe, ExampleRecipe):
        from jtrain.data.examples import tokenise_examples

        return tokenise_examples(chunk, recipe, tokenizer, out)
    result = ChunkResult()
    dtype = token_dtype(tokenizer.vocab_size)
    texts: list[str] = []
    characters = 0
    records = read_chunk(chunk, recipe.text_field)
    try:
        with open(f"{out}.tokens", "wb") as token_file, open(f"{out}.lengths", "wb") as length_file:
            while True:
                record = next(records, _END)
                if isinstance(record, str) and record:
                    texts.append(record)
                    characters += len(record)
                elif isinstance(record, Bad):
                    result.bad.append({"index": result.records, **asdict(record)})
                full = len(texts) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS
                stop = record is _END or len(result.bad) > recipe.bad_limit
                if texts and (full or stop):
                    tokens, lengths = _encode(texts, chunk, recipe, tokenizer, dtype)
                    token_file.write(tokens.data)  # not tofile, which loses the reason of a failure
                    length_file.write(lengths.data)
                    result.documents += len(lengths)
                    result.tokens += len(tokens)
                    texts, characters = [], 0
                if stop:
                    return result
                result.records += 1
    except OSError as error:
        raise StorageError(
            f"{out}.tokens can't be written: {error.strerror or error}", "Free space, or set data.cache_dir."
        ) from error


def _encode(
    texts: Sequence[str], chunk: Chunk, recipe: Recipe, tokenizer: Tokenizer, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    before = [tokenizer.bos_id] if recipe.prepend_bos and chunk.opens else []
    after = [tokenizer.eos_id] if recipe.append_eos and chunk.closes else []
    documents = encode_texts(texts, tokenizer)
    extra = len(before) + len(after)
    lengths = np.fromiter((len(document) + extra for document in documents), np.int64, len(documents))
    ids = itertools.chain.from_iterable(itertools.chain(before, document, after) for document in documents)
    return np.fromiter(ids, dtype, int(lengths.sum())), lengths


def encode_texts(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of each text, without special tokens; a very long one is encoded by pieces."""
    if max(map(len, texts)) <= _LONG_CHARACTERS:
        return tokenizer.encode_batch(texts)
    return [
        list(itertools.chain.from_iterable(tokenizer.encode_batch([piece])[0] for piece in _pieces(text)))
        for text in texts
    ]


def _pieces(text: str) -> Iterator[str]:
    begin = 0
    while len(text) - begin > _LONG_CHARACTERS:
        cut = _WORD_CUT.search(text, begin + _PIECE_CHARACTERS, begin + _LONG_CHARACTERS)
        end = cut.start() if cut else begin + _PIECE_CHARACTERS
        yield text[begin:end]
        begin = end
    yield text[begin:]


class _End:
    pass


_END = _End()
