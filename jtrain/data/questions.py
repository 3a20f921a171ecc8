"""Prompts with the answers that are expected of them: what generated text is scored against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jtrain.data.chat import ChatTemplate
from jtrain.data.conversations import MESSAGES, PROMPT_COMPLETION, ChatEncoder, beside, conversation, has_images
from jtrain.data.examples import iterate_records, make_encoder
from jtrain.data.rows import PackedRows
from jtrain.data.sft import recipe_of
from jtrain.data.tokenise import ExampleRecipe
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import DataError

if TYPE_CHECKING:
    from jtrain.config.schema import Config


class Question(NamedTuple):
    """A prompt and its answer.

    Attributes:
      ids: the prompt in tokens, ready for an answer.
      reference: the answer that the record holds: its completion, or what the assistant says last.
      record: all of its fields.
      where: its source and number, for messages.
    """

    ids: list[int]
    reference: str
    record: Mapping[str, Any]
    where: str = "data"


def read_questions(
    config: Config, tokenizer: Tokenizer, source: Any, *, field: str, name: str, rows: PackedRows | None = None
) -> Iterator[Question]:
    """The prompts and answers of a source of SFT, in order, read as its examples are.

    Of a conversation, the answer is its last message of the assistant, and the prompt what stands before. Records whose
    answer is no text (a call of a tool), or that begin with it, are left out.

    Args:
      config: of the run, with `task: sft`.
      tokenizer: of the model.
      source: a path, or records in memory.
      field, name: the config's field, and the source in messages.
      rows: a stretch of the source: only its records; None: all.

    Raises:
      DataError: the source can't be read, or its records have no answers.
    """
    recipe = recipe_of(config, tokenizer, source, field, name)
    form, text_field = recipe.options["form"], config.data.text_field
    if form not in (PROMPT_COMPLETION, MESSAGES):
        raise DataError(
            f"{name}: its records hold texts: no prompt to answer, and no answer to compare with",
            "give prompt and completion, or messages; or leave metrics of texts and samples out",
        )
    template = None
    if recipe.options["template"] is not None:
        template = ChatTemplate(recipe.options["template"], recipe.options["special_tokens"], name=recipe.title)
    encoder = ChatEncoder(tokenizer, template, append_eos=False, prepend_bos=recipe.options["prepend_bos"])
    records = iterate_records(source, text_field, field=field)
    if rows is not None:
        records = _stretch(records, rows, recipe, tokenizer, source, text_field, field)
    for number, record in enumerate(records, 1):
        if has_images(record):
            if tokenizer.images is None and config.data.on_bad_record == "skip":
                continue  # its example is left out as well
            raise DataError(
                f"{name}: record {number} holds images: answers to them are not scored",
                "give records without images, or leave metrics of texts and samples out",
            )
        try:
            found = _question(encoder, record, form)
        except DataError as error:
            if config.data.on_bad_record == "skip":
                continue
            raise DataError(f"{name}: record {number}: {error.message}", error.remedy) from error
        if found is not None:
            yield found._replace(where=f"{name}: record {number}")


def _question(encoder: ChatEncoder, record: Mapping[str, Any], form: str) -> Question | None:
    if form == PROMPT_COMPLETION:
        prompt, answer = record.get("prompt"), record.get("completion")
        if isinstance(prompt, str) and isinstance(answer, str):
            return Question(encoder.prompt(prompt), answer, record)
        messages = [*_messages(prompt), *_messages(answer)]
    else:
        messages = _messages(record.get("messages") or record.get("conversations"))
    places = [place for place, message in enumerate(messages) if message.get("role") == "assistant"]
    if not places or not places[-1] or not isinstance(messages[places[-1]].get("content"), str):
        return None
    return Question(encoder.prompt(messages[: places[-1]], **beside(record)), messages[places[-1]]["content"], record)


def _messages(messages: Any) -> list[Mapping[str, Any]]:
    plain = conversation(messages)
    if not isinstance(plain, Sequence) or isinstance(plain, str) or not all(isinstance(m, Mapping) for m in plain):
        return []  # the examples were read before: such a record is a bad one, and was dealt with
    return list(plain)


def _stretch(
    records: Iterator[Mapping[str, Any]],
    rows: PackedRows,
    recipe: ExampleRecipe,
    tokenizer: Tokenizer,
    source: Any,
    text_field: str,
    field: str,
) -> Iterator[Mapping[str, Any]]:
    """The records whose documents are those of a stretch of the store.

    A record is one document, but for those that are empty or bad, which are none. Where there are some, only encoding
    the records before the stretch tells how many.
    """
    edges = np.asarray(rows.store.edges)
    before, count = int(np.searchsorted(edges, rows.edges[0])), len(rows.edges) - 1
    simple = before == 0 or sum(1 for _ in iterate_records(source, text_field, field=field)) == len(edges) - 1
    encode = None if simple else make_encoder(recipe, tokenizer)
    document = 0
    for record in records:
        if encode is None:
            found = 1
        else:
            try:
                found = len(encode(record))
            except DataError:
                found = 0
        if found and document >= before:
            yield record
        document += found
        if document >= before + count:
            return
