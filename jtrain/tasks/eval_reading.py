"""How an evaluation reads its data, and with which tokenizer."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

from jtrain.config import load
from jtrain.config.names import nearest
from jtrain.config.schema import Config
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import ConfigError, DataError
from jtrain.tasks.decoder import check_language_model
from jtrain.tasks.loaded import LoadedModel

LONGEST_TEXT_ROW = 2048
"""Tokens of a row of texts where nobody says it: models that take more would score a long document in one row."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """How data is read for an evaluation.

    Attributes:
      max_length: tokens of a row; None: what the model takes, of texts at most 2,048.
      packing: best_fit (documents share rows; by default for texts) or none (one a row, padded; for examples).
      stride: of texts that are longer than a row: windows that overlap, each this many tokens behind the one before,
        in place of pieces that know nothing of each other; 0: pieces.
      truncation: keep_start or keep_end: what is scored of an example that is longer than a row; None: it is an error.
      text_field: field of a record that holds a text.
      append_eos: whether the end token of texts and text completions is there and scored.
      completion_only_loss: auto: of prompt and completion, the completion; False: both.
      assistant_only_loss: of messages, what the assistant writes.
      chat_template: a name of the model's, or a .jinja file; None: the usual one.
      on_bad_record: what a record that can't be read does: fail, or skip (up to a hundred are left out).
      cache_dir: where tokenised data is kept.
    """

    max_length: int | None = None
    packing: str | None = None
    stride: int = 0
    truncation: str | None = None
    text_field: str = "text"
    append_eos: bool = True
    completion_only_loss: bool | str = "auto"
    assistant_only_loss: bool = False
    chat_template: str | None = None
    on_bad_record: str = "fail"
    cache_dir: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Reading:
        """The reading with these options.

        Raises:
          ConfigError: one that there is not, or a number that is none.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name, value in options.items():
            if name not in known:
                meant = nearest(name, known)
                remedy = f"They are: {', '.join(known)}."
                raise ConfigError(
                    f"{name}={value!r:.60}: an evaluation has no such option",
                    f"Did you mean {meant}? {remedy}" if meant else remedy,
                )
        if options.get("max_length") is not None:
            whole("max_length", options["max_length"], 2)
        whole("stride", options.get("stride", 0), 0)
        return cls(**options)

    def config(self, model: LoadedModel, task: str, length: int) -> Config:
        """The config of a run of `task` (pretrain or sft) that reads data so, with rows of `length` tokens."""
        usual = "best_fit" if task == "pretrain" else "none"
        section: dict[str, Any] = {
            "text_field": self.text_field,
            "append_eos": self.append_eos,
            "packing": self.packing or usual,
            "on_bad_record": self.on_bad_record,
            "cache_dir": self.cache_dir,
        }
        values: dict[str, Any] = {"task": task, "max_length": length, "data": section}
        values["mesh"] = {"context": model.mesh.shape["context"]}
        if task == "sft":
            section |= {"chat_template": self.chat_template, "truncation": self.truncation or "keep_start"}
            values["sft"] = {
                "completion_only_loss": self.completion_only_loss,
                "assistant_only_loss": self.assistant_only_loss,
            }
        else:
            section["prepend_bos"] = tokenizer_of(model).add_bos
        return load.load_config(values, env={})

    def length(self, limit: int, texts: bool) -> int:
        """Tokens of a row for a model that takes `limit`.

        Raises:
          ConfigError: more than that, or a stride that does not fit.
        """
        length = self.max_length or (min(limit, LONGEST_TEXT_ROW) if texts else limit)
        if length > limit or length < 2:
            raise ConfigError(
                f"max_length={length}, and the model takes rows of {limit} tokens (max_position_embeddings)",
                f"write max_length: a number from 2 to {limit}",
            )
        if self.stride and not 0 < self.stride < length:
            raise ConfigError(
                f"stride={self.stride} with max_length={length}",
                f"write a number from 1 to {length - 1}; half of max_length is usual",
            )
        if self.stride and not texts:
            raise ConfigError(f"stride={self.stride}, and the data holds no texts", "leave it out: examples fill a row")
        return length


def tokenizer_of(model: LoadedModel) -> Tokenizer:
    """The tokenizer of a language model.

    Raises:
      ConfigError: it has none, is another kind of model, or was not loaded.
      DataError: it has more tokens than the model.
    """
    if not isinstance(model, LoadedModel):
        raise ConfigError(
            f"model is {model!r:.80}, not a loaded model", "load it once: model = jtrain.load_model(DIR), and give that"
        )
    check_language_model(model.decoder, "MODEL")
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ConfigError(
            "the model has no tokenizer, and the data is text", "give one (jtrain eval: --tokenizer bytes, or a folder)"
        )
    if tokenizer.vocab_size > model.decoder.vocab_size:
        raise DataError(
            f"the tokenizer {tokenizer.spec} has {tokenizer.vocab_size} tokens, and the model "
            f"{model.decoder.vocab_size}",
            "use the tokenizer that belongs to the model",
        )
    return tokenizer


def whole(name: str, value: Any, least: int) -> None:
    """Sees that an option is a whole number.

    Raises:
      ConfigError: it is not, or less than `least`.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r:.60}", f"write a whole number, {least} or more")
