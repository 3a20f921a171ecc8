"""Conversations to token ids, by the model's own chat template, and which of them the assistant wrote.

Ids are those of `apply_chat_template` in transformers: the rendered text with names of special tokens read as such
and no begin token but the template's own. The names of control tokens inside of messages stay text, as with its
`sanitize_control_tokens=True`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jtrain.data.chat_renderer import RENDERER, Limits
from jtrain.data.chat_tokens import Marks, Span, assistant_mask, encode_rendered
from jtrain.data.files import exists, read_bytes
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import DataError

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_THOUGHTS = re.compile(r"<think>\s*(</think>\s*)?\Z")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MARK_REMEDY = (
    "Put {% generation %} ... {% endgeneration %} around what the assistant writes in the template, or give"
    " conversations whose only answer is the last message."
)

Message = Mapping[str, Any]


class Encoded(NamedTuple):
    """A conversation in tokens.

    Attributes:
      ids: all of them.
      assistant_mask: 1 where the assistant writes the token, the end of its turn included; else 0. As long as ids.
    """

    ids: list[int]
    assistant_mask: list[int]


class ChatTemplate:
    """A jinja2 template, rendered in a sandbox with limits.

    Args:
      source: the template.
      special_tokens: bos_token, eos_token, ...: what the template may name.
      name: of the template in messages.
      limits: what a rendering may take.

    Raises:
      DataError: it is too long, or no template; the message has the line.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        name: str = "the chat template",
        limits: Limits | None = None,
    ):
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self.name = name
        self.limits = limits or Limits()
        self.marks_answers = bool(_GENERATION.search(source))
        self.fingerprint = hashlib.blake2b(repr((source, self.special_tokens)).encode(), digest_size=16).hexdigest()
        if len(source) > self.limits.source_characters:
            raise DataError(
                f"{name} has {len(source):,} characters; at most {self.limits.source_characters:,} are read",
                "Is it the right file?",
            )
        self._rendered([])

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        Args:
          messages: dicts with a role, and content or what else the template reads.
          tools: JSON schemas of the functions that the assistant may call.
          add_generation_prompt: end with what stands before an answer of the assistant.
          variables: more that the template reads, such as enable_thinking.

        Raises:
          DataError: the messages are no such list, or the template fails, refuses them or exceeds its limits.
        """
        job = _job(_messages(messages, self.source), tools, variables, add_generation_prompt)
        return self._rendered([job])[0]["text"]

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        *,
        allow_control_tokens: bool = False,
        control_tokens: frozenset[str] = frozenset(),
        mask: bool = True,
        **variables: Any,
    ) -> Encoded:
        """Ids of a conversation, and which of them the assistant writes.

        Where the template marks them with {% generation %}, these spans count. Else the conversation is rendered up to
        each answer, and behind it: what comes in between is the answer. A token that ends the turn belongs to it.

        Args:
          tokenizer: of the model.
          messages, tools, add_generation_prompt, variables: as for `render`.
          allow_control_tokens: names of control tokens in messages are these tokens, which lets the text of a user end
            the turn or open another one.
          control_tokens: those of which alone this is so (the image token, where a template has no parts of images).
          mask: False: only the ids, in one rendering; the mask stays empty.

        Raises:
          DataError: as `render`; or the template changes earlier turns when later ones follow (the number of the turn
            is named), or no token of the assistant's turns is to be found.
        """
        plain = _messages(messages, self.source)
        answers = [number for number, message in enumerate(plain) if mask and message["role"] == "assistant"]
        values = [plain, tools, variables]
        marks = None if allow_control_tokens else Marks.of(tokenizer, self.source, values, control_tokens)
        if marks is not None:
            plain, tools, variables = marks.put(plain), marks.put(tools), marks.put(variables)
        text, spans = self._answers(plain, answers, tools, variables, add_generation_prompt)
        names: list[Span] = []
        if marks is not None:
            text, spans, names = marks.take(text, spans, self.name)
        ids, offsets = encode_rendered(tokenizer, text, names)
        if not mask:
            return Encoded(ids, [])
        written = assistant_mask(tokenizer, text, ids, offsets, spans, trim=not self.marks_answers)
        if answers and not any(written):
            raise DataError(
                f"{self.name}: none of the {len(answers)} answers of the assistant gives a token to learn",
                "Are they empty? Else put {% generation %} ... {% endgeneration %} around them in the template.",
            )
        return Encoded(ids, written)

    def _answers(
        self, messages: list[dict[str, Any]], answers: list[int], tools: Any, variables: Any, add_prompt: bool
    ) -> tuple[str, list[Span]]:
        """The whole text, and where in it the assistant writes."""
        whole = _job(messages, tools, variables, add_prompt)
        if self.marks_answers or not answers:
            found = self._rendered([whole])[0]
            return found["text"], [(begin, end) for begin, end in found["spans"]]
        jobs = [whole]
        for number in answers:
            jobs.append(_job(messages[:number], tools, variables, True))
            jobs.append(_job(messages[: number + 1], tools, variables, False))
        parts, error = self._render(jobs)
        if error is not None and parts:
            turn = answers[(len(parts) - 1) // 2] + 1
            raise DataError(f"{error.message} (when rendered up to message {turn}, an answer)", _MARK_REMEDY) from error
        if error is not None:
            raise error
        text = parts[0]["text"]
        spans = []
        for place, number in enumerate(answers):
            before, behind = parts[1 + 2 * place]["text"], parts[2 + 2 * place]["text"]
            if not behind.startswith(before):
                before = _THOUGHTS.sub("", before)  # opened for a model that thinks; this answer has no thoughts
            if not behind.startswith(before):
                raise DataError(
                    f"{self.name}: message {number + 1} (assistant) does not follow what the template writes before an"
                    " answer, so that its tokens can't be told from the others",
                    _MARK_REMEDY,
                )
            if not text.startswith(behind):
                # Some close every conversation with the end token, and not the turns inside of it.
                behind = behind.removesuffix(self.special_tokens.get("eos_token", ""))
            if not text.startswith(behind):
                raise DataError(
                    f"{self.name} changes message {number + 1} (assistant), or what is before it, when more messages"
                    " follow, so that its tokens can't be found",
                    _MARK_REMEDY,
                )
            spans.append((len(before), len(behind)))
        return text, spans

    def _rendered(self, jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        found, error = self._render(jobs)
        if error is not None:
            raise error
        return found

    def _render(self, jobs: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], DataError | None]:
        complete = [{**self.special_tokens, **job} for job in jobs]
        return RENDERER.render(self.source, complete, self.limits, self.name)


def load_chat_template(tokenizer: Tokenizer, template: str | None = None, *, tools: bool = False) -> ChatTemplate:
    """The chat template of a tokenizer.

    Args:
      tokenizer: its own templates and special tokens are used.
      template: the name of one of its templates, the path of a .jinja file, or a template; None: the usual one.
      tools: whether there are tools: then the template called tool_use is the usual one, where there is one.

    Raises:
      DataError: there is no such template, or it is none.
    """
    named = tokenizer.chat_templates
    if template is None:
        usual = next((name for name in (["tool_use"] if tools else []) + ["default"] if name in named), None)
        if usual is None:
            known = f"; it has: {', '.join(sorted(named))}" if named else ""
            raise DataError(
                f"the tokenizer {tokenizer.spec} has no chat template{known}",
                "Name one of them, or give a .jinja file; a base model has none: train it with text, or take the"
                " template of its chat model.",
            )
        template = usual
    if template in named:
        return ChatTemplate(named[template], tokenizer.special_tokens, name=f"the chat template of {tokenizer.spec}")
    if "{" in template or "\n" in template:
        return ChatTemplate(template, tokenizer.special_tokens)
    if not exists(template):
        known = ", ".join(sorted(named)) or "none"
        raise DataError(
            f"chat template {template!r}: no such file, and the tokenizer {tokenizer.spec} has: {known}",
            "Give the path of a .jinja file, a template's name, or the template itself.",
        )
    try:
        source = read_bytes(template, field="chat template").decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"chat template {template}: not UTF-8: {error}", "Save it as UTF-8.") from error
    return ChatTemplate(source, tokenizer.special_tokens, name=f"the chat template {template}")


def _job(messages: list[dict[str, Any]], tools: Any, variables: Mapping[str, Any], add_prompt: bool) -> dict[str, Any]:
    tools = None if tools is None else _plain(tools, "tools")
    more = {name: _plain(value, name) for name, value in variables.items()}
    return {"tools": tools, "documents": None, **more, "messages": messages, "add_generation_prompt": add_prompt}


def check_parts(message: Mapping[str, Any], source: str) -> None:
    """Sees that a template leaves out no part of a message: it reads texts, images, and what else it names.

    Args:
      message: one of a conversation.
      source: of the template.

    Raises:
      DataError: a part is of another type, or is sound or a film, which no model here reads.
    """
    content = message.get("content")
    for part in content if isinstance(content, list | tuple) else ():
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        named = isinstance(kind, str) and (f"'{kind}'" in source or f'"{kind}"' in source)
        if kind not in _PARTS and (not named or kind in _NOT_READ):
            raise DataError(
                f"a part of a message's content is of type {kind!r}, which is not read",
                "Write parts of type text or image.",
            )


_PARTS = ("text", "image", "image_url")
_NOT_READ = ("audio", "input_audio", "audio_url", "video", "video_url")


def _messages(messages: Any, source: str) -> list[dict[str, Any]]:
    """Messages as transformers gives them to a template: without empty fields, reasoning under each of its names."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(
            f"a conversation is a list of messages, not {_short(messages)}",
            'Write [{"role": "user", "content": "..."}].',
        )
    plain = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                f"message {number} of a conversation has no role: {_short(message)}",
                'Write {"role": "user", "content": "..."}.',
            )
        check_parts(message, source)
        fields = {key: _plain(value, f"message {number}") for key, value in message.items() if value is not None}
        reasoning = next((fields[name] for name in _REASONING if name in fields), None)
        if reasoning is not None:
            fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
        plain.append(fields)
    return plain


def _plain(value: Any, where: str) -> Any:
    """Nothing but what JSON has, so that a template sees no object with methods."""
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    if hasattr(value, "tolist"):  # of numpy
        return _plain(value.tolist(), where)
    raise DataError(
        f"{where} holds a {type(value).__name__}, which no chat template can read",
        "Give text, numbers, lists and dicts.",
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
