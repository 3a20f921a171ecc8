"""A SentencePiece .model file, with the tokens that the settings beside it add."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jtrain.data.files import read_bytes
from jtrain.data.tokenizer_files import TokenizerFiles
from jtrain.data.tokenizers import REMEDY, TokenizerBase, counts_bytes, digest, piece_bytes
from jtrain.data.unicode import check_unicode
from jtrain.errors import DataError

Spans = list[tuple[int, int]]


class SentencePieceTokenizer(TokenizerBase):
    """A SentencePiece .model file.

    Where names of special tokens are read as such, the text between them is encoded as the middle of a text: only
    what stands at the very beginning gets the space that these models write before a text.
    """

    def __init__(self, path: str, files: TokenizerFiles):
        try:
            import sentencepiece
        except ImportError as error:
            raise DataError(
                f"data.tokenizer: {path} needs the sentencepiece package", "pip install sentencepiece"
            ) from error
        content = read_bytes(path, field="data.tokenizer")
        self._backend: Any = sentencepiece.SentencePieceProcessor()
        try:
            self._backend.LoadFromSerializedProto(content)
        except Exception as error:  # the library raises RuntimeError or its own
            raise DataError(f"data.tokenizer: {path} is not a SentencePiece model", REMEDY) from error
        if not self._backend.vocab_size():
            raise DataError(f"data.tokenizer: {path} is not a SentencePiece model", REMEDY)
        self.spec = path
        self._pieces = int(self._backend.vocab_size())
        self._added = {token: entry for token, entry in files.added_tokens.items() if token >= self._pieces}
        self.vocab_size = max([self._pieces, *(token + 1 for token in self._added)])
        control = {self._backend.id_to_piece(n): n for n in range(self._pieces) if self._backend.is_control(n)}
        self._control = control | {text: token for token, (text, special) in self._added.items() if special}
        self._control_ids = frozenset(self._control.values())
        # A piece of one letter, to decode others as the middle of a text.
        usual = (n for n in range(self._pieces) if not (self._backend.is_unknown(n) or self._backend.is_byte(n)))
        self._lead = next(n for n in usual if len(self._backend.decode([n]).strip()) == 1)
        self._plain = {text: token for token, (text, special) in self._added.items() if not special}
        backend = self._backend
        own = {
            "eos_token": backend.eos_id(),
            "bos_token": backend.bos_id(),
            "pad_token": backend.pad_id(),
            "unk_token": backend.unk_id(),
        }
        named = {name: backend.id_to_piece(token) for name, token in own.items() if token >= 0}
        self._read(files, named)
        if files.add_bos is None:
            self.add_bos = self.bos_id is not None
        more = [sorted(self._added.items())] if self._added else []
        self.fingerprint = digest(content, self.eos_id, self.bos_id, *more)

    def token_to_id(self, token: str) -> int | None:
        found = self._control.get(token, self._plain.get(token))
        if found is not None:
            return found
        number = self._backend.piece_to_id(token)
        known = number != self._backend.unk_id() or token == self._backend.id_to_piece(number)
        return int(number) if known else None

    def id_to_token(self, token: int) -> str | None:
        if 0 <= token < self._pieces:
            return self._backend.id_to_piece(token)
        return self._added[token][0] if token in self._added else None

    def special_ids(self) -> frozenset[int]:
        return self._control_ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if self._plain:
            return [self.encode_with_offsets(text)[0] for text in texts]
        check_unicode(texts)
        return self._backend.encode(list(texts), out_type=int)

    def encode_with_offsets(self, text: str, *, special: bool = False) -> tuple[list[int], Spans]:
        check_unicode([text])
        names = (self._plain | self._control) if special else self._plain
        ids: list[int] = []
        spans: Spans = []
        place = 0
        for part, is_name in _split_at(text, names):
            if is_name:
                ids.append(names[part])
                spans.append((place, place + len(part)))
            else:
                new, new_spans = self._encode_part(part, begins=place == 0)
                ids += new
                spans += [(place + begin, place + end) for begin, end in new_spans]
            place += len(part)
        return ids, spans

    def _encode_part(self, text: str, begins: bool) -> tuple[list[int], Spans]:
        if begins:
            return self._encode(text)
        lead = self._encode("\n")[0]
        ids, spans = self._encode(f"\n{text}")
        if ids[: len(lead)] != lead:  # a model that drops line ends, or joins them with what follows
            return self._encode(text)
        return ids[len(lead) :], [(max(0, begin - 1), end - 1) for begin, end in spans[len(lead) :]]

    def _encode(self, text: str) -> tuple[list[int], Spans]:
        try:
            pieces = self._backend.encode(text, return_type="proto").pieces
        except TypeError:  # releases up to 0.2.1 call it so
            pieces = self._backend.encode(text, out_type="immutable_proto").pieces
        ids = [int(piece.id) for piece in pieces]
        spans = [(int(piece.begin), int(piece.end)) for piece in pieces]
        if spans and spans[-1][1] > len(text):  # counted in bytes
            sizes = [len(character.encode(errors="surrogatepass")) for character in text]
            character_of = np.repeat(np.arange(len(text)), sizes).tolist() + [len(text)]
            spans = [(character_of[begin], character_of[max(begin, end - 1)] + (end > begin)) for begin, end in spans]
        for number in reversed(range(len(spans) - 1)):
            if spans[number][0] == spans[number][1] == spans[number + 1][0]:
                spans[number] = spans[number + 1]  # the first bytes of a character: all of them are its
        return ids, spans

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        texts: list[str] = []
        for kind, group in itertools.groupby(map(int, ids), self._kind):
            tokens = list(group)
            if kind == "piece":
                texts.append(self._decode_pieces(tokens, begins=not texts))
            elif kind == "added" or (kind == "control" and not skip_special):
                texts += filter(None, map(self.id_to_token, tokens))
        return "".join(texts)

    def _kind(self, token: int) -> str:
        if token in self._control_ids:
            return "control"
        return "piece" if token < self._pieces else "added"

    def _decode_pieces(self, tokens: list[int], begins: bool) -> str:
        """The library drops the space of the first piece: in the middle of a text there is another one before."""
        if begins:
            return self._backend.decode(tokens)
        return self._backend.decode([self._lead, *tokens])[len(self._backend.decode([self._lead])) :]

    def token_bytes(self) -> np.ndarray | None:
        backend = self._backend
        sizes = np.zeros(self.vocab_size, np.int32)
        for token in range(self._pieces):
            if backend.is_byte(token):
                sizes[token] = 1
            elif not backend.is_control(token) and not backend.is_unknown(token):
                sizes[token] = piece_bytes(backend.id_to_piece(token))
        for text, token in self._plain.items():
            sizes[token] = len(text.encode())
        return sizes if counts_bytes(self, sizes) else None


def _split_at(text: str, names: dict[str, int]) -> Iterator[tuple[str, bool]]:
    """Parts of a text in order: (part, whether it is one of the names); at one place the longest name wins."""
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    parts = re.split(f"({pattern})", text) if names else [text]
    for number, part in enumerate(parts):
        if part:
            yield part, number % 2 == 1
