"""Where things stand below RUN/checkpoints.

```
checkpoints/<step>/state/          arrays (Orbax, OCDBT)
checkpoints/<step>/meta/metadata   counters and the callbacks' state (JSON)
checkpoints/<step>/manifest.json   size and hash of every other file; written last
checkpoints/_quarantine/<step>     damaged steps, kept to be looked at
checkpoints/_superseded/<step>     steps that lay ahead of the one that a run went back to
checkpoints/_trash/                steps on their way out
```

A step without a manifest does not exist: its save was not finished.
"""

from __future__ import annotations

import importlib.util
import os

from etils import epath

from jtrain.errors import ConfigError

MANIFEST = "manifest.json"
META = "meta/metadata"
QUARANTINE = "_quarantine"
SUPERSEDED = "_superseded"
TRASH = "_trash"
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
    return epath.Path(text if "://" in text else os.path.abspath(os.path.expanduser(text)))


def check_name(run_dir: epath.Path) -> None:
    """Sees that Orbax can save below this path: it looks for its files with `glob`, and takes the path as a pattern.

    With `[` it finds none, and leaves a checkpoint without arrays; with `*` it may find those of another run.

    Raises:
      ConfigError: the path holds such a character.
    """
    found = next((character for character in "*?[" if character in os.fspath(run_dir)), None)
    if found is not None:
        raise ConfigError(
            f"run_dir={os.fspath(run_dir)!r} holds {found!r}: Orbax takes it as a pattern and can't save there",
            "give a run_dir whose path has none of * ? [",
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
    """What Orbax left behind of saves that were cut off."""
    return [entry for entry in _entries(root) if _TEMPORARY in entry.name]


def unused_path(folder: epath.Path, name: str) -> epath.Path:
    """`folder/name`, or with a number behind it when that is taken."""
    path, number = folder / name, 1
    while path.exists():
        path, number = folder / f"{name}.{number}", number + 1
    return path


def _steps(root: epath.Path) -> list[epath.Path]:
    return [entry for entry in _entries(root) if entry.name.isascii() and entry.name.isdigit() and entry.is_dir()]


def _entries(root: epath.Path) -> list[epath.Path]:
    try:
        return list(root.iterdir())
    except FileNotFoundError:
        return []
