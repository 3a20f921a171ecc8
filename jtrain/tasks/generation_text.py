"""The text of a row that is being generated: whole characters only, cut before the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

from jtrain.data.stream_decoder import StreamDecoder
from jtrain.data.tokenizers import Tokenizer


class RowText:
    """Turns a row's tokens into text, one by one.

    Args:
      tokenizer: None leaves the text empty.
      prompt: tokens before the first.
      stop: strings that end the text; they are not part of it, and may begin and end inside of tokens.

    Attributes:
      text: what is certain, without what a stop string cut off.
      stopped: whether one was met.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int], stop: Sequence[str]):
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer, prompt)
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._given = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> None:
        """Adds a token, until `stopped`."""
        if self._decoder is not None and not self.stopped:
            self._add(self._decoder.push(token))

    def finish(self) -> None:
        """Adds what the last tokens left open."""
        if self._decoder is not None and not self.stopped:
            self._add(self._decoder.finish())
            self._longest = 0

    def take(self) -> str:
        """What of the text has not been taken yet, and can't become a part of a stop string any more."""
        end = len(self.text)
        if not self.stopped:
            end -= self._open()
        piece, self._given = self.text[self._given : max(end, self._given)], max(end, self._given)
        return piece

    def _add(self, piece: str) -> None:
        start = max(len(self.text) - self._longest + 1, 0)
        self.text += piece
        found = [place for place in (self.text.find(stop, start) for stop in self._stop) if place >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _open(self) -> int:
        """Characters at the end that a stop string may begin with."""
        for size in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stop):
                return size
        return 0
