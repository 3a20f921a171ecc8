"""Compiler options by platform: the one registry.

An unknown name in `XLA_FLAGS` aborts the process, so options go through `jit(compiler_options=...)`, where an unknown
one raises. Rows say which jaxlibs have an option; on GPU and TPU the compiler is asked as well, and what it does not
know is left out. Every row is compiled by a test on each supported jaxlib, for TPU and GPU where their compilers are
installed (no device is needed).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jaxlib
from jax.sharding import SingleDeviceSharding

from jtrain.config.names import nearest
from jtrain.errors import ConfigError

log = logging.getLogger(__name__)

Value = bool | int | float | str
Purpose = Literal["always", "overlap", "deterministic", "run_once", "slices"]


class Option(NamedTuple):
    """One compiler option.

    Attributes:
      platform: cpu, gpu or tpu.
      purpose: when it is given. overlap: collectives that run while something is computed; slices: the same on a mesh
        of several slices; run_once: for programs where compiling is most of the time.
      name: without dashes.
      value: what it is set to.
      why: what it does, and who says so.
      until: the last jaxlib (major, minor) that has it; None: it is still there.
    """

    platform: str
    purpose: Purpose
    name: str
    value: Value
    why: str
    until: tuple[int, int] | None = None


_MAXTEXT = "MaxText, benchmarks/xla_flags_library.py"
_GPU_TIPS = "JAX documentation, GPU performance tips"

REGISTRY = (
    Option("cpu", "always", "xla_cpu_collective_call_terminate_timeout_seconds", 1800,
           "many devices share few cores: a collective may wait long for its slowest (default: abort after 40 s)"),
    Option("cpu", "run_once", "xla_backend_optimization_level", 1,
           "LLVM's full optimisation of the random-number kernels costs seconds; the bits are the same"),
    Option("gpu", "deterministic", "xla_gpu_deterministic_ops", True, "the same bits on every run (XLA, xla.proto)"),
    Option("gpu", "deterministic", "xla_gpu_autotune_level", 0, "no kernel is chosen by measuring (XLA, xla.proto)"),
    Option("gpu", "overlap", "xla_gpu_enable_latency_hiding_scheduler", True,
           f"starts collectives early and waits for them late ({_GPU_TIPS})"),
    Option("gpu", "overlap", "xla_gpu_enable_highest_priority_async_stream", True,
           f"collectives are not queued behind products ({_GPU_TIPS})"),
    Option("gpu", "overlap", "xla_gpu_enable_while_loop_double_buffering", True,
           f"the next layer's weights are gathered while this one computes ({_GPU_TIPS})"),
    Option("gpu", "overlap", "xla_gpu_enable_pipelined_all_gather", True,
           f"gathers move into the iteration before ({_GPU_TIPS})", until=(0, 10)),
    Option("gpu", "overlap", "xla_gpu_enable_pipelined_reduce_scatter", True,
           f"gradients are scattered in the iteration after ({_GPU_TIPS})", until=(0, 10)),
    Option("gpu", "overlap", "xla_gpu_enable_pipelined_all_reduce", True,
           f"the same for all-reduces ({_GPU_TIPS})", until=(0, 10)),
    Option("gpu", "overlap", "xla_gpu_all_gather_combine_threshold_bytes", 134217728,
           f"small gathers travel together, up to 128 MiB ({_GPU_TIPS})"),
    Option("gpu", "overlap", "xla_gpu_reduce_scatter_combine_threshold_bytes", 67108864, f"up to 64 MiB ({_GPU_TIPS})"),
    Option("gpu", "overlap", "xla_gpu_all_reduce_combine_threshold_bytes", 134217728, f"up to 128 MiB ({_GPU_TIPS})"),
    Option("gpu", "overlap", "xla_gpu_multi_streamed_windowed_einsum", True,
           "a collective matmul's pieces run on streams of their own (XLA, xla.proto; Wang et al. 2023)"),
    # libtpu takes strings.
    Option("tpu", "overlap", "xla_tpu_enable_async_collective_fusion", "true",
           f"collectives start in one fusion and end in a later one ({_MAXTEXT})"),
    Option("tpu", "overlap", "xla_tpu_enable_async_collective_fusion_fuse_all_gather", "true",
           f"gathers, too ({_MAXTEXT})"),
    Option("tpu", "overlap", "xla_tpu_enable_async_collective_fusion_multiple_steps", "true",
           f"over several fusions ({_MAXTEXT})"),
    Option("tpu", "overlap", "xla_tpu_overlap_compute_collective_tc", "true",
           f"products run while a collective does ({_MAXTEXT})"),
    Option("tpu", "overlap", "xla_enable_async_all_gather", "true", f"gathers do not block ({_MAXTEXT})"),
    Option("tpu", "overlap", "xla_enable_async_collective_permute", "true",
           f"neither do permutations: rings and windowed products ({_MAXTEXT})"),
    Option("tpu", "overlap", "xla_tpu_enable_windowed_einsum_for_all_gather", "true",
           "collective matmul: a product begins with the pieces that are there (libtpu; Wang et al. 2023)"),
    Option("tpu", "overlap", "xla_tpu_enable_windowed_einsum_for_reduce_scatter", "true", "the same for its sums"),
    Option("tpu", "slices", "xla_tpu_enable_data_parallel_all_reduce_opt", "true",
           f"gradients cross the slow network while the backward pass runs ({_MAXTEXT})"),
    Option("tpu", "slices", "xla_tpu_data_parallel_opt_different_sized_ops", "true",
           f"of layers of different sizes, too ({_MAXTEXT})"),
)  # fmt: skip


def compiler_options(
    platform: str,
    *,
    overlap: bool = False,
    slices: bool = False,
    deterministic: bool = False,
    run_once: bool = False,
) -> dict[str, Value]:
    """Options for `jax.jit(compiler_options=...)`, as far as this jaxlib has them.

    Args:
      platform: of the devices: `cpu`, `gpu`, `cuda`, `tpu`.
      overlap: collectives run while something is computed.
      slices: the mesh spans slices (with `overlap`).
      deterministic: the same bits on every run (GPU).
      run_once: for a program that runs once, where compiling is most of the time.
    """
    purposes: dict[Purpose, bool] = {
        "always": True,
        "overlap": overlap,
        "slices": overlap and slices,
        "deterministic": deterministic,
        "run_once": run_once,
    }
    platform = _family(platform)
    return {
        row.name: row.value
        for row in REGISTRY
        if row.platform == platform and purposes[row.purpose] and (row.until is None or _version() <= row.until)
    }


def options_of_run(
    device: jax.Device,
    given: Mapping[str, Value],
    *,
    overlap: bool = True,
    slices: bool = False,
    deterministic: bool = False,
) -> dict[str, Value]:
    """The registry's options for a device's compiler, and under the same names the user's.

    Raises:
      ConfigError: the compiler refuses one of the user's.
    """
    chosen = _accepted(
        device, compiler_options(device.platform, overlap=overlap, slices=slices, deterministic=deterministic)
    )
    for name, value in given.items():
        said = refusal(device, ((name, _spelled(device, value)),))
        if said is not None:
            meant = nearest(name, [row.name for row in REGISTRY if row.platform == _family(device.platform)])
            raise ConfigError(
                f"xla_options.{name}: {value!r} is refused by the compiler for {device.platform}: {said}",
                f"did you mean {meant}?" if meant else "see the options of your jaxlib, or leave it out",
            )
    return chosen | {name: _spelled(device, value) for name, value in given.items()}


def _accepted(device: jax.Device, options: dict[str, Value]) -> dict[str, Value]:
    """Those that the compiler knows: libtpu and GPU plugins may be of other releases than the rows were tested on."""
    if device.platform == "cpu" or not options or refusal(device, tuple(options.items())) is None:
        return options
    kept = {}
    for name, value in options.items():
        if (said := refusal(device, ((name, value),))) is None:
            kept[name] = value
        else:
            log.warning("compiler option %s is left out: %s", name, said)
    return kept


@functools.cache
def refusal(device: jax.Device, options: tuple[tuple[str, Value], ...]) -> str | None:
    """What the compiler says against options, asked with a program of one addition; None: nothing."""
    number = jax.ShapeDtypeStruct((), "float32", sharding=SingleDeviceSharding(device))
    platform = "cuda" if device.platform == "gpu" else device.platform
    lowered = jax.jit(lambda x: x + 1).trace(number).lower(lowering_platforms=(platform,))
    try:
        lowered.compile(compiler_options=dict(options))
    except Exception as error:  # JaxRuntimeError, or TypeError where the value is of another type
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


def _spelled(device: jax.Device, value: Value) -> Value:
    """libtpu takes strings; the others take what the option is."""
    if device.platform != "tpu" or isinstance(value, str):
        return value
    return str(value).lower()


def _family(platform: str) -> str:
    return "gpu" if platform in ("cuda", "rocm") else platform


def _version() -> tuple[int, int]:
    major, minor = jaxlib.__version__.split(".")[:2]
    return int(major), int(minor)
