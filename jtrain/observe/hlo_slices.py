"""Whether an all-reduce is a reduce-scatter: every device of a group keeps a part of its own.

XLA's partitioner writes a sum of which each device needs a part as an all-reduce and a dynamic-slice at an offset that
depends on the device. TPU and GPU compilers make one reduce-scatter of the two; XLA:CPU has none and leaves them.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence

from jtrain.observe.hlo_text import Computation, Instruction, dimensions

# What may stand between the two: the compilers look through a change of layout, not through arithmetic.
_LAYOUT = ("copy", "bitcast", "transpose", "reshape", "opt-barrier", "all-reduce-done")
_SAME_VALUE = ("copy", "bitcast", "reshape", "convert", "opt-barrier")
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.floordiv,
    "remainder": operator.mod,
    "minimum": min,
    "maximum": max,
}


def is_scattered(computation: Computation, value: str, size: int, group: Sequence[int]) -> bool:
    """Whether every device of `group` keeps but its own part of `value`, and nothing else uses it.

    Args:
      computation: where the all-reduce stands.
      value: its name, or that of an element of its tuple.
      size: elements of the value.
      group: devices that take part together.
    """
    ends = list(_ends(computation, value))
    return bool(ends) and all(
        end.opcode == "dynamic-slice"
        and math.prod(dimensions(end.type)) * len(group) <= size
        and _differs(computation, end, group)
        for end in ends
    )


def _ends(computation: Computation, name: str) -> Iterator[Instruction]:
    """Users of a value, changes of its layout looked through; the result of the computation is a user, too."""
    users = list(computation.users(name))
    if computation.root is not None and computation.root.name == name:
        yield computation.root
    for user in users:
        if user.opcode in _LAYOUT:
            yield from _ends(computation, user.name)
        elif user.opcode == "dynamic-slice" and user.operands[0] != name:
            continue  # as an offset
        else:
            yield user


def _differs(computation: Computation, part: Instruction, group: Sequence[int]) -> bool:
    """Whether a slice lies elsewhere on every device of the group; taken as true where its offsets can't be told."""
    offsets = [tuple(_on_device(computation, name, device) for name in part.operands[1:]) for device in group]
    if any(all(offset is None for offset in place) for place in offsets):
        return True
    return len(set(offsets)) == len(group)


def _on_device(computation: Computation, name: str, device: int) -> int | None:
    """A scalar's value on a device, where it follows from constants and the device's number alone."""
    instruction = computation.instructions.get(name)
    if instruction is None:
        return None
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "partition-id":
        return device
    if opcode == "constant":
        return int(instruction.arguments) if re.fullmatch(r"-?\d+", instruction.arguments) else None
    if opcode in _SAME_VALUE:
        return _on_device(computation, operands[0], device)
    if opcode == "dynamic-slice" and len(operands) == 2:  # the partitioner's table of offsets
        table = computation.instructions.get(operands[0])
        index = _on_device(computation, operands[1], device)
        numbers = re.findall(r"-?\d+", table.arguments) if table is not None and table.opcode == "constant" else []
        return int(numbers[index]) if index is not None and 0 <= index < len(numbers) else None
    if opcode in _ARITHMETIC:
        left, right = (_on_device(computation, operand, device) for operand in operands)
        if left is None or right is None or (opcode in ("divide", "remainder") and right == 0):
            return None
        return _ARITHMETIC[opcode](left, right)
    return None
