"""Secrets out of what a person or another machine will see: config, events, console, messages, command lines.

A secret is known by its name (`hub_token`, `client_secret`, `wandb_api_key`, `password`), by its place in a URL (user
and password, signatures), by its form (`hf_...`, `AKIA...`), or because a variable of the environment with such a name
holds it. What only sounds like one stays: `tokenizer`, `eos_token`, `use_cls_token`, `num_experts_per_tok`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
_SECRETS = {"token", "secret", "secrets", "password", "passwd", "passphrase", "credential", "credentials", "apikey"}
_KEYS = {"api", "access", "private", "secret", "signing", "encryption"}  # before `key`
# Before and behind `token`: a text that a tokenizer knows, a figure.
_TEXT_TOKENS = {"bos", "eos", "pad", "unk", "cls", "sep", "mask", "stop", "begin", "end", "next", "special"} | {
    "image", "video", "audio",
}  # fmt: skip
_ABOUT_TOKENS = {"id", "ids", "index", "type", "types", "count", "length", "limit", "embedding", "embeddings", "bytes"}

_URL_USER = re.compile(r"(?<=://)[^/@\s'\"]+(?=@)")
_NAME = re.compile(r"([?&]|--?|\b)([A-Za-z][\w.-]{0,63}+)(=| (?=[^\s-]))")
_VALUE = re.compile(r"[^&\s'\",;)]+")
_SIGNATURE = re.compile(r"(?i)^(x-\w+-)*(sig|signature|key)$")
_HEADER = re.compile(r"(?i)\b(bearer|basic) +[\w.~+/=-]{8,}")
_FORM = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|(AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|sk-[\w-]{20,}|ya29\.[\w-]{20,})"
)
_LEAST = 8
"""Characters of a variable's value that is looked for in texts: a shorter one would mask words."""


def is_secret(name: str) -> bool:
    """Whether a field, flag or variable of this name holds a secret."""
    words = [word.lower() for word in _WORD.findall(name)]
    for place, word in enumerate(words):
        before, after = words[place - 1] if place else "", words[place + 1] if place + 1 < len(words) else ""
        if word == "key" and before in _KEYS:
            return True
        if word in _SECRETS and not (word == "token" and (before in _TEXT_TOKENS or after in _ABOUT_TOKENS)):
            return True
    return False


def redact(value: Any, name: str = "", *, prose: bool = True) -> Any:
    """A tree of mappings, lists and texts without secrets; numbers and the rest are left alone.

    Args:
      value: the tree.
      name: what it is called.
      prose: False: its texts are values that are read again; only those that are URLs are looked into.
    """
    if isinstance(value, Mapping):
        return {key: redact(item, str(key), prose=prose) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, name, prose=prose) for item in value]
    if not isinstance(value, str):
        return value
    if value and is_secret(name):
        return MASK
    return redact_text(value) if prose else redact_url(value)


def redact_url(value: str) -> str:
    """A URL without its user, password and signature; another text as it is."""
    return _assignments(_URL_USER.sub(MASK, value)) if "://" in value else value


def redact_text(text: str, env: Mapping[str, str] | None = None) -> str:
    """A text for people without secrets.

    Args:
      text: a message, a line of a log, a traceback.
      env: where secrets are known from; the process's environment by default.
    """
    for name, value in (os.environ if env is None else env).items():
        # The path of a file with credentials is no secret.
        if len(value) >= _LEAST and value in text and is_secret(name) and not value.startswith(("/", "~", ".")):
            text = text.replace(value, MASK)
    text = _FORM.sub(MASK, _HEADER.sub(rf"\1 {MASK}", text))
    return _assignments(_URL_USER.sub(MASK, text))


def _assignments(text: str) -> str:
    """Masks the values of `name=value`, `--name value` and `?name=value` whose names are those of secrets."""
    parts, at = [], 0
    for found in _NAME.finditer(text):
        before, name, equals = found.groups()
        if equals == " " and not before.startswith("-"):  # only a flag has its value behind a space
            continue
        in_url = before in ("?", "&")
        value = _VALUE.match(text, found.end())
        if value and found.start() >= at and (is_secret(name) or (in_url and _SIGNATURE.match(name))):
            parts += [text[at : found.end()], MASK]
            at = value.end()
    return "".join([*parts, text[at:]])
