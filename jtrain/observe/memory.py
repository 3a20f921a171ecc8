"""Device memory in use, where the backend tells."""

from __future__ import annotations

from collections.abc import Iterable

import jax

GIB = 2**30


def peak_memory_gib(devices: Iterable[jax.Device] | None = None) -> float | None:
    """The largest peak of memory in use since the start, over this process's devices, in GiB.

    Args:
      devices: the devices to ask; by default all local ones.

    Returns:
      None where the backend keeps no statistics (CPU).
    """
    peaks = []
    for device in jax.local_devices() if devices is None else devices:
        stats = device.memory_stats() or {}
        peak = stats.get("peak_bytes_in_use", stats.get("bytes_in_use"))
        if peak is not None:
            peaks.append(peak / GIB)
    return max(peaks, default=None)


def device_memory() -> tuple[int, int] | None:
    """Bytes in use and bytes left, of the fullest of this process's devices; None where the backend does not tell."""
    found = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "bytes_in_use" in stats and "bytes_limit" in stats:
            found.append((stats["bytes_in_use"], stats["bytes_limit"] - stats["bytes_in_use"]))
    return min(found, key=lambda pair: pair[1], default=None)
