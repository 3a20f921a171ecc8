"""The program of one device as the partitioner leaves it: every collective apart, in its own type.

What XLA:CPU compiles is no picture of an accelerator's program: it has no reduce-scatter, turns bfloat16 collectives
into float32 ones and merges all-reduces. The text after the pass `spmd-partitioning` shows what TPU and GPU start from.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

_PASS = "spmd-partitioning"


def compile_and_partition(lowered: Any, compiler_options: dict[str, Any] | None = None) -> tuple[Any, str]:
    """Compiles, and returns the compiled program and the HLO text to read its collectives from.

    Args:
      lowered: `jitted.lower(*arguments)` (or `.trace().lower()`).
      compiler_options: over those of the jitted function.

    Returns:
      (`jax.stages.Compiled`, text for `jtrain.observe.hlo.analyze`): on CPU devices the partitioned program, on others,
      and where nothing is partitioned, the compiled one.
    """
    with tempfile.TemporaryDirectory(prefix="jtrain-hlo-") as folder, _no_cache():
        dump = {
            "xla_dump_to": folder,
            "xla_dump_hlo_pass_re": _PASS,
            "xla_dump_hlo_as_text": True,
            "xla_dump_large_constants": True,  # the tables of offsets by device
        }
        compiled = lowered.compile(compiler_options=(compiler_options or {}) | dump)
        if not _on_cpu(compiled):
            return compiled, compiled.as_text()
        found = sorted(Path(folder).glob(f"*after_{_PASS}*"))
        return compiled, found[-1].read_text() if found else compiled.as_text()


def _on_cpu(compiled: Any) -> bool:
    places = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return all(device.platform == "cpu" for place in places for device in place.device_set)


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
    """Compiles for sure: a program out of the persistent cache would write no text."""
    before = jax.config.jax_enable_compilation_cache
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
