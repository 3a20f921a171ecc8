"""What is asked of a generation: its options and prompts, checked before anything is compiled."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import ConfigError, DataError
from jtrain.models.config import DecoderConfig
from jtrain.ops.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """How tokens are chosen and when a row ends; see `generate`.

    Raises:
      ConfigError: a number out of its range; a cut-off where nothing is drawn.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        def refuse(name: str, remedy: str) -> None:
            raise ConfigError(f"generate: {name}={getattr(self, name)!r}", remedy)

        if self.max_new_tokens < 1:
            refuse("max_new_tokens", "write a number of at least 1")
        if self.temperature != 0.0 and not 1e-6 <= self.temperature < float("inf"):  # below, scores would overflow
            refuse("temperature", "write 0 for the likeliest token, or a number from 1e-6 on")
        if self.top_k < 0:
            refuse("top_k", "write 0 for all tokens, or how many stay")
        if not 0.0 < self.top_p <= 1.0:
            refuse("top_p", "write a number above 0, and at most 1, which keeps all tokens")
        if not 0.0 <= self.min_p <= 1.0:
            refuse("min_p", "write a number from 0, which keeps all tokens, to 1")
        if not 0.0 < self.repetition_penalty < float("inf"):
            refuse("repetition_penalty", "write a positive number; 1 changes nothing")
        if not 0 <= self.seed < 2**32:
            refuse("seed", "write a number from 0 to 4294967295")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if "" in self.stop:
            refuse("stop", "leave the empty string out: it is found everywhere")
        if self.temperature == 0.0:
            for name, idle in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
                if getattr(self, name) != idle:
                    raise ConfigError(
                        f"generate: {name}={getattr(self, name)!r} with temperature=0: the likeliest token is taken, "
                        "whatever is cut off",
                        f"write a temperature above 0, or leave {name} out",
                    )

    def sampling(self) -> Sampling:
        """The numbers that the program takes; None for what is not used."""
        drawn = self.temperature > 0
        return Sampling(
            temperature=np.float32(self.temperature) if drawn else None,
            top_k=self.top_k or None,
            top_p=np.float32(self.top_p) if self.top_p < 1 else None,
            min_p=np.float32(self.min_p) if self.min_p > 0 else None,
            repetition_penalty=np.float32(self.repetition_penalty) if self.repetition_penalty != 1 else None,
        )


_FORMS = "give a text, token ids, or messages with role and content"


