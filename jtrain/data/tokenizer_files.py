"""What lies beside a tokenizer: names of special tokens, chat templates, the tokens that end an answer.

The files are Hugging Face's: tokenizer_config.json, special_tokens_map.json, added_tokens.json, chat_template.jinja (or
chat_template.json, and additional_chat_templates/*.jinja), generation_config.json and config.json. All of them may be
absent.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from jtrain.data.files import exists, find_files, is_dir, join, read_bytes
from jtrain.errors import DataError

_SETTINGS = "data.tokenizer"


@dataclass(frozen=True)
class TokenizerFiles:
    """The settings of a tokenizer's folder.

    Attributes:
      special_tokens: name to text, e.g. eos_token: </s>; None where a file says that there is no such token.
      add_bos: whether a text begins with the begin token; None: no file says so.
      chat_templates: name to source; the usual one is called default.
      stop_ids: tokens that end a generated answer.
      added_tokens: id to (text, whether it is a control token) of those outside the vocabulary file.
    """

    special_tokens: dict[str, str | None] = field(default_factory=dict)
    add_bos: bool | None = None
    chat_templates: dict[str, str] = field(default_factory=dict)
    stop_ids: tuple[int, ...] = ()
    added_tokens: dict[int, tuple[str, bool]] = field(default_factory=dict)


def read_tokenizer_files(folder: str) -> TokenizerFiles:
    """Raises:
    DataError: one of the files is no JSON, or of another shape.
    """
    config = _read_json(folder, "tokenizer_config.json")
    old = _read_json(folder, "special_tokens_map.json")
    add_bos = config.get("add_bos_token")
    return TokenizerFiles(
        special_tokens={**_special_tokens(old), **_special_tokens(config)},
        add_bos=add_bos if isinstance(add_bos, bool) else None,
        chat_templates=_chat_templates(folder, config),
        stop_ids=_stop_ids(folder),
        added_tokens=_added_tokens(folder, config),
    )


def _special_tokens(settings: dict[str, Any]) -> dict[str, str | None]:
    named = {key: _content(value) for key, value in settings.items() if key.endswith("_token")}
    return {key: value for key, value in named.items() if value is not None or settings[key] is None}


def _content(value: Any) -> str | None:
    """A token is written as its text, or as a dict of its text and flags."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _chat_templates(folder: str, config: dict[str, Any]) -> dict[str, str]:
    """Later places win: a list or a string in the settings, then files of their own."""
    found = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(found, str):
        templates["default"] = found
    elif isinstance(found, list):
        for entry in found:
            if not (isinstance(entry, dict) and isinstance(entry.get("template"), str)):
                path = join(folder, "tokenizer_config.json")
                raise DataError(
                    f"{_SETTINGS}: an entry of chat_template in {path} has no template",
                    'Write each as {"name": ..., "template": ...}.',
                )
            templates[_name(folder, str(entry.get("name", "default")))] = entry["template"]
    more = join(folder, "additional_chat_templates")
    if is_dir(more):
        for path in find_files(join(more, "*.jinja"), field=_SETTINGS):
            templates[path.rpartition("/")[2].removesuffix(".jinja")] = _read_text(path)
    of_processor = _read_json(folder, "chat_template.json").get("chat_template")  # as transformers 4 wrote it
    if isinstance(of_processor, str):
        templates["default"] = of_processor
    if exists(join(folder, "chat_template.jinja")):
        templates["default"] = _read_text(join(folder, "chat_template.jinja"))
    return templates


def _name(folder: str, name: str) -> str:
    """A template's name becomes that of a file when a model is exported: it is a word, and never a path."""
    if not re.fullmatch(r"[\w-][\w.-]*", name):
        path = join(folder, "tokenizer_config.json")
        raise DataError(f"{_SETTINGS}: {path} names a chat template {name!r}", "A name has letters, digits, _ and -.")
    return name


def _stop_ids(folder: str) -> tuple[int, ...]:
    """eos_token_id of generation_config.json, else of config.json: a number or several."""
    try:
        model = _read_json(folder, "config.json")
    except DataError:  # a common name: beside a tokenizer that stands alone it may be anyone's
        model = {}
    for settings in (_read_json(folder, "generation_config.json"), model):
        value = settings.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if ids and all(isinstance(token, int) for token in ids):
            return tuple(ids)
    return ()


def _added_tokens(folder: str, config: dict[str, Any]) -> dict[int, tuple[str, bool]]:
    added: dict[int, tuple[str, bool]] = {}
    for name, token in _read_json(folder, "added_tokens.json").items():
        if isinstance(token, int):
            added[token] = (name, True)
    entries = config.get("added_tokens_decoder")
    for token, entry in entries.items() if isinstance(entries, dict) else ():
        text = _content(entry)
        if text is not None and str(token).isdigit():
            special = entry.get("special", True) if isinstance(entry, dict) else True
            added[int(token)] = (text, bool(special))
    return added


def _read_json(folder: str, name: str) -> dict[str, Any]:
    path = join(folder, name)
    if not exists(path):
        return {}
    try:
        content = json.loads(read_bytes(path, field=_SETTINGS))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{_SETTINGS}: {path} is not JSON: {error}", "Mend or remove the file.") from error
    if not isinstance(content, dict):
        raise DataError(f"{_SETTINGS}: {path} holds no JSON object", "Mend or remove the file.")
    return content


def _read_text(path: str) -> str:
    try:
        return read_bytes(path, field=_SETTINGS).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{_SETTINGS}: {path} is not UTF-8: {error}", "Save it as UTF-8.") from error
