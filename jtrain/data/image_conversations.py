"""Records with images for fine-tuning, in tokens.

An image is a part of a message's content, {"type": "image", ...} with its source as `image`, `path`, `url` (of a local
file) or `base64`; or an entry of the record's column `images`, whose places are parts {"type": "image"} without a
source or the placeholders <image> in texts. Where a conversation has neither, the images of the column stand before the
first message of the user, as in TRL. Line ends beside a placeholder go with it: templates write their own.

A template writes one image token an image; here it becomes as many as the encoder has for one. None of them is learned.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jtrain.data.chat import ChatTemplate, check_parts
from jtrain.data.conversations import ChatEncoder, as_tools, conversation, sft_records
from jtrain.data.examples import Encoder, Example
from jtrain.data.image_processor import ImageProcessor
from jtrain.data.images import ImageTransform, converted, local_path, read_image
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import DataError

_FIELDS = ("messages", "conversations", "prompt", "completion")
_SOURCES = ("image", "path", "url", "base64", "image_url", "bytes")
_PARTS = re.compile(r"""['"]image['"]""")
_STRINGS = re.compile(r"\bis\s+(not\s+)?string\b")
_PATH, _BYTES = b"P", b"B"
_PNG = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
"""Modes of Pillow that a PNG has."""


def image_sft_encoder(
    tokenizer: Tokenizer,
    *,
    image_token: str,
    image_tokens: int,
    folder: str,
    template: str | None,
    special_tokens: Mapping[str, str],
    append_eos: bool,
    prepend_bos: bool,
    title: str,
    **options: Any,
) -> Encoder:
    """The encoder of SFT for a model that sees; a record without images is as in `sft_encoder`.

    Args:
      image_token: the text that stands for an image.
      image_tokens: tokens of an image.
      folder: what paths of images are relative to.
      template, special_tokens, append_eos, prepend_bos, title, options: as in `sft_encoder`.
    """
    token_id = tokenizer.token_to_id(image_token)
    assert token_id is not None  # it was read with the tokenizer
    images = ImageProcessor(image_token, token_id, image_tokens, ImageTransform())
    chat = None if template is None else ChatTemplate(template, special_tokens, name=title)
    encode = sft_records(
        ImageChatEncoder(tokenizer, images, chat, append_eos=append_eos, prepend_bos=prepend_bos), **options
    )

    def with_images(record: Mapping[str, Any]) -> list[Example]:
        plain, sources = take_images(record, images.token)
        found = encode(plain)
        held = sum(example.ids.count(images.token_id) for example in found)
        check_count(held, len(sources), images)
        payloads = [payload_of(source) for source in sources]
        for payload in payloads:
            open_payload(
                payload, folder
            )  # damaged or missing: said with the record's number, before anything is trained
        return [
            example._replace(
                targets=[
                    int(bool(kept) and token != images.token_id)
                    for token, kept in zip(example.ids, example.targets, strict=True)
                ],
                images=payloads,
            )
            for example in found
        ]

    return with_images


def check_count(held: int, given: int, images: ImageProcessor) -> None:
    """Sees that every image has its place in the tokens.

    Raises:
      DataError: it is not so.
    """
    if held != given * images.tokens:
        raise DataError(
            f"its messages have {held // images.tokens} places of images in tokens, and {given} images",
            f"Give one {images.token} or part {{'type': 'image'}} an image; does the chat template write its parts?",
        )


