"""Records for fine-tuning in tokens: texts, prompts with completions, conversations.

Forms of a record, found by its fields:
  prompt and completion   texts both, or lists of messages both
  messages                a conversation: [{"role": ..., "content": ...}, ...] (`conversations` with from and value too)
  text                    the field `data.text_field`
Beside messages may stand `tools` (JSON schemas, or their text) and `chat_template_kwargs` (what the template reads).

Texts are read as Hugging Face's tokenizers read them: names of control tokens in them are these tokens, the begin token
stands first where the model expects one (once), and the end token is added where it is not there. A conversation has
the tokens that its template writes, and no others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jtrain.data.chat import ChatTemplate
from jtrain.data.examples import Encoder, Example
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import DataError

PROMPT_COMPLETION, MESSAGES, TEXT = "prompt and completion", "messages", "text"
_CONVERSATION = ("messages", "conversations")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "function": "tool"}


class Completed(NamedTuple):
    """A prompt with its completion in tokens.

    Attributes:
      ids: both.
      start: the first token of the completion: where the prompt's own tokens and these part.
      prompt_ids: the prompt by itself, as it stands when the model is asked for an answer.
      assistant_mask: 1 where the assistant writes; empty where it was not asked for, and for texts.
    """

    ids: list[int]
    start: int
    prompt_ids: list[int]
    assistant_mask: list[int]


class ChatEncoder:
    """Texts and messages in tokens.

    Args:
      tokenizer: of the model.
      template: for messages; None: there are none.
      append_eos: end texts and text completions with the end token.
      prepend_bos: begin texts with the begin token, also where the model does not expect it.

    Raises:
      DataError: the tokenizer has no such token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None = None,
        *,
        append_eos: bool = True,
        prepend_bos: bool = False,
    ):
        self.tokenizer, self.template = tokenizer, template
        self._eos = tokenizer.eos_id if append_eos else None
        self._bos = True if prepend_bos else None
        if template is None and append_eos and tokenizer.eos_id is None:
            raise DataError(
                f"data.append_eos is true, but the tokenizer {tokenizer.spec} has no end-of-sequence token",
                "Set data.append_eos: false, or name the token in a tokenizer_config.json beside the tokenizer.",
            )

    def text(self, text: str) -> list[int]:
        """Ids of a whole text, with its begin and end token."""
        return self._ended(self._prompt(text))

    def messages(
        self, messages: Any, *, tools: Any = None, variables: Mapping[str, Any] | None = None, mask: bool = True
    ) -> tuple[list[int], list[int]]:
        """Ids of a conversation, and the assistant's mask (empty without `mask`)."""
        return self._template().encode(
            self.tokenizer, conversation(messages), as_tools(tools), mask=mask, **(variables or {})
        )

    def prompt(self, prompt: Any, *, tools: Any = None, variables: Mapping[str, Any] | None = None) -> list[int]:
        """Ids of a prompt, ready for an answer."""
        if isinstance(prompt, str):
            return self._prompt(prompt)
        messages = conversation(prompt)
        encoded = self._template().encode(
            self.tokenizer, messages, as_tools(tools), True, mask=False, **(variables or {})
        )
        return encoded.ids

    def completed(
        self,
        prompt: Any,
        completion: Any,
        *,
        tools: Any = None,
        variables: Mapping[str, Any] | None = None,
        mask: bool = False,
        name: str = "completion",
    ) -> Completed:
        """A prompt and its completion: texts both, or messages both.

        The completion begins where the tokens of the prompt and those of both together part, as in TRL: a template
        that opens the answer otherwise, or a token across the border, belongs to the completion.

        Raises:
          DataError: one is text and the other is not, or the completion (called `name` in the message) is empty.
        """
        if isinstance(prompt, str) != isinstance(completion, str):
            raise DataError(
                f"its prompt is {_kind(prompt)}, and its {name} {_kind(completion)}", "Give texts, or messages, both."
            )
        if _is_empty(completion):
            raise DataError(f"its {name} is empty", "Give it an answer, or remove the record.")
        before = self.prompt(prompt, tools=tools, variables=variables)
        assistant: list[int] = []
        if isinstance(prompt, str):
            ids = self.text(prompt + completion)
        else:
            whole = [*conversation(prompt), *conversation(completion)]
            ids, assistant = self.messages(whole, tools=tools, variables=variables, mask=mask)
        start = common_prefix(before, ids)
        if start == len(ids):
            raise DataError(f"its {name} adds no token to the prompt", "Give it an answer, or remove the record.")
        return Completed(ids, start, before, assistant)

    def _prompt(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, special=True, add_bos=self._bos)

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if self._eos is None or ids[-1:] == [self._eos] else [*ids, self._eos]

    def _template(self) -> ChatTemplate:
        if self.template is None:  # the first record holds texts, and decides
            raise DataError(
                "it holds no texts, and the records before it do", "Give texts, or messages, in all records."
            )
        return self.template


