"""Text to token ids and back: bytes, a Hugging Face tokenizer.json, or a SentencePiece model.

A tokenizer adds no special token by itself (`data.append_eos` and `data.prepend_bos` do), never pads or truncates,
and reads the name of a special token inside a text as text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jtrain.data.files import exists, is_dir, join, read_bytes
from jtrain.errors import DataError

_REMEDY = "data.tokenizer is `bytes`, a tokenizer.json (or a folder that holds one), or a SentencePiece .model."
# Tokens that end a document, by family; read only where no configuration beside the file names one.
_EOS_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|endofsentence|>", "[EOS]", "[SEP]")
_BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|beginofsentence|>", "[BOS]", "[CLS]")
_PROBE = "The quick brown fox, 1234 times:\n\tnaïve façade — 東京 Ωμέγα 🙂 ﬁ ①  'quoted' (x == y); end."


class Tokenizer(Protocol):
    """What the data and the samplers need of a tokenizer.

    Attributes:
      spec: what it was loaded from; a worker process loads it again from there.
      vocab_size: one more than the largest id.
      eos_id, bos_id: ends and begins a document, or None where there is no such token.
      pad_id: stands in padding, which is masked by length and never by this id.
      fingerprint: hex digest of everything that decides the ids.
    """

    spec: str
    vocab_size: int
    eos_id: int | None
    bos_id: int | None
    pad_id: int
    fingerprint: str

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self) -> np.ndarray | None:
        """int32 [vocab_size]: UTF-8 bytes that each token stands for, 0 for special tokens; None: not known."""
        ...


def load_tokenizer(spec: str) -> Tokenizer:
    """Loads a tokenizer by its `data.tokenizer` value.

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
            raise DataError(f"data.tokenizer: {spec} holds no tokenizer.json and no tokenizer.model", _REMEDY)
    if not exists(path):
        raise DataError(f"data.tokenizer: {spec} does not exist", _REMEDY)
    if path.endswith(".json"):
        return JsonTokenizer(path)
    if path.endswith(".model"):
        return SentencePieceTokenizer(path)
    raise DataError(f"data.tokenizer: {spec} is of no known kind", _REMEDY)


class ByteTokenizer:
    """Token b is byte b; 256 ends, 257 begins a document, 258 pads."""

    spec = "bytes"
    vocab_size = 259
    eos_id: int | None = 256
    bos_id: int | None = 257
    pad_id = 258
    fingerprint = "bytes-259"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in map(int, ids) if token < 256).decode(errors="replace")

    def token_bytes(self) -> np.ndarray:
        return (np.arange(self.vocab_size) < 256).astype(np.int32)


class JsonTokenizer:
    """A tokenizer.json of the `tokenizers` library.

    The end and begin tokens are those that the tokenizer_config.json beside it names, else the usual names.
    """

    def __init__(self, path: str):
        from tokenizers import Tokenizer as Backend

        content = read_bytes(path, field="data.tokenizer")
        try:
            self._backend = Backend.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"data.tokenizer: {path} is not a tokenizer.json: {error}", _REMEDY) from error
        # Both are stored in the file by some trainers, and would cut or pad documents without a word.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise DataError(f"data.tokenizer: {path} has an empty vocabulary", _REMEDY)
        named = _special_tokens(path)
        self.spec = path
        self.vocab_size = max(vocabulary.values()) + 1
        self.eos_id = _first_id(vocabulary, named.get("eos_token"), _EOS_NAMES)
        self.bos_id = _first_id(vocabulary, named.get("bos_token"), _BOS_NAMES)
        pad_id = _first_id(vocabulary, named.get("pad_token"), ("<pad>", "<|pad|>", "[PAD]"))
        self.pad_id = next(value for value in (pad_id, self.eos_id, 0) if value is not None)
        self.fingerprint = _digest(content, self.eos_id, self.bos_id)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(token) for token in ids], skip_special_tokens=True)

    def token_bytes(self) -> np.ndarray | None:
        byte_level = "ByteLevel" in repr(self._backend.decoder)
        sizes = np.zeros(self.vocab_size, np.int32)
        for text, token in self._backend.get_vocab(with_added_tokens=False).items():
            sizes[token] = len(text) if byte_level else _piece_bytes(text)  # a byte is one character of its alphabet
        for token, added in self._backend.get_added_tokens_decoder().items():
            sizes[token] = 0 if added.special else len(added.content.encode())
        return sizes if _counts_bytes(self, sizes) else None


class SentencePieceTokenizer:
    """A SentencePiece .model file."""

    def __init__(self, path: str):
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
            raise DataError(f"data.tokenizer: {path} is not a SentencePiece model", _REMEDY) from error
        if not self._backend.vocab_size():
            raise DataError(f"data.tokenizer: {path} is not a SentencePiece model", _REMEDY)
        self.spec = path
        self.vocab_size = int(self._backend.vocab_size())
        self.eos_id = _valid(self._backend.eos_id())
        self.bos_id = _valid(self._backend.bos_id())
        self.pad_id = next(v for v in (_valid(self._backend.pad_id()), self.eos_id, 0) if v is not None)
        self.fingerprint = _digest(content, self.eos_id, self.bos_id)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self._backend.encode(list(texts), out_type=int)

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([token for token in map(int, ids) if token < self.vocab_size])

    def token_bytes(self) -> np.ndarray | None:
        backend = self._backend
        sizes = np.zeros(self.vocab_size, np.int32)
        for token in range(self.vocab_size):
            if backend.is_byte(token):
                sizes[token] = 1
            elif not backend.is_control(token) and not backend.is_unknown(token):
                sizes[token] = _piece_bytes(backend.id_to_piece(token))
        return sizes if _counts_bytes(self, sizes) else None


def _piece_bytes(piece: str) -> int:
    """Bytes of a piece in SentencePiece's spelling: U+2581 is a space, <0x0A> one byte."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return 1
    return len(piece.replace("\u2581", " ").encode())


def _counts_bytes(tokenizer: Tokenizer, sizes: np.ndarray) -> bool:
    """Whether a table agrees with a text of many scripts, but for the space that some put before a document.

    That space is in a document's first token, which is never a target (after a begin token it is one byte more).
    """
    ids = tokenizer.encode_batch([_PROBE])[0]
    return int(sizes[np.asarray(ids, np.int64)].sum()) - len(_PROBE.encode()) in (0, 1)


def _special_tokens(path: str) -> dict[str, str]:
    """Names of the special tokens in the tokenizer_config.json beside `path`."""
    beside = join(path.rpartition("/")[0] or ".", "tokenizer_config.json")
    if not exists(beside):
        return {}
    try:
        config = json.loads(read_bytes(beside, field="data.tokenizer"))
    except ValueError as error:
        raise DataError(f"data.tokenizer: {beside} is not JSON: {error}", _REMEDY) from error
    names = {}
    for key in ("eos_token", "bos_token", "pad_token"):
        value = config.get(key) if isinstance(config, dict) else None
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            names[key] = value
    return names


def _first_id(vocabulary: dict[str, int], name: str | None, names: Sequence[str]) -> int | None:
    candidates = (name,) if name is not None else names
    return next((vocabulary[candidate] for candidate in candidates if candidate in vocabulary), None)


def _valid(token: int) -> int | None:
    return token if token >= 0 else None


def _digest(content: bytes, *parts: object) -> str:
    return hashlib.blake2b(content + repr(parts).encode(), digest_size=16).hexdigest()
