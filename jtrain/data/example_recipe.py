"""What the recipes of examples share, whatever their task: how texts are ended, and the template of messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jtrain.data.chat import load_chat_template
from jtrain.data.tokenise import ExampleRecipe
from jtrain.data.tokenizers import Tokenizer

if TYPE_CHECKING:
    from jtrain.config.schema import Config


def example_recipe(
    kind: str, config: Config, tokenizer: Tokenizer, record: Mapping[str, Any], *, messages: bool, **options: Any
) -> ExampleRecipe:
    """The recipe of a source whose records are like `record`.

    Args:
      kind: name of the encoder.
      config: of the run.
      tokenizer: of the model.
      record: the first one.
      messages: whether it holds messages, which need a chat template.
      **options: of the task.

    Raises:
      DataError: there are messages, and no chat template.
    """
    data, template = config.data, None
    if messages:
        template = load_chat_template(tokenizer, data.chat_template, tools=record.get("tools") is not None)
    shared = {
        "text_field": data.text_field,
        "append_eos": data.append_eos,
        "prepend_bos": data.prepend_bos,
        "template": None if template is None else template.source,
        "special_tokens": {} if template is None else template.special_tokens,
    }
    return ExampleRecipe(kind, options | shared, title="the chat template" if template is None else template.name)
