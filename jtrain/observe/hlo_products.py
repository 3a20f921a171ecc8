"""FLOPs of the matrix products and convolutions of HLO: two for each multiply-add."""

from __future__ import annotations

import math
import re

import numpy as np

from jtrain.observe.hlo_text import Computation, Instruction, dimensions

# Custom calls by which a compiler talks to itself: they compute nothing.
_BOOKKEEPING = (
    "AllocateBuffer", "AsyncCollectiveStart", "AsyncCollectiveDone", "ConcatBitcast", "Sharding", "MoveToHost",
    "MoveToDevice", "annotate_device_placement",
)  # fmt: skip
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CUBLAS_CONTRACTING = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


def custom_call_target(instruction: Instruction) -> str:
    """What a custom call calls, e.g. `__cublas$gemm`, `tpu_custom_call`."""
    match = _TARGET.search(instruction.attributes)
    return match[1] if match else ""


def is_bookkeeping(instruction: Instruction) -> bool:
    """Whether it is a custom call that neither computes nor moves anything."""
    return instruction.opcode == "custom-call" and custom_call_target(instruction) in _BOOKKEEPING


def product_flops(computation: Computation, instruction: Instruction) -> int:
    """FLOPs of a `dot`, a `convolution` or a cuBLAS call; 0 for everything else."""
    if instruction.opcode == "dot":
        return _dot(computation, instruction, instruction.numbers("lhs_contracting_dims"))
    if instruction.opcode == "convolution":
        return _convolution(computation, instruction)
    if instruction.opcode == "custom-call" and custom_call_target(instruction).startswith("__cublas$"):
        contracting = _CUBLAS_CONTRACTING.search(instruction.attributes)
        return _dot(
            computation, instruction, tuple(map(int, re.findall(r"\d+", contracting[1] if contracting else "")))
        )
    return 0


def _dot(computation: Computation, instruction: Instruction, contracting: tuple[int, ...]) -> int:
    left = dimensions(computation.type_of(instruction.operands[0]))
    return 2 * math.prod(dimensions(instruction.type)) * math.prod(left[dim] for dim in contracting)


def _convolution(computation: Computation, instruction: Instruction) -> int:
    """2 · batch · output features · input features of a group · pairs (output place, kernel place) inside the input."""
    labels = _LABELS.search(instruction.attributes)
    if labels is None:
        return 0
    left = dimensions(computation.type_of(instruction.operands[0]))
    kernel = dimensions(computation.type_of(instruction.operands[1]))
    out = dimensions(instruction.type)
    window = _WINDOW.search(instruction.attributes)
    sizes = dict(re.findall(r"(\w+)=([\dx_\-]+)", window[1] if window else ""))
    spatial = len(sizes["size"].split("x")) if "size" in sizes else 0

    def along(name: str, default: str, dim: int) -> str:
        return sizes.get(name, "x".join([default] * spatial)).split("x")[dim]

    places = 1
    for dim in range(spatial):
        places *= _pairs(
            inputs=left[labels[1].index(str(dim))],
            outputs=out[labels[3].index(str(dim))],
            kernel=int(along("size", "1", dim)),
            stride=int(along("stride", "1", dim)),
            padding=int(along("pad", "0_0", dim).split("_")[0]),
            input_dilation=int(along("lhs_dilate", "1", dim)),
            kernel_dilation=int(along("rhs_dilate", "1", dim)),
        )
    batch_and_features = out[labels[3].index("b")] * out[labels[3].index("f")]
    return 2 * batch_and_features * kernel[labels[2].index("i")] * places


def _pairs(
    *, inputs: int, outputs: int, kernel: int, stride: int, padding: int, input_dilation: int, kernel_dilation: int
) -> int:
    """Pairs (output, kernel) that meet an element of the input: neither its padding nor the holes of its dilation."""
    starts = np.arange(outputs, dtype=np.int64) * stride - padding
    last = (inputs - 1) * input_dilation
    count = 0
    for place in range(kernel):
        position = starts + place * kernel_dilation
        count += int(np.count_nonzero((position >= 0) & (position <= last) & (position % input_dilation == 0)))
    return count