class ImageChatEncoder(ChatEncoder):
    """Texts and messages in tokens, image tokens among them: as many as the images have.

    Args:
      tokenizer, template, append_eos, prepend_bos: as in `ChatEncoder`.
      images: the image token and its number.
    """

    def __init__(
        self, tokenizer: Tokenizer, images: ImageProcessor, template: ChatTemplate | None = None, **options: Any
    ):
        super().__init__(tokenizer, template, **options)
        self.images = images

    def text(self, text: str) -> list[int]:
        return self.images.expand(super().text(text))

    def messages(
        self, messages: Any, *, tools: Any = None, variables: Mapping[str, Any] | None = None, mask: bool = True
    ) -> tuple[list[int], list[int]]:
        return self._rendered(messages, tools, variables, prompt=False, mask=mask)

    def prompt(self, prompt: Any, *, tools: Any = None, variables: Mapping[str, Any] | None = None) -> list[int]:
        if isinstance(prompt, str):
            return self.images.expand(super().prompt(prompt))
        return self._rendered(prompt, tools, variables, prompt=True, mask=False)[0]

    def _rendered(
        self, messages: Any, tools: Any, variables: Mapping[str, Any] | None, *, prompt: bool, mask: bool
    ) -> tuple[list[int], list[int]]:
        template = self._template()
        plain, free = for_template(conversation(messages), template.source, self.images.token)
        ids, written = template.encode(
            self.tokenizer, plain, as_tools(tools), prompt, mask=mask, control_tokens=free, **(variables or {})
        )
        if self.tokenizer.add_bos and ids[:1] != [self.tokenizer.bos_id]:
            # Processors of transformers add it, where the template does not; tokenizers never do.
            assert self.tokenizer.bos_id is not None
            ids, written = [self.tokenizer.bos_id, *ids], [0, *written] if mask else written
        return self.images.expand(ids), self.images.expand_mask(ids, written) if mask else []


def for_template(messages: Any, source: str, token: str) -> tuple[Any, frozenset[str]]:
    """Messages in the form that a template reads: contents as lists of parts, or as texts with image tokens.

    Returns:
      The messages, and the names of control tokens in them that are meant.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return messages, frozenset()  # the template says what is wrong
    for message in messages:
        if isinstance(message, Mapping):
            check_parts(message, source)
    if _PARTS.search(source):
        if _STRINGS.search(source):
            return messages, frozenset()
        return [_as_parts(message) for message in messages], frozenset()
    return [_as_text(message, token) for message in messages], frozenset([token])


def _as_parts(message: Any) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    return {**message, "content": [_text_part(content)]} if isinstance(content, str) else message


def _as_text(message: Any, token: str) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = [_text_part(content)] if isinstance(content, str) else content
    if not isinstance(parts, Sequence) or not all(isinstance(part, Mapping) for part in parts):
        return message
    texts = [part for part in parts if part.get("type") != "image"]
    if any(token in str(part.get("text") or "") for part in texts):
        raise DataError(f"a text of its messages holds the image token {token}", "Write it otherwise.")
    written = "".join(f"{token}\n" for part in parts if part.get("type") == "image")
    return {**message, "content": written + "".join(str(part.get("text") or "") for part in texts)}


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


# -- images of a record ------------------------------------------------------------------------------------------------


def take_images(record: Mapping[str, Any], token: str) -> tuple[dict[str, Any], list[Any]]:
    """A record whose parts of images are {"type": "image"}, and the images in the order of their places.

    Raises:
      DataError: more or fewer images in the column than places, or a part that has two sources.
    """
    column = record.get("images")
    if column is None and record.get("image") is not None:
        column = record["image"]  # LLaVA's own files
    waiting = _listed(column)
    before = [
        _listed(record.get(name)) if isinstance(record.get(name), list | tuple) else record.get(name)
        for name in _FIELDS
    ]
    plain = {name: value for name, value in record.items() if name not in ("images", "image")}
    messages = [m for value in before if isinstance(value, list) for m in conversation(value)]
    if waiting and messages and not any(_places(message, token) for message in messages):
        at = next((n for n, m in enumerate(messages) if isinstance(m, Mapping) and m.get("role") == "user"), None)
        if at is None:
            raise DataError("its images have no place: no message is the user's", _PLACES)
        first = messages[at]
        parts = [{"type": "image"}] * len(waiting)
        messages[at] = {**first, "content": [*parts, *_content(first.get("content"), token, split=False)]}
    taken: list[Any] = []
    left = list(waiting)
    if messages:
        messages = [_message(message, token, left, taken, split=bool(waiting)) for message in messages]
        start = 0
        for name, value in zip(_FIELDS, before, strict=True):
            if isinstance(value, list):
                plain[name], start = messages[start : start + len(value)], start + len(value)
    else:  # texts: the encoder counts their placeholders
        taken, left = left, []
    if left:
        raise DataError(f"it has {len(waiting)} images, and {len(waiting) - len(left)} places for them", _PLACES)
    return plain, taken


_PLACES = "Write one part {'type': 'image'}, or one <image> in a text, an image."


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _places(message: Any, token: str) -> int:
    """Places of the column's images in a message."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        return content.count(token)
    parts = content if isinstance(content, list | tuple) else ()
    return sum(_is_image(part) and _source(part) is None for part in parts)


