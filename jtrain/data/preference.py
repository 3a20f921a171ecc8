"""How the tasks of preferences read a source: the form of its records, its chat template, rows of pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jtrain.data.conversations import columns
from jtrain.data.example_recipe import example_recipe
from jtrain.data.examples import first_record
from jtrain.data.pairs import FORMS, PAIRS, SINGLES, PairRows, SingleRows, form_of, needs_template
from jtrain.data.store import TokenStore
from jtrain.data.tokenise import ExampleRecipe
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import DataError

if TYPE_CHECKING:
    from jtrain.config.schema import Config


def is_unpaired(config: Config) -> bool:
    """Whether the task learns from single completions."""
    return config.task == "dpo" and config.dpo.loss_type[0] in ("kto", "apo_zero_unpaired")


def recipe_of(config: Config, tokenizer: Tokenizer, source: Any, field: str, name: str) -> ExampleRecipe:
    """The recipe of one source, by its first record.

    Args:
      config: of the run.
      tokenizer: of the model.
      source: a path, or records in memory.
      field, name: the config's field, and the source in messages.

    Raises:
      DataError: no record, fields that fit no form, or no chat template for messages.
    """
    data = config.data
    record = first_record(source, data.text_field, field=field, name=name)
    form, single = form_of(record), is_unpaired(config)
    if form is None or (form == SINGLES and not single):
        known = FORMS if single or config.task == "dpo" else FORMS.partition(", or, for KTO")[0]
        reads = "KTO" if single else {"dpo": "DPO", "reward": "a reward model"}[config.task]
        raise DataError(f"{name}: its records have the fields {columns(record)}", f"{reads} reads {known}.")
    return example_recipe(
        "preference",
        config,
        tokenizer,
        record,
        messages=needs_template(record),
        form=form,
        single=single,
        whole=config.task == "reward",
    )


def describe_recipe(recipe: ExampleRecipe) -> str:
    """The form that was found, for the log."""
    kind = "texts" if recipe.options["template"] is None else "messages"
    apart = ", taken apart" if recipe.options["single"] and recipe.options["form"] == PAIRS else ""
    return f"{recipe.options['form']}{apart}; {kind}"


def documents_of_a_record(config: Config, recipe_form: str = PAIRS) -> int:
    """Documents of the store that belong together: the halves of a pair."""
    return 1 if is_unpaired(config) and recipe_form == SINGLES else 2


def rows_of(config: Config, store: TokenStore, edges: np.ndarray, pad_id: int, title: str) -> PairRows | SingleRows:
    """The rows of a stretch of a store, as the task reads them."""
    if is_unpaired(config):
        return SingleRows(store, edges, config.max_length, config.data.truncation, pad_id=pad_id, title=title)
    reward = config.task == "reward"
    truncation = "drop" if reward else config.data.truncation
    return PairRows(store, edges, config.max_length, truncation, pad_id=pad_id, margins=reward, title=title)
