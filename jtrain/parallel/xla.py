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


_RUN_ONCE: dict[str, dict[str, Any]] = {
    # LLVM's full optimisation of the random-number kernels costs seconds; the bits are the same.
    "cpu": {"xla_backend_optimization_level": 1},
}


def compiler_options(platform: str, *, deterministic: bool = False, run_once: bool = False) -> dict[str, Any]:
    """Options for `jax.jit(compiler_options=...)`.

    Args:
      platform: of the devices: `cpu`, `gpu`, `cuda`, `tpu`.
      deterministic: the same bits on every run (GPU).
      run_once: for a program that runs once, where compiling is most of the time.
    """
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    options = dict(_OPTIONS.get(platform, {}))
    if run_once:
        options |= _RUN_ONCE.get(platform, {})
    if deterministic:
        options |= _DETERMINISTIC.get(platform, {})
    return options
