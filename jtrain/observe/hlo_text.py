"""Compiled HLO text as a tree: computations of instructions. Reads what XLA prints for CPU, GPU and TPU."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

ITEM_BYTES = {
    "pred": 1, "s2": 0.25, "u2": 0.25, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4,
    "s64": 8, "u64": 8, "f4e2m1fn": 0.5, "f8e3m4": 1, "f8e4m3": 1, "f8e4m3fn": 1, "f8e4m3b11fnuz": 1, "f8e4m3fnuz": 1,
    "f8e5m2": 1, "f8e5m2fnuz": 1, "f8e8m0fnu": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16,
}  # fmt: skip

_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<=]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$", re.DOTALL)
_OPCODE = re.compile(r"([\w\-]+)\((.*)$", re.DOTALL)
_OPERAND = re.compile(r"%([\w.\-]+(?:#\d+)*)")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_LIBRARY = re.compile(
    r"-packages/(?:jax|jaxlib|flax|optax|chex|orbax)/"
    r"|/jtrain/(?:ops/(?:logical|stack|token_sums)|models/projection)\.py:"
)
"""Lines that say less than the line that calls them."""
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')


@dataclass(frozen=True)
class Instruction:
    """One line: `%name = type opcode(operands), attributes`.

    Attributes:
      name: without the percent sign.
      type: the type as it is printed, layouts included.
      opcode: e.g. `dot`, `fusion`, `all-gather-start`.
      operands: names.
      arguments: what stands between the parentheses (a constant's value).
      attributes: everything after them.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    arguments: str
    attributes: str

    def called(self, *kinds: str) -> list[str]:
        """Names of the computations that it calls as `calls=`, `to_apply=`, `body=`, …, or by branches."""
        names = [name for kind, name in _CALLED.findall(self.attributes) if kind in kinds]
        branches = _BRANCHES.search(self.attributes) if "branch_computations" in kinds else None
        return names + (_OPERAND.findall(branches[1]) if branches else [])

    def numbers(self, attribute: str) -> tuple[int, ...]:
        """The numbers of an attribute such as `lhs_contracting_dims={1,2}`."""
        match = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return tuple(int(number) for number in match[1].split(",") if number) if match else ()


@dataclass
class Computation:
    """A function: its instructions by name, in the order of the text."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: Instruction | None = None
    parameters: dict[int, str] = field(default_factory=dict)

    def type_of(self, operand: str) -> str:
        return self.instructions[operand].type if operand in self.instructions else ""

    def users(self, name: str) -> Iterator[Instruction]:
        return (other for other in self.instructions.values() if name in other.operands)


@dataclass
class Module:
    """A compiled program.

    Attributes:
      computations: by name.
      entry: name of the one that is called.
      devices: partitions × replicas.
      sources: stack frame -> `file:line`, see `source`.
    """

    computations: dict[str, Computation]
    entry: str
    devices: int
    sources: dict[int, str]

    def source(self, instruction: Instruction) -> str | None:
        """`file:line` that an instruction comes from: the innermost line outside JAX, Flax and optax."""
        if frame := _FRAME.search(instruction.attributes):
            return self.sources.get(int(frame[1]))
        if direct := _SOURCE.search(instruction.attributes):
            return f"{direct[1]}:{direct[2]}"
        return None


def shapes(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    """The arrays of a (tuple) type: (element type, dimensions). A dynamic dimension counts as its bound."""
    return [
        (name, tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size))
        for name, sizes in _ARRAY.findall(type_)
        if name in ITEM_BYTES
    ]


def size_bytes(type_: str) -> int:
    """Bytes of a type; a tuple's are those of its parts."""
    return math.ceil(sum(ITEM_BYTES[name] * math.prod(sizes) for name, sizes in shapes(type_)))


def dimensions(type_: str) -> tuple[int, ...]:
    """Dimensions of a type's first array."""
    found = shapes(type_)
    return found[0][1] if found else ()


def parse_module(text: str) -> Module:
    """Reads `compiled.as_text()`.

    Raises:
      ValueError: the text holds no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry: str | None = None
    current: Computation | None = None
    for line in _logical_lines(text):
        if current is None:
            if header := _HEADER.match(line):
                current = computations[header[2]] = Computation(header[2])
                entry = current.name if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif (match := _INSTRUCTION.match(line)) and (instruction := _instruction(match[2], match[3])):
            for operand in instruction.operands:
                _add_element(current, operand)
            current.instructions[instruction.name] = instruction
            if instruction.opcode == "parameter":
                current.parameters[int(instruction.arguments)] = instruction.name
            if match[1]:
                current.root = instruction
    if entry is None:
        raise ValueError("HLO text without an ENTRY computation")
    counts = [
        re.search(rf"{what}=(\d+)", text[: text.find("\n") + 1] or text) for what in ("num_partitions", "replica_count")
    ]
    return Module(computations, entry, math.prod(int(count[1]) for count in counts if count), _stack_frames(text))


def _add_element(computation: Computation, name: str) -> None:
    """Writes `%tuple#3`, newer XLA's short form, out as a `get-tuple-element`."""
    source, mark, index = name.rpartition("#")
    if not mark or name in computation.instructions:
        return
    _add_element(computation, source)
    elements = _elements(computation.type_of(source))
    if int(index) < len(elements):
        computation.instructions[name] = Instruction(
            name, elements[int(index)], "get-tuple-element", (source,), f"%{source}", f", index={index}"
        )


def _elements(type_: str) -> list[str]:
    """The types in a tuple's."""
    parts: list[str] = []
    depth, start = 0, 1
    for place, letter in enumerate(type_):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or (letter == ")" and depth == 0):
            parts.append(re.sub(r"/\*.*?\*/", "", type_[start:place]).strip())
            start = place + 1
    return parts


def _logical_lines(text: str) -> Iterator[str]:
    """Lines, with an instruction whose attributes run over several lines (a kernel's JSON) put together."""
    pending: list[str] = []
    depth = 0
    for line in text.splitlines():
        starts = bool(_INSTRUCTION.match(line))
        if pending and starts:
            # Braces inside a string did not balance; a line that is an instruction can't be a continuation.
            yield "\n".join(pending)
            pending, depth = [], 0
        if pending or starts:
            pending.append(line)
            depth += line.count("{") - line.count("}")
            if depth <= 0:
                yield "\n".join(pending)
                pending, depth = [], 0
        else:
            yield line
    if pending:
        yield "\n".join(pending)


def _instruction(name: str, rest: str) -> Instruction | None:
    type_, rest = _split_type(rest)
    match = _OPCODE.match(rest)
    if match is None:
        return None
    arguments, attributes = _split_arguments(match[2])
    operands = tuple(_OPERAND.findall(arguments))
    if not operands and match[1] not in ("constant", "parameter"):
        # Text printed without percent signs: the name is the last word of each argument.
        operands = tuple(argument.split()[-1] for argument in arguments.split(",") if argument.strip())
    return Instruction(name, type_, match[1], operands, arguments, attributes)


def _split_type(rest: str) -> tuple[str, str]:
    if not rest.startswith("("):
        type_, _, rest = rest.partition(" ")
        return type_, rest.lstrip()
    end = _closing(rest, 0)
    return rest[: end + 1], rest[end + 1 :].lstrip()


def _split_arguments(rest: str) -> tuple[str, str]:
    end = _closing("(" + rest, 0) - 1
    return rest[:end], rest[end + 1 :]


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return start + match.start()
    return len(text)


def _stack_frames(text: str) -> dict[int, str]:
    head = text[: text.find("\n%")] if "\n%" in text else text
    files = dict(re.findall(r'^(\d+) "(.*)"$', _table(head, "FileNames"), re.MULTILINE))
    places = {
        number: f"{files.get(file)}:{line}"
        for number, file, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", _table(head, "FileLocations"), re.MULTILINE
        )
    }
    rows = re.findall(
        r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", _table(head, "StackFrames"), re.MULTILINE
    )
    # The text counts parents from 1 for "none": frame 1 names itself, and every other the frame after its parent.
    frames = {number: (places.get(place), str(int(parent or 1) - 1)) for number, place, parent in rows}
    sources: dict[int, str] = {}
    for number, (place, parent) in frames.items():
        seen = {number}
        while place is not None and _LIBRARY.search(place) and parent in frames and parent not in seen:
            seen.add(parent)
            place, parent = frames[parent]
        # A program of nothing but library code: its own line.
        place = frames[number][0] if place is None or _LIBRARY.search(place) else place
        if place is not None:
            sources[int(number)] = place
    return sources


def _table(text: str, title: str) -> str:
    match = re.search(rf"^{title}\n(.*?)(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    return match[1] if match else ""
