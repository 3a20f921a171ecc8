"""What the hardware can do at best: peak FLOP/s and memory by the name that JAX gives a device.

A row is one JAX *device*: a TPU v2, v3 and 7x chip holds two, every other chip one. FLOP/s are dense (no sparsity).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

TERA = 1e12
GIB = 2**30


@dataclass(frozen=True)
class DeviceSpec:
    """Peak figures of one device.

    Attributes:
      name: short name.
      flops: dtype name -> peak FLOP/s of dense matrix multiplication with operands of that type.
      memory_bytes: capacity of its memory.
      bandwidth: bytes/s between it and that memory.
      source: where the figures are published.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    memory_bytes: int
    bandwidth: float
    source: str

    def peak(self, dtype: str) -> float | None:
        """Peak FLOP/s for operands of `dtype` (`bfloat16`, `float16`, `float32`, `float8`); None if unknown."""
        return self.flops.get(dtype)


_CLOUD_TPU = "Cloud TPU documentation, 'System architecture'"


def _tpu(name: str, bf16_tera: float, gib: float, gb_per_s: float, fp8_tera: float | None = None) -> DeviceSpec:
    # A float32 product at precision "highest" is six bfloat16 passes (jax.lax.Precision): there is no unit for it.
    flops = {"bfloat16": bf16_tera * TERA, "float32": bf16_tera * TERA / 6}
    if fp8_tera is not None:
        flops["float8"] = fp8_tera * TERA
    return DeviceSpec(name, flops, int(gib * GIB), gb_per_s * 1e9, _CLOUD_TPU)


def _gpu(
    name: str, source: str, fp16: float, fp32: float, gb: float, gb_per_s: float, *, bf16: bool = True, fp8: float = 0
) -> DeviceSpec:
    flops = {"float16": fp16 * TERA, "float32": fp32 * TERA}
    if bf16:
        flops["bfloat16"] = fp16 * TERA
    if fp8:
        flops["float8"] = fp8 * TERA
    return DeviceSpec(name, flops, int(gb * 1e9), gb_per_s * 1e9, source)


# Pattern of jax.Device.device_kind -> spec. The first match counts, so the narrower pattern stands first.
DEVICES: tuple[tuple[str, DeviceSpec], ...] = (
    (r"TPU v2", _tpu("TPU v2", 23, 8, 350)),
    (r"TPU v3", _tpu("TPU v3", 61.5, 16, 450)),
    (r"TPU v4(?! lite)", _tpu("TPU v4", 275, 32, 1228)),
    (r"TPU v5 ?(lite|e)", _tpu("TPU v5e", 197, 16, 819)),
    (r"TPU v5p?$", _tpu("TPU v5p", 459, 95, 2765)),
    (r"TPU v6 ?(lite|e)", _tpu("TPU v6e", 918, 32, 1640, fp8_tera=918)),
    (r"TPU ?7x", _tpu("TPU 7x", 2307 / 2, 96, 7380 / 2, fp8_tera=4614 / 2)),
    (r"V100.*32GB", _gpu("V100 32GB", "NVIDIA V100 datasheet", 125, 15.7, 32, 900, bf16=False)),
    (r"V100", _gpu("V100", "NVIDIA V100 datasheet", 125, 15.7, 16, 900, bf16=False)),
    (r"\bT4\b", _gpu("T4", "NVIDIA T4 datasheet", 65, 8.1, 16, 320, bf16=False)),
    (r"A100.*80GB", _gpu("A100 80GB", "NVIDIA A100 datasheet", 312, 19.5, 80, 2039)),
    (r"A100", _gpu("A100", "NVIDIA A100 datasheet", 312, 19.5, 40, 1555)),
    (r"\bA10\b", _gpu("A10", "NVIDIA A10 datasheet", 125, 31.2, 24, 600)),
    (r"\bL4\b", _gpu("L4", "NVIDIA L4 datasheet", 121, 30.3, 24, 300, fp8=242.5)),
    (r"\bL40S\b", _gpu("L40S", "NVIDIA L40S datasheet", 362, 91.6, 48, 864, fp8=733)),
    (r"H100 NVL", _gpu("H100 NVL", "NVIDIA H100 datasheet", 835.5, 60, 94, 3900, fp8=1671)),
    (r"H100 PCIe", _gpu("H100 PCIe", "NVIDIA H100 datasheet", 756.5, 51, 80, 2000, fp8=1513)),
    (r"H100", _gpu("H100", "NVIDIA H100 datasheet", 989.5, 67, 80, 3350, fp8=1979)),
    (r"GH200", _gpu("GH200", "NVIDIA GH200 datasheet", 989.5, 67, 96, 4000, fp8=1979)),
    (r"H200 NVL", _gpu("H200 NVL", "NVIDIA H200 datasheet", 835.5, 60, 141, 4800, fp8=1671)),
    (r"H200", _gpu("H200", "NVIDIA H200 datasheet", 989.5, 67, 141, 4800, fp8=1979)),
    (r"GB200", _gpu("GB200", "NVIDIA GB200 NVL72 datasheet, a GPU's share", 2500, 80, 186, 8000, fp8=5000)),
    (r"B200", _gpu("B200", "NVIDIA HGX B200 datasheet, a GPU's share", 2250, 75, 180, 7700, fp8=4500)),
    (r"MI300X", _gpu("MI300X", "AMD Instinct MI300X datasheet", 1307.4, 163.4, 192, 5300, fp8=2614.9)),
)

# jtrain's precision -> dtype of the operands of its matrix products.
_OPERANDS = {
    "32-true": "float32", "bf16-mixed": "bfloat16", "bf16-true": "bfloat16", "16-mixed": "float16",
    "fp8-mixed": "float8",
}  # fmt: skip


def device_spec(kind: str) -> DeviceSpec | None:
    """The spec of a device by `jax.Device.device_kind`; None when it isn't in the table (CPU)."""
    for pattern, spec in DEVICES:
        if re.search(pattern, kind, re.IGNORECASE):
            return spec
    return None


def peak_flops(kind: str, precision: str) -> float | None:
    """Peak FLOP/s of one device for a config's `precision`; None when unknown (then MFU is unknown, too)."""
    spec = device_spec(kind)
    return None if spec is None else spec.peak(_OPERANDS.get(precision, ""))
