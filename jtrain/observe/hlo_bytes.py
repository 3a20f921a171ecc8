"""Bytes that the kernels of a compiled program read and write: an estimate of memory traffic.

A kernel (an instruction outside a fusion, or a whole fusion) reads its operands and writes its result once. One that
takes a slice of an operand, or writes into a part of one, touches that part alone: a scanned layer reads its own
weights, not the whole stack.
"""

from __future__ import annotations

from jtrain.observe.hlo_products import is_bookkeeping
from jtrain.observe.hlo_text import Computation, Instruction, Module, size_bytes

# Names for values, callers whose parts are counted, and ends of what was counted at its start.
_NO_TRAFFIC = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "after-all",
    "partition-id", "replica-id", "opt-barrier", "iota", "async-update",
)  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")


def kernel_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes read and written by one instruction that stands outside a fusion."""
    if instruction.opcode in _NO_TRAFFIC or instruction.opcode.endswith("-done") or is_bookkeeping(instruction):
        return 0
    if instruction.opcode == "fusion":
        return _fusion_bytes(module, computation, instruction)
    if instruction.opcode in _SLICES:
        return 2 * size_bytes(instruction.type)
    if instruction.opcode in ("dynamic-update-slice", "scatter"):
        return 2 * size_bytes(computation.type_of(_update(instruction)))
    read = sum(size_bytes(computation.type_of(name)) for name in instruction.operands)
    if instruction.opcode.endswith("-start"):
        # Its type is a tuple of operand, result and handles.
        return max(2 * read, size_bytes(instruction.type))
    return read + size_bytes(instruction.type)


def _fusion_bytes(module: Module, computation: Computation, fusion: Instruction) -> int:
    inner = module.computations[fusion.called("calls")[0]]
    total = 0
    for number, operand in enumerate(fusion.operands):
        parameter = inner.parameters.get(number)
        users = list(inner.users(parameter)) if parameter else []
        if users and all(_touches_a_part(user, parameter) for user in users):
            total += sum(size_bytes(user.type) for user in users if user.opcode in _SLICES)
        else:
            total += size_bytes(computation.type_of(operand))
    return total + _written(inner, inner.root)


def _touches_a_part(user: Instruction, parameter: str | None) -> bool:
    return user.opcode in (*_SLICES, "dynamic-update-slice") and user.operands[0] == parameter


def _written(inner: Computation, result: Instruction | None) -> int:
    if result is None:
        return 0
    if result.opcode == "tuple":
        return sum(_written(inner, inner.instructions.get(name)) for name in result.operands)
    if result.opcode == "bitcast":
        return _written(inner, inner.instructions.get(result.operands[0]))
    if result.opcode == "dynamic-update-slice":
        return size_bytes(inner.type_of(_update(result)))
    return size_bytes(result.type)


def _update(instruction: Instruction) -> str:
    return instruction.operands[1 if instruction.opcode == "dynamic-update-slice" else 2]
