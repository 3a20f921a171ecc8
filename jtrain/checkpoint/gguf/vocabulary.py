"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json.

Byte-level BPE splits a text before it merges, by a rule of which the file holds only the name (`tokenizer.ggml.pre`):
the rules are those of llama.cpp (src/llama-vocab.cpp), which are the models' own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jtrain.checkpoint.gguf.reader import GgufFile
from jtrain.errors import CheckpointError, ConfigError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # of tokenizer.ggml.token_type
_FILLER = re.compile(r"\[PAD\d+\]")  # what converters write for ids without a token
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS: dict[str, str | None] = {
    # None: that of GPT-2, which is built in
    "gpt-2": None,
    "smollm": None,
    "qwen2": _WORDS + r"\p{N}" + _REST,
    "llama-bpe": _WORDS + r"\p{N}{1,3}" + _REST,
}
_SAME = {"gpt2": "gpt-2", "llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_NAMES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def byte_level_bpe(
    tokens: Sequence[str],
    merges: Sequence[tuple[str, str]],
    pre: str,
    control: Sequence[str] = (),
    named: Sequence[str] = (),
) -> Any:
    """A `tokenizers.Tokenizer`.

    Args:
      tokens: by id, in the byte alphabet of GPT-2.
      merges: pairs, the first to be merged first.
      pre: name of the rule by which texts are split.
      control: special tokens.
      named: tokens that a text may hold, and that are never divided.

    Raises:
      ConfigError: a rule that is not known.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = _SAME.get(pre, pre)
    if pre not in _SPLITS:
        raise ConfigError(
            f"tokenizer.ggml.pre is {pre!r}: how it splits texts is not known",
            f"known are {', '.join(_SPLITS)}: name the model's tokenizer.json in data.tokenizer",
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    # Llama 3 has words that no merges lead to.
    model = models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=pre == "llama-bpe")
    backend = Tokenizer(model)
    pattern = _SPLITS[pre]
    parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    if pattern is not None:
        parts.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()  # as the model's own tokenizer; llama.cpp leaves it out
    backend.decoder = decoders.ByteLevel()
    _add(backend, control, named)
    return backend


def sentence_piece_bpe(
    tokens: Sequence[str],
    scores: Sequence[float],
    unknown: str | None,
    add_space: bool,
    control: Sequence[str] = (),
    named: Sequence[str] = (),
) -> Any:
    """A `tokenizers.Tokenizer` of a SentencePiece vocabulary of the kind BPE: merges by score, bytes for the rest.

    Args:
      tokens: pieces by id; U+2581 stands for a space.
      scores: of each: the piece with the highest is made first.
      unknown: the piece for what can't be written.
      add_space: whether a text is taken as if a space stood before it.
      control, named: as for `byte_level_bpe`.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: number for number, token in enumerate(tokens)}
    skipped = {*control, *named}
    found = [
        (-scores[number], number, vocabulary[piece[:cut]], vocabulary[piece[cut:]], piece[:cut], piece[cut:])
        for number, piece in enumerate(tokens)
        if piece not in skipped
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    merges = [(left, right) for *_, left, right in sorted(found)]
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = Tokenizer(model)
    before: list[Any] = [normalizers.Prepend("\u2581")] if add_space else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "\u2581")])
    after: list[Any] = [decoders.Strip(" ", left=1, right=0)] if add_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    _add(backend, control, named)
    return backend


def _add(backend: Any, control: Sequence[str], named: Sequence[str]) -> None:
    from tokenizers import AddedToken

    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in named])


def tokenizer_files(file: GgufFile) -> tuple[str, dict[str, Any]]:
    """(tokenizer.json, the content of tokenizer_config.json).

    Raises:
      ConfigError: a kind of tokenizer that is not read.
      CheckpointError: the metadata of the tokenizer are not complete.
    """
    from tokenizers import processors

    kind = file.get("tokenizer.ggml.model", None)
    if kind not in ("gpt2", "llama"):
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.model is {kind!r}",
            "read are gpt2 (byte-level BPE) and llama (SentencePiece): name a tokenizer.json in data.tokenizer",
        )
    tokens: list[str] = file.get("tokenizer.ggml.tokens")
    types: list[int] = file.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(f"{file.path}: {len(tokens)} tokens with {len(types)} types", "download it again")
    control = [token for token, what in zip(tokens, types, strict=True) if what == _CONTROL]
    named = [
        token
        for token, what in zip(tokens, types, strict=True)
        if what == _USER_DEFINED and not _FILLER.fullmatch(token)
    ]
    names = {name: tokens[number] for name, number in special_ids(file, len(tokens)).items()}
    if kind == "gpt2":
        merges = [_pair(file, merge) for merge in file.get("tokenizer.ggml.merges")]
        backend = byte_level_bpe(tokens, merges, str(file.get("tokenizer.ggml.pre", "gpt-2")), control, named)
    else:
        unknown = next((token for token, what in zip(tokens, types, strict=True) if what == _UNKNOWN), None)
        scores: list[float] = file.get("tokenizer.ggml.scores")
        add_space = bool(file.get("tokenizer.ggml.add_space_prefix", True))
        backend = sentence_piece_bpe(tokens, scores, names.get("unk_token", unknown), add_space, control, named)
    # llama.cpp's own habit where the file does not say it.
    add_bos = bool(file.get("tokenizer.ggml.add_bos_token", kind == "llama")) and "bos_token" in names
    if add_bos:
        bos = names["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, tokens.index(bos))]
        )
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
        **names,
    }
    template = file.get("tokenizer.chat_template", None)
    if isinstance(template, str):
        settings["chat_template"] = template
    return backend.to_str(), settings


def special_ids(file: GgufFile, size: int) -> dict[str, int]:
    """Name of a special token -> its id."""
    found = {name: file.get(f"tokenizer.ggml.{key}", None) for name, key in _NAMES.items()}
    return {name: number for name, number in found.items() if isinstance(number, int) and 0 <= number < size}


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.merges holds {merge!r}, which is no pair", "download it again"
        )
    return left, right
