"""Tokens of a rendered conversation: names of control tokens that its messages hold, and what the assistant wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import DataError

# Tokens that end a turn in vocabularies whose end token is another one.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>", "<|call|>")
Span = tuple[int, int]


def encode_rendered(tokenizer: Tokenizer, text: str, names: list[Span]) -> tuple[list[int], list[Span]]:
    """Ids and offsets of a rendered text, where at `names` a control token's name is text."""
    ids, offsets = tokenizer.encode_with_offsets(text, special=True)
    if not names:
        return ids, offsets
    special = tokenizer.special_ids()
    # Between control tokens tokenizers encode each part by itself: only parts with such a name are encoded again.
    kept: list[tuple[int, Span]] = []
    begin = 0
    part: list[tuple[int, Span]] = []
    for token, span in [*zip(ids, offsets, strict=True), (-1, (len(text), len(text)))]:
        if token != -1 and (token not in special or _overlap(span, names)):
            part.append((token, span))
            continue
        if _overlap((begin, span[0]), names):
            part = _encode_part(tokenizer, text[begin : span[0]], begin)
        kept += part if token == -1 else [*part, (token, span)]
        begin, part = span[1], []
    return [token for token, _ in kept], [span for _, span in kept]


def _encode_part(tokenizer: Tokenizer, text: str, begin: int) -> list[tuple[int, Span]]:
    """A part that does not begin the text: behind a line end no tokenizer takes it for a beginning."""
    lead, shift = "\n" if begin else "", begin
    ids, offsets = tokenizer.encode_with_offsets(lead + text)
    count = len(tokenizer.encode_with_offsets(lead)[0])
    if lead and tokenizer.encode_with_offsets(lead)[0] != ids[:count]:  # joined with what follows
        (ids, offsets), count, lead = tokenizer.encode_with_offsets(text), 0, ""
    shift -= len(lead)
    return [(token, (shift + a, shift + b)) for token, (a, b) in zip(ids[count:], offsets[count:], strict=True)]


def _overlap(span: Span, others: Sequence[Span]) -> bool:
    return any(begin < span[1] and span[0] < end for begin, end in others)


def assistant_mask(
    tokenizer: Tokenizer, text: str, ids: list[int], offsets: list[Span], spans: list[Span], trim: bool
) -> list[int]:
    """1 for each token of which a character lies in a span.

    A token right behind a span that ends the turn is one, too: without it the model would never learn to stop. What a
    template writes behind that token is none (`trim`), since nothing is generated there.
    """
    special = tokenizer.special_ids()
    ends = {*tokenizer.stop_ids, *(tokenizer.token_to_id(name) for name in _TURN_ENDS)} & special
    mask = [0] * len(ids)
    place = 0
    for begin, end in spans:
        while place < len(ids) and offsets[place][1] <= begin:
            place += 1
        first = place
        while place < len(ids) and offsets[place][0] < end:
            mask[place] = 1
            place += 1
        last = max((number for number in range(first, place) if ids[number] in special), default=None)
        if last is not None and trim and not text[offsets[last][1] : end].strip():
            mask[last + 1 : place] = [0] * (place - last - 1)
        ended = place > first and ids[place - 1] in ends
        if not ended and place < len(ids) and ids[place] in ends and offsets[place][0] == end and place > first:
            mask[place] = 1
    return mask


class Marks:
    """Two characters around the names of control tokens in messages, to find them again in the rendered text."""

    def __init__(self, names: re.Pattern[str], open_mark: str, close_mark: str):
        self._names, self._open, self._close = names, open_mark, close_mark

    @staticmethod
    def of(tokenizer: Tokenizer, source: str, values: Any, meant: frozenset[str] = frozenset()) -> Marks | None:
        """Marks of all names but those that are `meant`. None: there are no such names, which is the rule."""
        names = _control_names(tokenizer, meant)
        strings = list(_strings(values))
        if names is None or not any(names.search(text) for text in strings):
            return None
        used = set(source).union(*strings)
        free = [chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in used]
        if len(free) < 2:
            raise DataError("a conversation uses every private character of Unicode", "Leave out some of U+E000-F8FF.")
        return Marks(names, free[0], free[1])

    def put(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._names.sub(lambda found: f"{self._open}{found[0]}{self._close}", value)
        if isinstance(value, Mapping):
            return {key: self.put(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.put(item) for item in value]
        return value

    def take(self, text: str, spans: list[Span], name: str) -> tuple[str, list[Span], list[Span]]:
        """(text without the marks, the spans in it, where the names are)."""
        parts: list[str] = []
        names: list[Span] = []
        removed: list[int] = []
        length, opened = 0, -1
        for part in re.split(f"([{self._open}{self._close}])", text):
            if part == self._open and opened < 0:
                opened = length
            elif part == self._close and opened >= 0:
                names.append((opened, length))
                opened = -1
            elif part in (self._open, self._close):
                raise DataError(
                    f"{name} cuts a message inside of the name of a control token", "Leave such names out of messages."
                )
            else:
                parts.append(part)
                length += len(part)
                continue
            removed.append(length + len(removed))
        if opened >= 0:
            raise DataError(
                f"{name} cuts a message inside of the name of a control token", "Leave such names out of messages."
            )
        moved = [tuple(place - sum(at < place for at in removed) for place in span) for span in spans]
        return "".join(parts), [(begin, end) for begin, end in moved], names


def _strings(value: Any) -> Any:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _control_names(tokenizer: Tokenizer, meant: frozenset[str]) -> re.Pattern[str] | None:
    names = {*filter(None, map(tokenizer.id_to_token, tokenizer.special_ids()))} - meant
    return _names_pattern(tuple(sorted(names)))


@lru_cache(16)
def _names_pattern(names: tuple[str, ...]) -> re.Pattern[str] | None:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if names else None
