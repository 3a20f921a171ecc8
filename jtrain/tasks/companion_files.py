"""The small files of an exported folder: config.json, tokenizer, generation config."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from jtrain.checkpoint.hf.companions import EXTRA_TEMPLATES, GENERATION, NAMES, Companions
from jtrain.data.files import exists, is_dir, join, read_bytes
from jtrain.data.tokenizers import Tokenizer
from jtrain.errors import ConfigError
from jtrain.models.config import DecoderConfig
from jtrain.models.families import FAMILIES, Family, family_of
from jtrain.models.families.translation import TRAINING, of_function

_VOCABULARIES = ("tokenizer.json", "tokenizer.model")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OF_TOKENIZER = tuple(name for name in NAMES if name != GENERATION)
_STALE = ("_name_or_path", "auto_map", "transformers_version", "torch_dtype", "dtype", "quantization_config")
"""Keys of config.json that say nothing of a copy: code and versions that are not carried along, another type."""
_BYTE_TOKENS = {256: "<|endoftext|>", 257: "<|begin_of_text|>", 258: "<|pad|>"}


def plain(decoder: DecoderConfig) -> DecoderConfig:
    """The shape without what only says how to train, or on what machine: what a config.json can hold."""
    changes = {name: DecoderConfig.__dataclass_fields__[name].default for name in TRAINING}
    return decoder.replace(**changes, score_correction_bias=decoder.router_bias)


def family_for(decoder: DecoderConfig, companions: Companions) -> Family:
    """The family that a decoder came from, or else one that can say what it is.

    Raises:
      ConfigError: no family of Hugging Face has this shape.
    """
    own = FAMILIES.get(str(companions.config.get("model_type")))
    if own is not None and _says(own, decoder):
        return own
    return family_of(decoder)


def _says(family: Family, decoder: DecoderConfig) -> bool:
    try:
        return of_function(family.decoder_config(family.hf_config(decoder))) == of_function(decoder)
    except ConfigError:
        return False


def config_json(decoder: DecoderConfig, companions: Companions, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """config.json: what the family says of the decoder, over what the folder that it came from said besides.

    Raises:
      ConfigError: no family of Hugging Face has this shape.
    """
    family = family_for(decoder, companions)
    before: dict[str, Any] = {}
    if companions.config.get("model_type") == family.model_type:
        before = {key: value for key, value in companions.config.items() if key not in _STALE}
    ids = {} if tokenizer is None else token_ids(tokenizer)
    own = family.hf_config(decoder)
    for name in ("text_config", "vision_config"):  # the parts of a model that sees are configs themselves
        held, part = before.get(name), own.get(name)
        if isinstance(held, dict) and isinstance(part, dict) and held.get("model_type") == part["model_type"]:
            own[name] = {key: value for key, value in held.items() if key not in _STALE} | part
    return {**ids, **before, **own}


def token_ids(tokenizer: Tokenizer) -> dict[str, int | list[int]]:
    """bos_token_id, eos_token_id and pad_token_id, as far as there are such tokens; several ends are a list."""
    ends: Any = list(tokenizer.stop_ids) if len(tokenizer.stop_ids) > 1 else tokenizer.eos_id
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends, "pad_token_id": tokenizer.pad_id}
    return {name: value for name, value in ids.items() if value is not None}


def _generation_config(tokenizer: Tokenizer, before: bytes | None) -> bytes:
    """generation_config.json with the tokens of this tokenizer; `before` is that of the model, of another one."""
    settings = {} if before is None else Companions(files={GENERATION: before}).json(GENERATION)
    kept = {key: value for key, value in settings.items() if key not in _TOKEN_IDS}
    return _json({**kept, **token_ids(tokenizer)})


def has_tokenizer(companions: Companions) -> bool:
    """Whether a tokenizer is among the files."""
    return any(name in companions.files for name in _VOCABULARIES)


def with_tokenizer(companions: Companions, tokenizer: Tokenizer | None, max_length: int) -> Companions:
    """The files with those of another tokenizer in place of their own, chat template included.

    Args:
      companions: what is carried on.
      tokenizer: the one that the model is used with.
      max_length: the longest row that the model takes.
    """
    if tokenizer is None:
        return companions
    files = {name: data for name, data in companions.files.items() if name not in _OF_TOKENIZER}
    files = {name: data for name, data in files.items() if not name.startswith(EXTRA_TEMPLATES)}
    of_model = files.pop(GENERATION, None)
    files |= _files(tokenizer, max_length)
    files[GENERATION] = _generation_config(tokenizer, files.get(GENERATION, of_model))
    config = {key: value for key, value in companions.config.items() if key not in _TOKEN_IDS}
    return dataclasses.replace(companions, files=files, config=config)


def _files(tokenizer: Tokenizer, max_length: int) -> dict[str, bytes]:
    if tokenizer.spec == "bytes":
        return {"tokenizer.json": byte_tokenizer_json(), "tokenizer_config.json": _byte_settings(max_length)}
    spec = tokenizer.spec
    folder = spec.rpartition("/")[0] or "."
    kind = "tokenizer.json" if spec.endswith(".json") else "tokenizer.model"
    files = {kind: read_bytes(spec, field="data.tokenizer")}
    for name in NAMES:
        path = join(folder, name)
        if name not in _VOCABULARIES and exists(path):
            files[name] = read_bytes(path, field="data.tokenizer")
    if is_dir(extra := join(folder, EXTRA_TEMPLATES)):
        for name in tokenizer.chat_templates:
            if exists(path := join(extra, f"{name}.jinja")):
                files[f"{EXTRA_TEMPLATES}/{name}.jinja"] = read_bytes(path, field="data.tokenizer")
    if "tokenizer_config.json" not in files:
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast" if kind == "tokenizer.json" else "LlamaTokenizer",
            **tokenizer.special_tokens,
            "add_bos_token": tokenizer.add_bos,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
        }
        files["tokenizer_config.json"] = _json(settings)
    return files


def _byte_settings(max_length: int) -> bytes:
    eos, bos, pad = _BYTE_TOKENS.values()
    return _json(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": eos,
            "bos_token": bos,
            "pad_token": pad,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
        }
    )


def byte_tokenizer_json() -> bytes:
    """A tokenizer.json that gives the ids of the byte tokenizer: token b is byte b, no merges."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    special = [
        {
            "id": token,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token, text in _BYTE_TOKENS.items()
    ]
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {letter: byte for byte, letter in enumerate(_alphabet())},
        "merges": [],
    }
    return _json(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": special,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": model,
        }
    )


def _alphabet() -> list[str]:
    """The letter that stands for each byte in byte-level BPE: GPT-2's encoder.py, bytes_to_unicode."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
