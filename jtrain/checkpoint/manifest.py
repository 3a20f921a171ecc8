"""The integrity manifest of a checkpoint: size and hash of every file, and of itself.

Orbax restores damaged array files without a word (every one of 240 random bit flips went unnoticed), so a step counts
only with a manifest, and is restored only when every file still has the hash written there. The hash is XXH3 (128
bits): it guards against faults of disks and networks, not against an attacker.

The file is JSON, and its first key is the hash of all bytes behind that line. So every bit of it is covered too.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.metadata
import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import xxhash
from etils import epath

from jtrain.checkpoint.files import is_local, write_atomic
from jtrain.checkpoint.layout import MANIFEST
from jtrain.errors import CheckpointError

FORMAT = 1
_CHUNK = 8 << 20
_HEAD = re.compile(rb'\{"digest": "([0-9a-f]{32})",\n')

FileRecord = tuple[int, str]
"""Size in bytes, XXH3-128 as hex."""
ArrayRecord = tuple[str, tuple[int, ...]]
"""dtype, shape."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose files are not what was written.

    Args:
      step: the step's folder name.
      file: the file, relative to that folder.
      reason: what is wrong with it.
    """

    def __init__(self, step: str, file: str, reason: str):
        super().__init__(
            f"checkpoint step {step} is damaged: {file}: {reason}",
            "resume from another step (checkpoint.resume: <step>), or start a new run",
        )
        self.step, self.file, self.reason = step, file, reason


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
      step: updates applied.
      files: name relative to the step's folder -> size and hash.
      arrays: path of an array in the state -> dtype and shape.
      metrics: evaluation metrics of that step; not finite is None.
      time: when the save was finished, in seconds since the epoch.
    """

    step: int
    files: Mapping[str, FileRecord]
    arrays: Mapping[str, ArrayRecord]
    metrics: Mapping[str, float | None]
    time: float

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.files.values())


def hash_file(path: epath.Path) -> FileRecord:
    """Size and hash, read in pieces."""
    digest, size, buffer = xxhash.xxh3_128(), 0, bytearray(_CHUNK)
    view = memoryview(buffer)
    with path.open("rb") as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            size += count
    return size, digest.hexdigest()


def hash_files(folder: epath.Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Size and hash of several files of a folder; read by threads, since hashing frees the interpreter."""
    names = list(names)
    with concurrent.futures.ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip(names, pool.map(lambda name: hash_file(folder / name), names), strict=True))


def write_manifest(folder: epath.Path, manifest: Manifest) -> None:
    """Writes the manifest; with it the step begins to exist."""
    metrics = {k: float(v) if v is not None and math.isfinite(v) else None for k, v in manifest.metrics.items()}
    content = {"format": FORMAT, "jtrain": _version(), **dataclasses.asdict(manifest), "metrics": metrics}
    body = json.dumps(content, sort_keys=True, allow_nan=False).encode()[1:]
    digest = xxhash.xxh3_128(body).hexdigest().encode()
    write_atomic(folder / MANIFEST, b'{"digest": "' + digest + b'",\n' + body)


def read_manifest(folder: epath.Path) -> Manifest:
    """Reads the manifest of a step.

    Raises:
      DamagedCheckpoint: it is missing or not what was written.
      CheckpointError: a newer jtrain wrote it.
    """
    try:
        data = (folder / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        raise DamagedCheckpoint(folder.name, MANIFEST, "missing: the save was not finished") from error
    return parse_manifest(folder.name, data)


def parse_manifest(step: str, data: bytes) -> Manifest:
    """Checks the bytes of a manifest against their own hash, and takes them apart; raises as `read_manifest`."""
    head = _HEAD.match(data)
    if head is None:
        raise DamagedCheckpoint(step, MANIFEST, "not a manifest")
    if xxhash.xxh3_128(data[head.end() :]).hexdigest().encode() != head.group(1):
        raise DamagedCheckpoint(step, MANIFEST, "hash differs")
    content: dict[str, Any] = json.loads(data)
    if content["format"] > FORMAT:
        raise CheckpointError(
            f"checkpoint step {step} has format {content['format']}, written by jtrain {content['jtrain']}; "
            f"this one reads up to format {FORMAT}",
            f"install jtrain {content['jtrain']} or newer",
        )
    return Manifest(
        step=content["step"],
        files={name: (size, digest) for name, (size, digest) in content["files"].items()},
        arrays={path: (dtype, tuple(shape)) for path, (dtype, shape) in content["arrays"].items()},
        metrics=content["metrics"],
        time=content["time"],
    )


def check_files(folder: epath.Path, manifest: Manifest, names: Sequence[str] | None = None) -> None:
    """Compares files (by default all) with the manifest. Files that it does not name are ignored.

    Raises:
      DamagedCheckpoint: a file is missing, was cut, or has another hash; or points out of the folder.
    """
    names = sorted(manifest.files) if names is None else names
    for name in names:
        path = folder / name
        check_inside(folder, name)
        try:
            size = path.stat().length
        except FileNotFoundError as error:
            raise DamagedCheckpoint(folder.name, name, "missing") from error
        if size != manifest.files[name][0]:
            raise DamagedCheckpoint(folder.name, name, f"{size} bytes instead of {manifest.files[name][0]}")
    for name, record in hash_files(folder, names).items():
        if record != manifest.files[name]:
            raise DamagedCheckpoint(folder.name, name, "hash differs")


def check_inside(folder: epath.Path, name: str) -> None:
    """Sees that a name of a manifest stays in the step's folder.

    Raises:
      DamagedCheckpoint: it leads out of it, by itself or by a link.
    """
    if name.startswith("/") or ".." in name.split("/") or _is_linked(folder, name):
        raise DamagedCheckpoint(folder.name, name, "points out of the checkpoint")


def _is_linked(folder: epath.Path, name: str) -> bool:
    """Whether the file, or a folder on the way to it, is a link: a save makes none."""
    parts = name.split("/")
    return is_local(folder) and any(os.path.islink(folder / "/".join(parts[:end])) for end in range(1, len(parts) + 1))


def new_manifest(
    step: int,
    files: Mapping[str, FileRecord],
    arrays: Mapping[str, ArrayRecord],
    metrics: Mapping[str, float] | None,
) -> Manifest:
    """A manifest of now."""
    return Manifest(step=step, files=dict(files), arrays=dict(arrays), metrics=dict(metrics or {}), time=time.time())


def _version() -> str:
    try:
        return importlib.metadata.version("jtrain")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
