"""Memory of the host: what this process has taken, and what is left."""

from __future__ import annotations

import contextlib
from pathlib import Path


def host_memory() -> tuple[int, int] | None:
    """Bytes that this process has allocated on the host, and bytes that it may still take; None: not told (macOS).

    Pages of files that it has mapped are not counted: the kernel takes them back when it needs them.
    """
    try:
        status = Path("/proc/self/status").read_text()
        return sum(_bytes(status, name) for name in ("RssAnon:", "RssShmem:")), available_memory()
    except (OSError, IndexError, ValueError):
        return None


def available_memory() -> int:
    """Bytes that can still be used, by the kernel's estimate and the limits of the control group.

    Raises:
      OSError: the system does not tell.
    """
    room = _bytes(Path("/proc/meminfo").read_text(), "MemAvailable:")
    base = Path("/sys/fs/cgroup")
    for limit, used, stat, cache in (
        ("memory.max", "memory.current", "memory.stat", "\ninactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError, IndexError):
            cached = int((base / stat).read_text().partition(cache)[2].split()[0])  # given back when it is needed
            room = min(room, int((base / limit).read_text()) - int((base / used).read_text()) + cached)
    return max(room, 0)


def _bytes(text: str, name: str) -> int:
    """A figure of a file below /proc, which are in kB."""
    return 1024 * int(text.partition(name)[2].split()[0])
