"""Learning-rate schedules: update k (1..N) uses `schedule(k)`, a ratio of the peak.

Warm-up: k / w for k <= w, so that update w uses the peak. Then the decay; update N uses `min_ratio` exactly (constant
and rsqrt excepted: the one stays at 1, the other follows its law, not below `min_ratio`). k counts applied updates:
accumulation and skipped steps do not move it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Schedule = Callable[[jax.Array | int], jax.Array]


def make_schedule(
    name: str, *, peak: float, total: int, warmup: int = 0, min_ratio: float = 0.0, decay: int | None = None
) -> Schedule:
    """A schedule in steps.

    Args:
      name: constant | linear | cosine | wsd | rsqrt.
      peak: the learning rate at the end of the warm-up.
      total: N, the updates of the run.
      warmup: w, the updates of the warm-up.
      min_ratio: the last update's learning rate as a ratio of the peak.
      decay: wsd: updates of the linear decay at the end (Hu et al. 2024, MiniCPM).

    Returns:
      Function of the update's number k -> learning rate, float32 scalar (float64 under x64).
    """
    warmup = min(warmup, total)
    remaining = max(total - warmup, 1)

    def after_warmup(k: jax.Array) -> jax.Array:
        progress = jnp.clip((k - warmup) / remaining, 0.0, 1.0)
        if name == "constant":
            return jnp.ones_like(progress)
        if name == "linear":
            return 1.0 - (1.0 - min_ratio) * progress
        if name == "cosine":  # Loshchilov & Hutter 2017
            return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        if name == "wsd":
            length = max(min(decay if decay is not None else remaining, remaining), 1)
            return 1.0 - (1.0 - min_ratio) * jnp.clip((k - (total - length)) / length, 0.0, 1.0)
        if name == "rsqrt":  # Vaswani et al. 2017: falls as 1/sqrt(k) from the peak at the end of the warm-up
            return jnp.maximum(jnp.sqrt(max(warmup, 1) / jnp.maximum(k, max(warmup, 1))), min_ratio)
        raise ValueError(f"unknown schedule {name!r}")

    def schedule(k: jax.Array | int) -> jax.Array:
        k = jnp.asarray(k, dtype=jnp.result_type(float))
        ratio = after_warmup(k)
        if warmup:
            ratio = jnp.where(k <= warmup, k / warmup, ratio)
        return peak * ratio

    return schedule
