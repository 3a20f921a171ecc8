"""Texts in memory as documents of tokens: a list of dicts, a `datasets.Dataset`, any sequence of records."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jtrain.data.cache import CacheOptions
from jtrain.data.store import TokenStore
from jtrain.data.tokenise import Recipe, check_special_tokens, encode_texts
from jtrain.data.tokenizers import Tokenizer
from jtrain.data.unicode import check_unicode
from jtrain.errors import DataError

log = logging.getLogger(__name__)

_BATCH_DOCUMENTS = 1024


def is_texts(data: Any) -> bool:
    """Whether `data` is a sequence of records, rather than of rows of tokens: its first item has no `input_ids`."""
    if isinstance(data, Mapping) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or not len(data):
        return False
    first = None if hasattr(data, "rows") else data[0]
    return isinstance(first, Mapping) and "input_ids" not in first


def text_store(
    records: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, options: CacheOptions, *, name: str
) -> TokenStore:
    """Tokenises the text field of every record, in memory. A record is one document; an empty text is none.

    Args:
      records: random access is used in order, once.
      tokenizer: of the texts.
      options: the recipe, and the policy for bad records.
      name: of the argument, for messages.

    Raises:
      DataError: no text at all, a token that is missing, or more records without text than the policy allows.
    """
    recipe = options.recipe
    assert isinstance(recipe, Recipe)
    check_special_tokens(tokenizer, recipe)
    before = [tokenizer.bos_id] if recipe.prepend_bos else []
    after = [tokenizer.eos_id] if recipe.append_eos else []
    bad: list[int] = []
    texts = _texts(records, recipe.text_field, options, name, bad)
    documents: list[list[Any]] = []
    while batch := list(itertools.islice(texts, _BATCH_DOCUMENTS)):
        documents += [[*before, *ids, *after] for ids in encode_texts(batch, tokenizer)]
    if not documents:
        raise DataError(f"{name} holds no text", f"Every {recipe.text_field!r} of it is empty.")
    return replace(TokenStore.from_documents(documents), bad_records=len(bad))


def _texts(
    records: Sequence[Mapping[str, Any]], field: str, options: CacheOptions, name: str, bad: list[int]
) -> Iterator[str]:
    """The texts; numbers of records without any go into `bad`."""
    limit = options.max_bad_records if options.on_bad_record == "skip" else 0
    for index in range(len(records)):
        record = records[index]
        text = record.get(field)
        half: DataError | None = None
        if isinstance(text, str):
            try:
                check_unicode([text], f"{name}[{index}]")
            except DataError as error:
                half = error
            else:
                if text:
                    yield text
                continue
        bad.append(index)
        if len(bad) > limit:
            if half is not None:
                raise half
            what = f"has no field {field!r}" if field not in record else f"has {text!r} as {field!r}, which is no text"
            raise DataError(
                f"{name}[{index}] {what}",
                f"Its fields are: {', '.join(map(str, record))}. Set data.text_field to the one that holds the text.",
            )
    if bad:
        log.warning("%d records of %s have no text and were left out", len(bad), name)
