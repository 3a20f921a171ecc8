"""How SFT reads a source: the form of its records, its chat template, and which tokens are targets."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from jtrain.data.conversations import MESSAGES, PROMPT_COMPLETION, TEXT, form_of, needs_template, no_form
from jtrain.data.example_recipe import example_recipe
from jtrain.data.examples import first_record
from jtrain.data.files import find_files
from jtrain.data.rows import PackedRows
from jtrain.data.tokenise import ExampleRecipe
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import ConfigError

if TYPE_CHECKING:
    from jtrain.config.schema import Config

SHORTEST_BUCKET = 128
"""A tile of the attention kernels; shorter rows would gain little."""


def recipe_of(config: Config, tokenizer: Tokenizer, source: Any, field: str, name: str) -> ExampleRecipe:
    """The recipe of one source, by its first record.

    Args:
      config: of the run.
      tokenizer: of the model.
      source: a path, or records in memory.
      field, name: the config's field, and the source in messages.

    Raises:
      DataError: no record, fields that fit no form, or no chat template for messages.
      ConfigError: `completion_only_loss` or `assistant_only_loss` for records that have no such part.
    """
    data, section = config.data, config.sft
    record = first_record(source, data.text_field, field=field, name=name)
    form = form_of(record, data.text_field)
    if form is None:
        raise no_form(name, record, data.text_field)
    messages = needs_template(record, form)
    images = tokenizer.images
    if section.completion_only_loss is True and form != PROMPT_COMPLETION:
        remedy = "sft.assistant_only_loss: true learns the assistant's turns alone; or write" if messages else "Write"
        raise ConfigError(
            f"sft.completion_only_loss: true, and the records of {name} hold {form}, not prompt and completion",
            f"{remedy} sft.completion_only_loss: auto.",
        )
    if section.assistant_only_loss and not messages:
        raise ConfigError(
            f"sft.assistant_only_loss: true, and the records of {name} hold {form}"
            + (" as texts" if form == PROMPT_COMPLETION else "")
            + ": no message of an assistant",
            "Give messages, or write sft.assistant_only_loss: false.",
        )
    of_images = {} if images is None else {"image_token": images.token, "image_tokens": images.tokens}
    recipe = example_recipe(
        "sft" if images is None else "sft_images",
        config,
        tokenizer,
        record,
        messages=messages,
        form=form,
        completion_only=section.completion_only_loss is not False,
        assistant_only=section.assistant_only_loss,
        **of_images,
    )
    return recipe if images is None else dataclasses.replace(recipe, folder=folder_of(source, field))


def folder_of(source: Any, field: str) -> str:
    """What the paths of images in a source are relative to: the folder of its (first) file; of records in memory the
    working directory."""
    if not isinstance(source, str):
        return os.getcwd()
    return os.path.dirname(os.path.abspath(find_files(source, field=field)[0]))


def describe_recipe(recipe: ExampleRecipe) -> str:
    """The form that was found and what is learned of it, for the log."""
    form, options = recipe.options["form"], recipe.options
    learned = "all tokens are learned"
    if form == PROMPT_COMPLETION and options["completion_only"]:
        learned = "completions are learned"
    if options["assistant_only"]:
        learned = "the assistant's turns are learned"
    return {TEXT: "texts", MESSAGES: "messages"}.get(form, form) + f"; {learned}"


def counts(rows: PackedRows) -> dict[str, int]:
    """Of the examples of a source: `examples` in all, `left_out` (no token to learn), `cut` (longer than a row)."""
    edges, plan = np.asarray(rows.edges), rows.plan
    kept = len(np.unique(np.searchsorted(edges, plan.starts, side="right")))
    lengths = np.diff(edges)
    return {
        "examples": len(lengths),
        "left_out": len(lengths) - kept,
        "cut": int((lengths > plan.max_length).sum()),
    }


def buckets_of(config: Config) -> tuple[int, ...]:
    """The lengths that batches are padded to, rising to `max_length`; empty where rows are packed.

    Raises:
      ConfigError: a bucket that the devices of `mesh.context` can't share.
    """
    data, length, context = config.data, config.max_length, config.mesh.context
    if data.packing != "none":
        return ()
    unit = 2 * context if context > 0 else length
    if data.buckets:
        for bucket in data.buckets:
            if context != 1 and bucket % unit:
                raise ConfigError(
                    f"data.buckets: {bucket} is no multiple of 2 x {context} mesh.context",
                    f"Write multiples of {unit}.",
                )
        return tuple(sorted({*data.buckets, length}))
    found = {length}
    bucket = SHORTEST_BUCKET
    while bucket < length:
        if context == 1 or bucket % unit == 0:
            found.add(bucket)
        bucket *= 2
    return tuple(sorted(found))
