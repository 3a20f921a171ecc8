"""Files by path, glob, folder, URL (gs://, s3://, https://, ... through fsspec) or name on the hub (hf:org/name)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, BinaryIO

from jtrain.errors import ConfigError, DataError

SUFFIXES = {
    ".txt": "text",
    ".txt.gz": "text",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".parquet": "parquet",
    ".array_record": "array_record",
    ".arrayrecord": "array_record",
}
_KINDS_REMEDY = f"Known kinds: {', '.join(SUFFIXES)}; a folder or a glob of them."


def kind_of(path: str) -> str:
    """text, jsonl, parquet or array_record, by the file's name.

    Raises:
      DataError: none of these.
    """
    kind = next((kind for suffix, kind in SUFFIXES.items() if path.lower().endswith(suffix)), None)
    if kind is None:
        raise DataError(f"{path}: this kind of file can't be read as data", _KINDS_REMEDY)
    return kind


def find_files(pattern: str, *, field: str) -> list[str]:
    """Files that a path, folder, glob, URL or dataset of the hub (hf:org/name[:split]) names, sorted by name.

    Args:
      field: the config field, for messages.

    Raises:
      DataError: there are none.
    """
    if pattern.startswith("hf:"):
        from jtrain.data.hub import hub_dataset_files

        return hub_dataset_files(pattern, field=field)
    file_system, path = _file_system(pattern, field)
    try:
        if any(mark in path for mark in "*?[") and not file_system.exists(path):
            found = [name for name in file_system.glob(path) if not file_system.isdir(name)]
        elif file_system.isdir(path):
            found = [name for name in file_system.find(path) if name.lower().endswith(tuple(SUFFIXES))]
        else:
            found = [path] if file_system.exists(path) else []
    except _failures(pattern) as error:
        raise DataError(f"{field}: {pattern} can't be listed: {_reason(error)}") from error
    if not found:
        raise DataError(f"{field}: {pattern} does not exist, or matches no file", _KINDS_REMEDY)
    return sorted(file_system.unstrip_protocol(name) if is_url(pattern) else str(name) for name in found)


def open_file(path: str, *, field: str = "data.train") -> BinaryIO:
    """Opens a file or URL for reading.

    Raises:
      DataError: it can't be.
    """
    file_system, name = _file_system(path, field)
    try:
        return file_system.open(name, "rb")
    except _failures(path) as error:
        raise DataError(f"{field}: {path} can't be read: {_reason(error)}", "Check the path and its rights.") from error


def read_bytes(path: str, *, field: str) -> bytes:
    """The whole content of a small file."""
    with open_file(path, field=field) as file:
        return file.read()


def exists(path: str) -> bool:
    file_system, name = _file_system(path, path)
    return bool(file_system.exists(name))


def is_dir(path: str) -> bool:
    file_system, name = _file_system(path, path)
    return bool(file_system.isdir(name))


def join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


def is_url(path: str) -> bool:
    return "://" in path


def stat(path: str) -> tuple[int, str]:
    """(size in bytes, a stamp that changes when the file is written again: time, or the store's tag)."""
    if not is_url(path):
        found = Path(path).stat()
        return found.st_size, str(found.st_mtime_ns)
    file_system, name = _file_system(path, "data.train")
    info = file_system.info(name)
    stamps = (info.get(key) for key in ("etag", "ETag", "md5Hash", "mtime", "updated", "created"))
    return int(info.get("size") or 0), str(next((stamp for stamp in stamps if stamp), ""))


def content_digest(path: str) -> str:
    """Hex digest of the content, read once from end to end."""
    digest = hashlib.blake2b(digest_size=16)
    with open_file(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _file_system(path: str, field: str) -> tuple[Any, str]:
    import fsspec

    try:
        return fsspec.core.url_to_fs(path)
    except ImportError as error:
        extra = {"gs": "'jtrain[gcs]'", "s3": "'jtrain[s3]'"}.get(path.partition("://")[0], "the package that it names")
        raise ConfigError(f"{field}: {path} can't be opened: {error}", f"pip install {extra}") from error
    except ValueError as error:
        raise DataError(f"{field}: {path} can't be opened: {error}") from error


def _failures(path: str) -> type[Exception]:
    """What opening can raise: stores have error classes of their own."""
    return Exception if is_url(path) else OSError


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
