"""Where things stand below RUN/checkpoints.

```
checkpoints/<step>/state/          arrays (Orbax, OCDBT)
checkpoints/<step>/meta/metadata   counters and the callbacks' state (JSON)
checkpoints/<step>/manifest.json   size and hash of every other file; written last
checkpoints/_quarantine/<step>     damaged steps, kept to be looked at
checkpoints/_superseded/<step>     steps that lay ahead of the one that a run went back to
checkpoints/_fetched/              a step on its way back from the second place
checkpoints/_trash/                steps on their way out
checkpoints/_saving.<token>/<step> a step on its way in, on a file system; renamed when it has its manifest
```

A step without a manifest does not exist: its save was not finished.
"""

from __future__ import annotations

import importlib.util
import os

from etils import epath

from jtrain.checkpoint.files import MANIFEST, is_local
from jtrain.errors import ConfigError

META = "meta/metadata"
QUARANTINE = "_quarantine"
SUPERSEDED = "_superseded"
TRASH = "_trash"
FETCHED = "_fetched"
IDENTITY = ".run.json"
SAVING = "_saving."
_TEMPORARY = ".orbax-checkpoint-tmp"
_STORES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
"""Scheme of a URL -> the package that opens it, and the extra that brings it."""


def run_path(run_dir: epath.PathLike) -> epath.Path:
    """The run directory as an absolute path (Orbax wants one), or the URL that it is.

    Raises:
      ConfigError: the package that opens such URLs is not installed.
    """
    text = os.fspath(run_dir)
    package, extra = _STORES.get(text.partition("://")[0], ("", "")) if "://" in text else ("", "")
    if package and importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{text} can't be opened: the package {package} is not installed", f"pip install 'jtrain[{extra}]'"
        )
    if "://" not in text:
        return epath.Path(os.path.abspath(os.path.expanduser(text)))
    _list_afresh()
    return epath.Path(text)


def _list_afresh() -> None:
    """What other processes and TensorStore wrote into a store has to be seen: fsspec would answer from its memory."""
    import fsspec

    for name in ("gcs", "gs", "s3"):
        fsspec.config.conf.setdefault(name, {}).setdefault("use_listings_cache", False)


def check_name(run_dir: epath.Path) -> None:
    """Sees that Orbax can save below this path: it looks for its files with `glob`, and takes the path as a pattern.

    With `[` it finds none, and leaves a checkpoint without arrays; with `*` it may find those of another run. Of stores
    it knows gs:// alone.

    Raises:
      ConfigError: the path holds such a character, or is in another store.
    """
    check_store(run_dir)
    found = next((character for character in "*?[" if character in os.fspath(run_dir)), None)
    if found is not None:
        raise ConfigError(
            f"run_dir={os.fspath(run_dir)!r} holds {found!r}: Orbax takes it as a pattern and can't save there",
            "give a run_dir whose path has none of * ? [",
        )


def check_store(path: epath.Path, *, reads: bool = False) -> None:
    """Sees that Orbax can write there, or read.

    Raises:
      ConfigError: it can't.
    """
    text = os.fspath(path)
    if "://" in text and not text.startswith("gs://"):
        copied = f"give a folder as run_dir, and write checkpoint.backup: {text} to have its checkpoints copied there"
        raise ConfigError(
            f"{text}: Orbax reads and writes checkpoints in folders and at gs:// only",
            "copy it into a folder first, and give that" if reads else copied,
        )


def checkpoints_root(run_dir: epath.PathLike) -> epath.Path:
    """RUN/checkpoints."""
    return epath.Path(run_dir) / "checkpoints"


def finished_steps(root: epath.Path) -> list[int]:
    """Steps that have a manifest, in order. Says nothing of whether they are intact."""
    return sorted(int(entry.name) for entry in _steps(root) if (entry / MANIFEST).exists())


def unfinished_steps(root: epath.Path) -> list[epath.Path]:
    """Folders that Orbax committed, but whose manifest was never written."""
    return [entry for entry in _steps(root) if not (entry / MANIFEST).exists()]


def temporaries(root: epath.Path) -> list[epath.Path]:
    """What saves that were cut off have left behind."""
    return [entry for entry in _entries(root) if _TEMPORARY in entry.name or entry.name.startswith(SAVING)]


def saving_path(root: epath.Path, step: int, token: int) -> epath.Path:
    """Where a step is written, by the holder of that token.

    On a file system it gets its name when it is whole, and the folder is the holder's own: one that was taken over and
    wakes up writes into none of its successor's. A store has no renames: there the manifest alone makes the step.
    """
    return root / f"{SAVING}{token}" / str(step) if is_local(root) else root / str(step)


def unused_path(folder: epath.Path, name: str) -> epath.Path:
    """`folder/name`, or with a number behind it when that is taken."""
    path, number = folder / name, 1
    while path.exists():
        path, number = folder / f"{name}.{number}", number + 1
    return path


def any_step(root: epath.Path) -> bool:
    """Whether there is a folder that looks like a step, finished or not."""
    return bool(_steps(root))


def _steps(root: epath.Path) -> list[epath.Path]:
    """Folders whose names are numbers. A link is none: what it leads to was not saved here."""
    return [entry for entry in _entries(root) if _is_number(entry.name) and entry.is_dir() and not _is_link(entry)]


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit() and str(int(name)) == name


def _is_link(entry: epath.Path) -> bool:
    return "://" not in os.fspath(entry) and os.path.islink(entry)


def _entries(root: epath.Path) -> list[epath.Path]:
    try:
        return list(root.iterdir())
    except FileNotFoundError:
        return []
