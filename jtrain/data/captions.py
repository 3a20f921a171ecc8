"""Captions as rows of tokens, as CLIP and SigLIP read them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import DataError


@dataclasses.dataclass(frozen=True)
class CaptionEncoder:
    """Texts to rows of one length: their tokens, the end token, padding; a begin token before them if there is one.

    Args:
      tokenizer: of the model.
      length: tokens of a row; what is longer is cut, and keeps its end token.
      begin: id of the begin token; None: none.
      end: id of the end token.
      pad: id of the padding.
    """

    tokenizer: Tokenizer
    length: int
    begin: int | None
    end: int
    pad: int

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """int32 [texts, length]."""
        before = [] if self.begin is None else [self.begin]
        room = self.length - len(before) - 1
        out = np.full((len(texts), self.length), self.pad, np.int32)
        for row, ids in zip(out, self.tokenizer.encode_batch(texts), strict=True):
            tokens = [*before, *ids[:room], self.end]
            row[: len(tokens)] = tokens
        return out

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Which tokens are no padding: bool [texts, length], up to the first end token."""
        ends = (rows == self.end).argmax(1)
        return np.arange(self.length) <= ends[:, None]


def caption_encoder(
    tokenizer: Tokenizer, length: int, *, begins: bool, end: int | None = None, vocab_size: int
) -> CaptionEncoder:
    """The encoder of a model's captions.

    Args:
      tokenizer: of the model.
      length: tokens of a row.
      begins: whether the model expects the tokenizer's begin token before a text (CLIP).
      end: the token that the model takes for a text; None: the tokenizer's end token.
      vocab_size: tokens of the model.

    Raises:
      DataError: the tokenizer has no end token, or tokens that the model has not.
    """
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"data.tokenizer: {tokenizer.spec} has {tokenizer.vocab_size} tokens, and the model {vocab_size}",
            "give the model's own tokenizer",
        )
    ends = tokenizer.eos_id if end is None else end
    if ends is None:
        raise DataError(
            f"data.tokenizer: {tokenizer.spec} has no end token, and a caption ends with one",
            "name it in a tokenizer_config.json beside the tokenizer (eos_token)",
        )
    return CaptionEncoder(tokenizer, length, tokenizer.bos_id if begins else None, ends, tokenizer.pad_id)


def text_keys(texts: Sequence[str]) -> np.ndarray:
    """int32 [texts, 2]: equal where texts are, and nowhere else (64 bits of a digest)."""
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    return np.frombuffer(b"".join(digests), "<i4").reshape(len(texts), 2)
