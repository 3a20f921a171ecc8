"""Text of a growing list of tokens, a piece at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jtrain.data.tokenizers import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_CHARACTER_TOKENS = 8  # no character takes more tokens than this: what still makes none then is no UTF-8


class StreamDecoder:
    """Decodes tokens one by one and never gives a part of a character.

    What `push` and `finish` give, joined, is `tokenizer.decode` of all tokens (of byte sequences that are no UTF-8 the
    number of replacement characters may differ).

    Args:
      tokenizer: of the tokens.
      after: tokens before the first, such as a prompt's. Tokenizers that write a space before each word drop the one
        at the beginning of a text: after a prompt the first token is no beginning.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()):
        self._tokenizer = tokenizer
        # The window: tokens whose text is out, to tell a beginning from the middle, then those whose text is not.
        self._window = [int(token) for token in after][-_CHARACTER_TOKENS:]
        self._known = tokenizer.decode(self._window)
        self._waiting = 0

    def push(self, token: int) -> str:
        """The text that is certain with one token more; may be empty."""
        self._window.append(int(token))
        self._waiting += 1
        text = self._tokenizer.decode(self._window)
        if text.endswith(_UNFINISHED) and self._waiting < _CHARACTER_TOKENS:
            return ""
        return self._take(text)

    def finish(self) -> str:
        """What is left at the end, with replacement characters for what is no character."""
        return self._take(self._tokenizer.decode(self._window))

    def _take(self, text: str) -> str:
        new = text[len(self._known) :]
        if new:  # a control token has no text: alone in the window it would make a beginning of what follows
            self._window = self._window[-self._waiting :]
            self._known, self._waiting = self._tokenizer.decode(self._window), 0
        return new
