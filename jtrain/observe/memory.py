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