def _content(content: Any, token: str, *, split: bool) -> list[Any]:
    """A message's content as parts; of a text the placeholders are parts as well (`split`)."""
    if content is None:
        return []
    if not isinstance(content, str):
        return list(content) if isinstance(content, list | tuple) else [content]
    if not split or token not in content:
        return [_text_part(content)]
    texts = content.split(token)
    parts: list[Any] = []
    for number, text in enumerate(texts):
        if number:
            parts.append({"type": "image"})
            text = text.removeprefix("\n")
        if number < len(texts) - 1:
            text = text.removesuffix("\n")
        if text:
            parts.append(_text_part(text))
    return parts


def _message(message: Any, token: str, left: list[Any], taken: list[Any], *, split: bool) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if content is None or (isinstance(content, str) and not (split and token in content)):
        return message
    parts = []
    for part in _content(content, token, split=split):
        if not _is_image(part):
            parts.append({k: v for k, v in part.items() if v is not None} if isinstance(part, Mapping) else part)
            continue
        source = _source(part)
        if source is None:
            if not left:
                raise DataError("it has more places of images than images", _PLACES)
            source = left.pop(0)
        taken.append(source)
        parts.append({"type": "image"})
    return {**message, "content": parts}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _source(part: Mapping[str, Any]) -> Any:
    given = [name for name in _SOURCES if part.get(name) is not None]
    if len(given) > 1 and set(given) != {"bytes", "path"}:
        raise DataError(f"a part of an image has {' and '.join(given)}", "Give one source.")
    if not given:
        return None
    value = part[given[0]]
    if given[0] == "base64" and isinstance(value, str):
        return _decoded(value)
    if given[0] == "image_url" and isinstance(value, Mapping):
        value = value.get("url")
    if "bytes" in given:
        return part["bytes"]
    return value


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.rpartition(",")[2].split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(f"an image of base64 can't be decoded: {error}", "Write the bytes of a PNG or JPEG.") from error


# -- what is kept of an image ------------------------------------------------------------------------------------------


def payload_of(source: Any) -> bytes:
    """What the cache keeps of an image of a record: its path, or its encoded bytes.

    Raises:
      DataError: an address of the network, or nothing that is an image.
    """
    if isinstance(source, Mapping):
        source = source.get("bytes") or source.get("path") or source
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    if isinstance(source, str):
        if source.startswith("data:"):
            return _BYTES + _decoded(source)
        return _PATH + local_path(source).encode()
    if isinstance(source, bytes | bytearray | memoryview):
        return _BYTES + bytes(source)
    image = read_image(source)
    if not hasattr(image, "save"):
        from PIL import Image

        image = Image.fromarray(image[..., 0] if image.ndim == 3 and image.shape[-1] == 1 else image)
    if image.mode not in _PNG:
        image = converted(image, "RGBA" if image.mode in ("PA", "RGBa") else "RGB")
    file = io.BytesIO()
    image.save(file, "PNG")
    return _BYTES + file.getvalue()


def open_payload(payload: bytes, folder: str) -> Any:
    """The image that a payload stands for.

    Args:
      payload: what `payload_of` gave.
      folder: what its path is relative to.

    Raises:
      DataError: it is missing or damaged.
    """
    if payload[:1] == _BYTES:
        return read_image(payload[1:])
    path = os.path.normpath(os.path.join(folder, os.path.expanduser(payload[1:].decode())))
    if not os.path.isfile(path):  # a long text would be taken for base64
        raise DataError(
            f"the image {path} does not exist", "Write paths relative to the file of the records, or whole ones."
        )
    return read_image(path)
