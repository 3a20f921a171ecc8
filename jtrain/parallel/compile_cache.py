"""Where compiled programs are kept, and whether nobody else can write there: what they hold is run."""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from jtrain.errors import ConfigError


class CacheFolder(NamedTuple):
    """The folder (or URL), and the field or variable that names it."""

    path: str
    field: str


def find_cache(setting: str) -> CacheFolder | None:
    """The folder that `compile_cache` means: made where it is absent, private; None where there is to be none.

    Raises:
      ConfigError: another user owns it, or can write there.
      OSError: it can't be made.
    """
    if not setting:
        return None
    field, path = "compile_cache", setting
    if setting == "auto" and (path := os.environ.get("JAX_COMPILATION_CACHE_DIR", "")):
        field = "JAX_COMPILATION_CACHE_DIR"
    if not path:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        path = os.path.join(base, "jtrain", "xla")
    if "://" in path:  # who may write to a bucket can't be seen from here
        return CacheFolder(path, field)
    os.makedirs(path, exist_ok=True, mode=0o700)
    state = os.stat(path)
    if state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o022:
        raise ConfigError(
            f"{field}={path!r} belongs to, or can be written by, another user",
            f"chmod 700 {path}, or give another folder: it holds native code that this program runs",
        )
    return CacheFolder(path, field)
