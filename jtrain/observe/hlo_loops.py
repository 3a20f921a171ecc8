"""How often the body of an HLO `while` runs.

XLA writes the count beside many loops (`known_trip_count`). Where it doesn't, it follows from the loop itself: the
start from the tuple that goes in, the limit from the condition, the step from the body (a windowed einsum steps by 2).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jtrain.observe.hlo_text import Computation, Instruction, Module

_KNOWN = re.compile(r'known_trip_count"?[=:]\{"?n"?[:=]"?(\d+)')
_SAME_VALUE = ("copy", "bitcast", "convert", "reshape", "copy-done", "opt-barrier")


@dataclass(frozen=True)
class Element:
    """Element `index` of the loop's tuple, plus `offset`."""

    index: int
    offset: int = 0


Value = int | Element | None
"""What a scalar is known to be: a number, an element of the loop's tuple and an offset, or unknown."""


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Iterations of `loop`, an instruction of `computation`; None when they can't be told.

    A loop whose start isn't a constant in sight is taken to count from 0, as every `lax.scan` does.
    """
    if known := _KNOWN.search(loop.attributes):
        return int(known[1])
    condition = module.computations[loop.called("condition")[0]]
    body = module.computations[loop.called("body")[0]]
    compared = _comparison(module, condition)
    if compared is None:
        return None
    counter, limit, direction = compared
    step = _value(module, body, _tuple_element(body, body.root, counter.index))
    if not isinstance(step, Element) or step.index != counter.index or step.offset == 0:
        return None
    start = _value(
        module, computation, _tuple_element(computation, computation.instructions[loop.operands[0]], counter.index)
    )
    first = (start if isinstance(start, int) else 0) + counter.offset
    return _iterations(first, step.offset, limit, direction)


def _iterations(first: int, step: int, limit: int, direction: str) -> int | None:
    if direction in ("LE", "GE"):
        limit += 1 if direction == "LE" else -1
    distance = limit - first
    if direction == "NE":
        return distance // step if distance % step == 0 and distance // step >= 0 else None
    if (step > 0) != (direction in ("LT", "LE")):
        return None
    return max(0, -(-distance // step))


def _comparison(module: Module, condition: Computation) -> tuple[Element, int, str] | None:
    """(counter, limit, direction) of a condition `counter < limit`."""
    root, scope, arguments = condition.root, condition, None
    while root is not None and root.opcode in ("fusion", "call"):
        inner = module.computations[root.called("calls", "to_apply")[0]]
        arguments = [_value(module, scope, operand, arguments) for operand in root.operands]
        root, scope = inner.root, inner
    if root is None or root.opcode != "compare":
        return None
    left, right = (_value(module, scope, operand, arguments) for operand in root.operands)
    match = re.search(r"direction=(\w+)", root.attributes)
    direction = match[1] if match else ""
    if isinstance(left, int) and isinstance(right, Element):
        left, right = right, left
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    if isinstance(left, Element) and isinstance(right, int) and direction in ("LT", "LE", "GT", "GE", "NE"):
        return left, right, direction
    return None


def _tuple_element(computation: Computation, instruction: Instruction | None, index: int) -> str | None:
    """Name of the `index`-th operand of a tuple."""
    while instruction is not None and instruction.opcode in _SAME_VALUE:
        instruction = computation.instructions.get(instruction.operands[0])
    if instruction is None or instruction.opcode != "tuple" or index >= len(instruction.operands):
        return None
    return instruction.operands[index]


def _value(module: Module, computation: Computation, name: str | None, arguments: list[Value] | None = None) -> Value:
    """What the scalar `name` of a computation is, given its parameters' values (None: the loop's tuple)."""
    instruction = computation.instructions.get(name) if name else None
    if instruction is None:
        return None
    if instruction.opcode == "constant":
        return int(instruction.arguments) if re.fullmatch(r"-?\d+", instruction.arguments) else None
    if instruction.opcode == "parameter":
        number = int(instruction.arguments)
        return arguments[number] if arguments is not None and number < len(arguments) else None
    if instruction.opcode == "get-tuple-element":
        source = computation.instructions.get(instruction.operands[0])
        index = re.search(r"index=(\d+)", instruction.attributes)
        if source is None or index is None:
            return None
        if source.opcode == "parameter" and arguments is None:
            return Element(int(index[1]))
        return _value(module, computation, _tuple_element(computation, source, int(index[1])), arguments)
    if instruction.opcode in _SAME_VALUE:
        return _value(module, computation, instruction.operands[0], arguments)
    values = [_value(module, computation, operand, arguments) for operand in instruction.operands]
    if instruction.opcode in ("fusion", "call"):
        inner = module.computations[instruction.called("calls", "to_apply")[0]]
        return _value(module, inner, inner.root.name if inner.root else None, values)
    if instruction.opcode in ("add", "subtract"):
        return _sum(*values, sign=1 if instruction.opcode == "add" else -1)
    return None


def _sum(left: Value, right: Value, *, sign: int) -> Value:
    if isinstance(left, int) and isinstance(right, Element) and sign == 1:
        left, right = right, left
    if not isinstance(right, int) or left is None:
        return None
    return left + sign * right if isinstance(left, int) else Element(left.index, left.offset + sign * right)
