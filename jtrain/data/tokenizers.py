"""Text to token ids and back: bytes, a Hugging Face tokenizer.json, or a SentencePiece model.

`encode_batch` is for documents: it adds no special token (`data.append_eos` and `data.prepend_bos` do), never pads or
truncates, and reads the name of a special token inside a text as text. `encode` is for a prompt: it puts the begin
token first where the model expects one. What a chat template rendered goes through `jtrain.data.chat`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from jtrain.data.files import exists, is_dir, join, read_bytes
from jtrain.data.image_processor import ImageProcessor, read_image_processor
from jtrain.data.stream_decoder import StreamDecoder
from jtrain.data.tokenizer_files import TokenizerFiles, read_tokenizer_files
from jtrain.data.unicode import check_unicode
from jtrain.errors import DataError

__all__ = ["ByteTokenizer", "JsonTokenizer", "StreamDecoder", "Tokenizer", "load_tokenizer"]

REMEDY = "data.tokenizer is `bytes`, a tokenizer.json (or a folder that holds one), or a SentencePiece .model."
# Where nothing beside the file names a token: the usual names, by family.
_USUAL = {
    "eos_token": (
        "<|endoftext|>",
        "</s>",
        "<|end_of_text|>",
        "<eos>",
        "<|im_end|>",
        "<|endofsentence|>",
        "[EOS]",
        "[SEP]",
    ),
    "bos_token": ("<|begin_of_text|>", "<s>", "<bos>", "<|beginofsentence|>", "[BOS]", "[CLS]"),
    "pad_token": ("<pad>", "<|pad|>", "[PAD]"),
    "unk_token": ("<unk>", "[UNK]"),
}
_PROBE = "The quick brown fox, 1234 times:\n\tnaïve façade — 東京 Ωμέγα 🙂 ﬁ ①  'quoted' (x == y); end."


class Tokenizer(Protocol):
    """What the data and the samplers need of a tokenizer.

    Attributes:
      spec: what it was loaded from; a worker process loads it again from there.
      vocab_size: one more than the largest id.
      eos_id, bos_id, unk_id: ends and begins a document, stands for what can't be written; None: no such token.
      pad_id: stands in padding, which is masked by length and never by this id.
      stop_ids: tokens that end a generated answer: those of generation_config.json, and eos_id.
      add_bos: whether the model expects the begin token before a prompt.
      special_tokens: name (bos_token, eos_token, ...) to text: what chat templates read.
      chat_templates: name to source; the usual one is called default.
      images: how images enter rows, beside the tokenizer of a model that sees; None: it reads text alone.
      fingerprint: hex digest of everything that decides the ids.
    """

    spec: str
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    unk_id: int | None
    pad_id: int
    stop_ids: tuple[int, ...]
    add_bos: bool
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]
    images: ImageProcessor | None
    fingerprint: str

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of documents, without special tokens."""
        ...

    def encode(self, text: str, *, special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Ids of a prompt.

        Args:
          text: what it says.
          special: read names of special tokens in the text as these tokens, not as text.
          add_bos: put the begin token first, unless the text begins with it; None: as the model expects it.
        """
        ...

    def encode_with_offsets(self, text: str, *, special: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids without a begin token, and of each the characters of the text that it stands for (begin, end)."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...

    def token_to_id(self, token: str) -> int | None: ...

    def id_to_token(self, token: int) -> str | None: ...

    def special_ids(self) -> frozenset[int]:
        """The control tokens: those that no text contains unless it is read with `special`."""
        ...

    def token_bytes(self) -> np.ndarray | None:
        """int32 [vocab_size]: UTF-8 bytes that each token stands for, 0 for special tokens; None: not known."""
        ...


def load_tokenizer(spec: str) -> Tokenizer:
    """Loads a tokenizer by its `data.tokenizer` value.

    A folder stands for its tokenizer.json, else its tokenizer.model. The settings beside the file
    (tokenizer_config.json and what `TokenizerFiles` lists) are read with it.

    Raises:
      DataError: it is missing, or not a tokenizer.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = spec
    if is_dir(spec):
        inside = (join(spec, name) for name in ("tokenizer.json", "tokenizer.model"))
        path = next((name for name in inside if exists(name)), "")
        if not path:
            raise DataError(f"data.tokenizer: {spec} holds no tokenizer.json and no tokenizer.model", REMEDY)
    if not exists(path):
        raise DataError(f"data.tokenizer: {spec} does not exist", REMEDY)
    folder = path.rpartition("/")[0] or "."
    files = read_tokenizer_files(folder)
    tokenizer: JsonTokenizer | SentencePieceTokenizer | None = None
    if path.endswith(".json"):
        tokenizer = JsonTokenizer(path, files)
    elif path.endswith(".model"):
        from jtrain.data.sentence_piece import SentencePieceTokenizer

        tokenizer = SentencePieceTokenizer(path, files)
    if tokenizer is not None:
        tokenizer.images = read_image_processor(folder, tokenizer.token_to_id)
        return tokenizer
    raise DataError(f"data.tokenizer: {spec} is of no known kind", REMEDY)


class TokenizerBase(ABC):
    """What the kinds of tokenizers share: special tokens by name, and the begin token of a prompt."""

    eos_id: int | None = None
    bos_id: int | None = None
    unk_id: int | None = None
    pad_id = 0
    stop_ids: tuple[int, ...] = ()
    add_bos = False
    special_tokens: dict[str, str] = {}  # noqa: RUF012
    chat_templates: dict[str, str] = {}  # noqa: RUF012
    images: ImageProcessor | None = None

    def _read(self, files: TokenizerFiles, own: dict[str, str]) -> None:
        """Takes over the settings; `own` names what the vocabulary's own file says, where it says it."""
        self.chat_templates = files.chat_templates
        names: dict[str, str | None] = {}
        for name in {**_USUAL, **own, **files.special_tokens}:
            usual = (own[name],) if name in own else _USUAL.get(name, ())
            # null means none for the begin token; the others are null in files whose authors just never set them.
            set_by_file = name in files.special_tokens and (name == "bos_token" or files.special_tokens[name])
            candidates = (files.special_tokens[name],) if set_by_file else usual
            names[name] = next((text for text in candidates if text and self.token_to_id(text) is not None), None)
        self.special_tokens = {name: text for name, text in names.items() if text}
        ids = {name: self.token_to_id(text) for name, text in self.special_tokens.items()}
        self.eos_id, self.bos_id, self.unk_id = ids.get("eos_token"), ids.get("bos_token"), ids.get("unk_token")
        self.pad_id = next(token for token in (ids.get("pad_token"), self.eos_id, 0) if token is not None)
        ends = [*files.stop_ids, *([] if self.eos_id is None else [self.eos_id])]
        self.stop_ids = tuple(dict.fromkeys(ends))
        self.add_bos = bool(files.add_bos) and self.bos_id is not None

    def encode(self, text: str, *, special: bool = False, add_bos: bool | None = None) -> list[int]:
        ids, _ = self.encode_with_offsets(text, special=special)
        if (self.add_bos if add_bos is None else add_bos) and ids[:1] != [self.bos_id]:
            if self.bos_id is None:
                raise DataError(
                    f"the tokenizer {self.spec} has no begin-of-sequence token",  # type: ignore[attr-defined]
                    "Name one in a tokenizer_config.json beside the tokenizer, or leave add_bos out.",
                )
            ids.insert(0, self.bos_id)
        return ids

    @abstractmethod
    def encode_with_offsets(self, text: str, *, special: bool = False) -> tuple[list[int], list[tuple[int, int]]]: ...

    @abstractmethod
    def token_to_id(self, token: str) -> int | None: ...


class ByteTokenizer(TokenizerBase):
    """Token b is byte b; 256 ends, 257 begins a document, 258 pads. No text stands for these three."""

    spec = "bytes"
    vocab_size = 259
    eos_id: int | None = 256
    bos_id: int | None = 257
    pad_id = 258
    stop_ids: tuple[int, ...] = (256,)
    fingerprint = "bytes-259"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        check_unicode(texts)
        return [list(text.encode()) for text in texts]

    def encode_with_offsets(self, text: str, *, special: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        check_unicode([text])
        sizes = [len(character.encode()) for character in text]
        spans = [(place, place + 1) for place, size in enumerate(sizes) for _ in range(size)]
        return list(text.encode()), spans

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return bytes(token for token in map(int, ids) if token < 256).decode(errors="replace")

    def token_to_id(self, token: str) -> int | None:
        content = token.encode()
        return content[0] if len(content) == 1 else None

    def id_to_token(self, token: int) -> str | None:
        return chr(token) if 0 <= token < 128 else None

    def special_ids(self) -> frozenset[int]:
        return frozenset((256, 257, 258))

    def token_bytes(self) -> np.ndarray:
        return (np.arange(self.vocab_size) < 256).astype(np.int32)


class JsonTokenizer(TokenizerBase):
    """A tokenizer.json of the `tokenizers` library."""

    def __init__(self, path: str, files: TokenizerFiles):
        self._content = read_bytes(path, field="data.tokenizer")
        self.spec = path
        self._backend = self._load(names_are_text=True)
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"data.tokenizer: {path} has an empty vocabulary", REMEDY)
        self.vocab_size = max(vocabulary.values()) + 1
        self._read(files, {})
        if files.add_bos is None and self.bos_id is not None:
            self.add_bos = self._backend.encode("a").ids[:1] == [self.bos_id]  # the file's own post-processor
        self.fingerprint = digest(self._content, self.eos_id, self.bos_id)

    def _load(self, names_are_text: bool) -> Any:
        from tokenizers import Tokenizer as Backend

        try:
            backend = Backend.from_str(self._content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"data.tokenizer: {self.spec} is not a tokenizer.json: {error}", REMEDY) from error
        # Both are stored in the file by some trainers, and would cut or pad documents without a word.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = names_are_text
        return backend

    @cached_property
    def _parser(self) -> Any:
        """The same once more, with names of special tokens read as such: a switch of the library's whole object."""
        return self._load(names_are_text=False)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:  # what the library says of half of a surrogate pair
            check_unicode(texts)
            raise
        return [encoding.ids for encoding in found]

    def encode_with_offsets(self, text: str, *, special: bool = False) -> tuple[list[int], list[tuple[int, int]]]:
        try:
            encoding = (self._parser if special else self._backend).encode(text, add_special_tokens=False)
        except TypeError:
            check_unicode([text])
            raise
        return encoding.ids, encoding.offsets

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=skip_special)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def id_to_token(self, token: int) -> str | None:
        return self._backend.id_to_token(int(token))

    def special_ids(self) -> frozenset[int]:
        return self._special

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(n for n, added in self._backend.get_added_tokens_decoder().items() if added.special)

    def token_bytes(self) -> np.ndarray | None:
        byte_level = "ByteLevel" in repr(self._backend.decoder)
        sizes = np.zeros(self.vocab_size, np.int32)
        for text, token in self._backend.get_vocab(with_added_tokens=False).items():
            sizes[token] = len(text) if byte_level else piece_bytes(text)  # a byte is one character of its alphabet
        for token, added in self._backend.get_added_tokens_decoder().items():
            sizes[token] = 0 if added.special else len(added.content.encode())
        return sizes if counts_bytes(self, sizes) else None


def piece_bytes(piece: str) -> int:
    """Bytes of a piece in SentencePiece's spelling: U+2581 is a space, <0x0A> one byte."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return 1
    return len(piece.replace("\u2581", " ").encode())


def counts_bytes(tokenizer: Any, sizes: np.ndarray) -> bool:
    """Whether a table agrees with a text of many scripts, but for the space that some put before a document.

    That space is in a document's first token, which is never a target (after a begin token it is one byte more).
    """
    ids = tokenizer.encode_batch([_PROBE])[0]
    return int(sizes[np.asarray(ids, np.int64)].sum()) - len(_PROBE.encode()) in (0, 1)


def digest(content: bytes, *parts: object) -> str:
    return hashlib.blake2b(content + repr(parts).encode(), digest_size=16).hexdigest()