def as_prompts(prompts: Any) -> list[Any]:
    """A list of prompts, of one or of several.

    Raises:
      DataError: neither texts, token ids nor conversations.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray | jax.Array):
        raise DataError(f"generate: prompts are {prompts!r}", _FORMS)
    items = [item.tolist() if isinstance(item, np.ndarray | jax.Array) else item for item in prompts]
    if items and all(isinstance(item, int | np.integer) for item in items):
        return [items]
    if items and all(isinstance(item, Mapping) for item in items):
        return [items]
    return items


def prompt_ids(tokenizer: Tokenizer | None, prompt: Any) -> list[int]:
    """Tokens of one prompt: a text, token ids, or a conversation.

    Raises:
      ConfigError: a text or conversation, and no tokenizer.
      DataError: neither of them; no chat template.
    """
    if not isinstance(prompt, str | Sequence):
        raise DataError(f"generate: a prompt is {prompt!r}", _FORMS)
    if isinstance(prompt, str):
        return _text_ids(_needed(tokenizer, "text"), prompt)
    if prompt and all(isinstance(token, int | np.integer) for token in prompt):
        return [int(token) for token in prompt]
    if not (prompt and all(isinstance(message, Mapping) for message in prompt)):
        raise DataError(f"generate: a prompt is {prompt!r}", _FORMS)
    from jtrain.data.chat import load_chat_template

    tokenizer = _needed(tokenizer, "conversation")
    return load_chat_template(tokenizer).encode(tokenizer, prompt, add_generation_prompt=True).ids


def read_prompt(tokenizer: Tokenizer | None, prompt: Any) -> tuple[list[int], list[np.ndarray]]:
    """Tokens and images of one prompt; images stand in the messages of a conversation, as in the records of SFT.

    Raises: see `prompt_ids`; DataError: images and places that differ in number, or an image that can't be read.
    """
    images = None if tokenizer is None else tokenizer.images
    is_conversation = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if tokenizer is None or images is None or not is_conversation:
        return prompt_ids(tokenizer, prompt), []
    from jtrain.data.chat import load_chat_template
    from jtrain.data.image_conversations import ImageChatEncoder, check_count, open_payload, payload_of, take_images

    record, sources = take_images({"messages": prompt}, images.token)
    encoder = ImageChatEncoder(tokenizer, images, load_chat_template(tokenizer), append_eos=False)
    ids = encoder.prompt(record["messages"])
    check_count(ids.count(images.token_id), len(sources), images)
    return ids, [images.transform(open_payload(payload_of(source), os.getcwd())) for source in sources]


def _needed(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    if tokenizer is None:
        raise ConfigError(
            f"generate: a prompt is a {what}, and the model has no tokenizer",
            "give token ids, or a tokenizer (jtrain generate: --tokenizer)",
        )
    return tokenizer


def _text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = tokenizer.encode(text)
    if ids:
        return ids
    known = (token for token in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) if token is not None)
    return [next(known)]  # an empty text begins like a document


def check_prompts(prompts: Sequence[Sequence[int]], new_tokens: int, decoder: DecoderConfig) -> None:
    """Refuses what the model can't take, before anything is compiled.

    Raises:
      ConfigError: a prompt that is too long.
      DataError: one without tokens, or with a token that the model has not.
    """
    limit = decoder.max_position_embeddings
    for number, prompt in enumerate(prompts):
        if not len(prompt):
            raise DataError(f"generate: prompt {number} holds no token", "give one at least")
        for token in (min(prompt), max(prompt)):
            if not 0 <= token < decoder.vocab_size:
                raise DataError(
                    f"generate: prompt {number} holds the token {token}, and the model has {decoder.vocab_size}",
                    "encode the text with the model's own tokenizer",
                )
        if len(prompt) + new_tokens > limit:
            left = limit - len(prompt)
            raise ConfigError(
                f"generate: prompt {number} has {len(prompt)} tokens, and {len(prompt)} + max_new_tokens={new_tokens} "
                f"= {len(prompt) + new_tokens} is over the model's max_position_embeddings={limit}",
                f"write max_new_tokens: {left} (or less), or a shorter prompt"
                if left > 0
                else f"shorten the prompt to {limit - new_tokens} tokens (or less)"
                if limit > new_tokens
                else "shorten the prompt, and write a smaller max_new_tokens",
            )


def check_images(
    prompts: Sequence[Sequence[int]], images: Sequence[Sequence[np.ndarray]], decoder: DecoderConfig
) -> None:
    """Sees that every image token of the prompts has its image, and that images have the size that the model reads.

    Raises:
      DataError: it is not so.
    """
    for number, (prompt, given) in enumerate(zip(prompts, images, strict=True)):
        if decoder.images is None:
            if given:
                raise DataError(
                    f"generate: prompt {number} has images, and the model reads text alone", "leave them out"
                )
            continue
        held = list(prompt).count(decoder.images.image_token_index)
        if held != len(given) * decoder.images.tokens:
            raise DataError(
                f"generate: prompt {number} has {held} image tokens, and {len(given)} images of "
                f"{decoder.images.tokens} each",
                "give images in the messages of a conversation: {'type': 'image', 'path': ...}",
            )
        for image in given:
            if image.shape != decoder.images.shape():
                raise DataError(
                    f"generate: prompt {number} has an image of {image.shape}, and the model reads "
                    f"{decoder.images.shape()}",
                    "use the processor_config.json of the model's own folder",
                )


def rounded_length(size: int) -> int:
    """Tokens of a program that takes `size`: 16, 32, 64, 128 or 256, then multiples of 256."""
    return next((step for step in (16, 32, 64, 128) if size <= step), -(-size // 256) * 256)
