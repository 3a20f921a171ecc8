"""Precision policies: which dtype parameters are stored in, which one a step computes in, and fp16's loss scale."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.errors import ConfigError
from jtrain.ops.fp8 import Mode, has_fp8

_INITIAL_SCALE = 2.0**15  # as torch.amp.GradScaler's order of magnitude (2**16); halved at once when it is too large
_GROWTH_INTERVAL = 2000  # torch.amp.GradScaler
_MAX_SCALE = 2.0**24


@dataclasses.dataclass(frozen=True)
class Precision:
    """A named policy.

    Attributes:
      name: the config's word.
      parameter_dtype: dtype that parameters (and what mirrors them in the optimizer) are stored in.
      compute_dtype: dtype that the step casts parameters to before the model sees them.
      matmul: `jax.default_matmul_precision` while the step is traced; None leaves the platform's.
      loss_scaling: whether a dynamic loss scale is kept (fp16).
      fp8: how projections multiply in 8 bits (`jtrain.ops.fp8`); None: in the compute type, as everything else.
    """

    name: str
    parameter_dtype: Any
    compute_dtype: Any
    matmul: str | None = None
    loss_scaling: bool = False
    fp8: Mode | None = None

    def __str__(self) -> str:
        """What runs in which type, in a few words."""
        if self.fp8 is None:
            return self.name
        how = "" if self.fp8 == "native" else " (emulated)"
        return (
            f"{self.name}: projections in e4m3, their gradients in e5m2{how}; all else in {self.compute_dtype.__name__}"
        )

    def cast(self, tree: Any) -> Any:
        """Floating-point leaves in the compute dtype; everything else untouched."""
        return _cast(tree, self.compute_dtype)

    def store(self, tree: Any) -> Any:
        """Floating-point leaves in the parameter dtype."""
        return _cast(tree, self.parameter_dtype)


_POLICIES = {
    "32-true": Precision("32-true", jnp.float32, jnp.float32, matmul="highest"),
    "bf16-mixed": Precision("bf16-mixed", jnp.float32, jnp.bfloat16),
    "bf16-true": Precision("bf16-true", jnp.bfloat16, jnp.bfloat16),
    "16-mixed": Precision("16-mixed", jnp.float32, jnp.float16, loss_scaling=True),
    "fp8-mixed": Precision("fp8-mixed", jnp.float32, jnp.bfloat16, fp8="native"),
    "64-true": Precision("64-true", jnp.float64, jnp.float64, matmul="highest"),
}
_NO_BFLOAT16 = ("V100", "T4", "P100")  # compute capability below 8.0: bfloat16 is emulated


def precision_policy(name: str, device: jax.Device | None = None, fp8: Mode = "native") -> Precision:
    """The policy of that name; `auto` chooses by device.

    auto: bf16-mixed on TPUs and on GPUs that compute in bfloat16, 16-mixed on older GPUs, 32-true on CPUs.

    Args:
      name: the config's word.
      device: of the run.
      fp8: of fp8-mixed: products of the device itself, or the same numbers by other means.

    Raises:
      ConfigError: fp8-mixed on a device that does not multiply 8-bit floats, without `fp8: emulate`.
    """
    if name == "auto":
        platform = device.platform if device else "cpu"
        old = device is not None and any(word in device.device_kind for word in _NO_BFLOAT16)
        name = "32-true" if platform == "cpu" else "16-mixed" if old else "bf16-mixed"
    policy = _POLICIES[name]
    if policy.fp8 is None:
        return policy
    if fp8 == "native" and device is not None and not has_fp8(device):
        raise ConfigError(
            f"precision: fp8-mixed on {device.device_kind}, which has no products of 8-bit floats "
            "(NVIDIA GPUs have them from L4, L40S and H100 on)",
            "write precision: bf16-mixed, or fp8: emulate for the numbers without the speed",
        )
    return dataclasses.replace(policy, fp8=fp8)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """Dynamic loss scale (Micikevicius et al. 2018): halved on overflow, doubled after a run of good steps.

    Attributes:
      scale: float32 scalar, a power of two.
      good_steps: int32 scalar, steps since the scale last changed.
    """

    scale: jax.Array
    good_steps: jax.Array

    @classmethod
    def create(cls) -> LossScale:
        return cls(jnp.float32(_INITIAL_SCALE), jnp.int32(0))

    def update(self, finite: jax.Array) -> LossScale:
        """The scale after a step whose gradients were finite, or not."""
        grow = finite & (self.good_steps + 1 >= _GROWTH_INTERVAL)
        grown = jnp.minimum(self.scale * 2.0, _MAX_SCALE)
        shrunk = jnp.maximum(self.scale * 0.5, 1.0)
        scale = jnp.where(finite, jnp.where(grow, grown, self.scale), shrunk)
        good_steps = jnp.where(finite & ~grow, self.good_steps + 1, 0)
        return LossScale(scale, good_steps)


def _cast(tree: Any, dtype: Any) -> Any:
    def one(leaf: Any) -> Any:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(one, tree)
