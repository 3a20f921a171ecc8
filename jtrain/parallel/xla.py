"""Compiler options by platform: the one registry.

An unknown name in `XLA_FLAGS` aborts the process, so options go through `jit(compiler_options=...)`, where an unknown
one raises. Every row is compiled by a test on each supported jaxlib.
"""

from __future__ import annotations

from typing import Any

_OPTIONS: dict[str, dict[str, Any]] = {
    # Many CPU devices share few cores: a collective may wait long for its slowest member (default: abort after 40 s).
    "cpu": {"xla_cpu_collective_call_terminate_timeout_seconds": 1800},
    "gpu": {},
    "tpu": {},
}
_DETERMINISTIC: dict[str, dict[str, Any]] = {
    "gpu": {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0},
}


def compiler_options(platform: str, *, deterministic: bool = False) -> dict[str, Any]:
    """Options for `jax.jit(compiler_options=...)` on `platform` (`cpu`, `gpu`, `cuda`, `tpu`)."""
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    options = dict(_OPTIONS.get(platform, {}))
    if deterministic:
        options |= _DETERMINISTIC.get(platform, {})
    return options