def sft_encoder(
    tokenizer: Tokenizer,
    *,
    form: str,
    text_field: str,
    append_eos: bool,
    prepend_bos: bool,
    completion_only: bool,
    assistant_only: bool,
    template: str | None,
    special_tokens: Mapping[str, str],
    title: str,
) -> Encoder:
    """The encoder of SFT for a model that reads text alone: one document a record; one with images can't be used.

    Args:
      form: of the records, as `form_of` names it; a record of another form can't be used.
      completion_only: of prompt and completion, only the completion is learned.
      assistant_only: only what the assistant writes is learned.
      template, special_tokens: the chat template's source and the names that it reads; None where no record has
        messages.
      text_field, append_eos, prepend_bos: as in the config.
      title: of the template, for messages.
    """
    chat = None if template is None else ChatTemplate(template, special_tokens, name=title)
    encode = sft_records(
        ChatEncoder(tokenizer, chat, append_eos=append_eos, prepend_bos=prepend_bos),
        form=form,
        text_field=text_field,
        completion_only=completion_only,
        assistant_only=assistant_only,
    )

    def texts_alone(record: Mapping[str, Any]) -> Sequence[Example]:
        if has_images(record):
            raise DataError(
                "it holds images, and the model reads text alone",
                "Give a model that sees as model.path (a LLaVA folder), or records without images.",
            )
        return encode(record)

    return texts_alone


def has_images(record: Mapping[str, Any]) -> bool:
    """Whether a record holds images: in a column of their own (`images`, or LLaVA's `image`), or as parts of its
    messages."""
    for name in ("images", "image"):
        value = record.get(name)
        if value is not None and not (isinstance(value, str | list | tuple | dict) and not value):
            return True
    messages = [m for value in record.values() if isinstance(value, list | tuple) for m in map(_message, value)]
    contents = [m.get("content") for m in messages if isinstance(m, Mapping)]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") in ("image", "image_url") for part in parts)


def sft_records(
    encoder: ChatEncoder, *, form: str, text_field: str, completion_only: bool, assistant_only: bool
) -> Encoder:
    """What SFT makes of records with the texts and messages of an encoder; see `sft_encoder`."""

    def encode(record: Mapping[str, Any]) -> list[Example]:
        found = form_of(record, text_field)
        if found != form:
            raise DataError(
                f"its fields are {columns(record)}, and the records before it hold {form}",
                f"Give {_known(text_field)}.",
            )
        given = beside(record)
        if form == PROMPT_COMPLETION:
            both = encoder.completed(record["prompt"], record["completion"], **given, mask=assistant_only)
            targets = [int(place >= both.start or not completion_only) for place in range(len(both.ids))]
            if assistant_only:
                targets = [a & b for a, b in zip(targets, both.assistant_mask, strict=True)]
            return [Example(both.ids, targets)]
        if form == MESSAGES:
            messages = next(record[name] for name in _CONVERSATION if record.get(name) is not None)
            ids, mask = encoder.messages(messages, **given, mask=assistant_only)
            return [Example(ids, mask if assistant_only else [1] * len(ids))]
        text = record[text_field]
        if not isinstance(text, str):
            raise DataError(f"its {text_field!r} is {_kind(text)}, not a text", "Remove the record.")
        ids = encoder.text(text) if text else []
        return [Example(ids, [1] * len(ids))] if ids else []

    return encode


def form_of(record: Mapping[str, Any], text_field: str) -> str | None:
    """The form of a record by its fields; None: it has none that is known."""
    has = {name for name, value in record.items() if value is not None}
    if {"prompt", "completion"} <= has:
        return PROMPT_COMPLETION
    if has.intersection(_CONVERSATION):
        return MESSAGES
    return TEXT if text_field in has else None


def needs_template(record: Mapping[str, Any], form: str) -> bool:
    """Whether records like this one hold messages."""
    return form == MESSAGES or (form == PROMPT_COMPLETION and not isinstance(record["prompt"], str))


def no_form(where: str, record: Mapping[str, Any], text_field: str, option: str = "data.text_field") -> DataError:
    """The error for data whose fields fit no form."""
    nulls = [name for name in (*_CONVERSATION, "prompt", "completion", text_field) if record.get(name, 0) is None]
    what = f", and {' and '.join(nulls)} of the first record is null" if nulls else ""
    return DataError(
        f"{where}: its records have the fields {columns(record)}{what}", f"Give {_known(text_field, option)}."
    )


def _known(text_field: str, option: str = "data.text_field") -> str:
    return (
        f"prompt and completion (texts, or lists of messages), messages (a conversation), or {text_field} "
        f"({option}: the field that holds a text)"
    )


def columns(record: Mapping[str, Any]) -> str:
    """The fields of a record, for messages."""
    return ", ".join(map(str, record)) or "none"


def beside(record: Mapping[str, Any]) -> dict[str, Any]:
    """What stands beside messages in a record: `tools`, and variables of the template."""
    return {"tools": record.get("tools"), "variables": _variables(record.get("chat_template_kwargs"))}


def conversation(messages: Any) -> Any:
    """Messages as templates read them: `from` and `value` become role and content, with their usual names.

    Raises:
      DataError: the assistant says nothing: null, or no content at all, without tool calls.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return messages  # the template says what is wrong
    read = [_message(message) for message in messages]
    for number, message in enumerate(read):
        if not isinstance(message, Mapping) or message.get("role") != "assistant":
            continue
        if message.get("content") is None and not message.get("tool_calls"):  # templates write "None", or nothing
            raise DataError(
                f"message {number} is an answer of the assistant whose content is null, without tool_calls",
                "Give it a content, or remove the record.",
            )
    return read


def _message(message: Any) -> Any:
    if not isinstance(message, Mapping) or "role" in message or "from" not in message:
        return message
    rest = {name: value for name, value in message.items() if name not in ("from", "value")}
    role = message["from"]
    return {"role": _ROLES.get(role, role), "content": message.get("value"), **rest}


def as_tools(tools: Any) -> Any:
    """Tools as a list; some data sets hold them as JSON.

    Raises:
      DataError: a text that is not JSON.
    """
    if not isinstance(tools, str):
        return tools or None
    try:
        return json.loads(tools) or None
    except ValueError as error:
        raise DataError(f"its tools are no JSON: {error}", "Give a list of JSON schemas.") from error


def _variables(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise DataError(f"its chat_template_kwargs are {_kind(given)}", "Give a mapping of names to values.")
    return {str(name): value for name, value in given.items()}


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    length = min(len(first), len(second))
    return next((place for place in range(length) if first[place] != second[place]), length)


def _is_empty(completion: Any) -> bool:
    if isinstance(completion, str):
        return not completion
    if not isinstance(completion, Sequence):
        return completion is None
    return not any(
        not isinstance(message, Mapping) or any(message.get(name) for name in ("content", "value", "tool_calls"))
        for message in completion
    )


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return "text"
    return "a list" if isinstance(value, Sequence) else f"a {type(value).__name__}"
