"""What one device does in a compiled step: FLOPs, bytes, collectives; a loop body counts as often as it runs.

XLA's own `compiled.cost_analysis()` counts a loop body once, so a scanned decoder's figures are off by its layers.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jtrain.observe.hlo_bytes import kernel_bytes
from jtrain.observe.hlo_groups import device_groups, mesh_axes
from jtrain.observe.hlo_loops import trip_count
from jtrain.observe.hlo_products import custom_call_target, is_bookkeeping, product_flops
from jtrain.observe.hlo_slices import is_scattered
from jtrain.observe.hlo_text import Computation, Instruction, Module, dimensions, parse_module, size_bytes

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast",
    "ragged-all-to-all",
)  # fmt: skip
_SCAN_SLICE = "dynamic_index_in_dim"
_NEAR = 6
"""Changes of layout between a gathered weight and its product."""
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")


@dataclass(frozen=True)
class Collective:
    """A collective of the program, per device.

    Attributes:
      op: all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute, …
      axes: mesh axes that it runs over; empty without a mesh.
      group_size: devices that take part together.
      bytes: of the whole array that is gathered, reduced or exchanged, per execution.
      wire_bytes: that a device sends, per execution, by a ring: (g-1)/g of `bytes`, twice that for an all-reduce.
      asynchronous: whether it may overlap with computation.
      in_loop: whether it stands in a loop.
      source: `file:line` that it comes from.
      conditional: whether it stands in a branch that a run may not take (local steps: one in H does).
    """

    op: str
    axes: tuple[str, ...]
    group_size: int
    bytes: int
    wire_bytes: int
    asynchronous: bool
    in_loop: bool
    source: str | None
    conditional: bool = False


@dataclass
class HloCost:
    """Costs of one run of a program on one device.

    Attributes:
      flops: of matrix products and convolutions.
      bytes_accessed: read and written by kernels, a fusion's inner values left out: an estimate of memory traffic.
      collectives: collective -> executions.
      opaque: target of a custom call -> executions. Their FLOPs are not in `flops` (Pallas, cuDNN attention).
      unknown_loops: loops whose trips can't be told; their bodies are counted once.
    """

    flops: int = 0
    bytes_accessed: int = 0
    collectives: Counter[Collective] = field(default_factory=Counter)
    opaque: Counter[str] = field(default_factory=Counter)
    unknown_loops: tuple[str, ...] = ()

    def wire_bytes_by_axis(self) -> dict[str, int]:
        """Axes joined by `+` -> bytes that a device sends over them."""
        total: Counter[str] = Counter()
        for collective, count in self.collectives.items():
            total["+".join(collective.axes)] += collective.wire_bytes * count
        return dict(total)

    def add(self, other: HloCost, times: int = 1, *, in_loop: bool = False, conditional: bool = False) -> None:
        """Adds `times` runs of `other`."""
        self.flops += times * other.flops
        self.bytes_accessed += times * other.bytes_accessed
        for collective, count in other.collectives.items():
            marked = replace(
                collective,
                in_loop=collective.in_loop or in_loop,
                conditional=collective.conditional or conditional,
            )
            self.collectives[marked] += times * count
        for target, count in other.opaque.items():
            self.opaque[target] += times * count
        self.unknown_loops += other.unknown_loops


def analyze(text: str, mesh: Mapping[str, int] | None = None) -> HloCost:
    """Walks a compiled program.

    Args:
      text: `compiled.as_text()`.
      mesh: axis -> size (`dict(mesh.shape)`), to tell which axes a collective runs over.

    Raises:
      ValueError: the text is not a compiled module.
    """
    module = parse_module(text)
    return _Walk(module, mesh or {}).computation(module.entry)


class _Walk:
    def __init__(self, module: Module, mesh: Mapping[str, int]):
        self._module = module
        self._mesh = mesh
        self._done: dict[tuple[str, bool], HloCost] = {}

    def computation(self, name: str, *, fused: bool = False) -> HloCost:
        """Cost of one call. Inside a fusion values pass in registers: they are no memory traffic."""
        if (name, fused) not in self._done:
            computation = self._module.computations[name]
            repeated = self._repeated_channels(computation)
            cost = HloCost()
            for instruction in computation.instructions.values():
                cost.add(self._instruction(computation, instruction, repeated))
                if not fused:
                    cost.bytes_accessed += kernel_bytes(self._module, computation, instruction)
            self._done[name, fused] = cost
        return self._done[name, fused]

    def _instruction(self, computation: Computation, instruction: Instruction, repeated: dict[str, bool]) -> HloCost:
        opcode = instruction.opcode
        if opcode == "while":
            return self._loop(computation, instruction)
        if opcode == "call":
            return self.computation(instruction.called("to_apply")[0])
        if opcode == "conditional":
            names = instruction.called("branch_computations", "true_computation", "false_computation")
            # One branch runs; which one is known on the device alone, so the costliest stands for all.
            cost = HloCost()
            cost.add(max(map(self.computation, names), key=_weight), conditional=True)
            return cost
        cost = HloCost(flops=product_flops(computation, instruction))
        base = opcode.removesuffix("-start")
        if base in COLLECTIVES:
            cost.collectives.update(self._collectives(computation, instruction, base, asynchronous=base != opcode))
        elif opcode == "fusion" or opcode.endswith("-start"):
            for name in instruction.called("calls"):
                cost.add(self._inner(name, repeated, asynchronous=opcode != "fusion"))
        elif opcode == "custom-call" and not cost.flops and not is_bookkeeping(instruction):
            cost.opaque[custom_call_target(instruction)] += 1
        return cost

    def _loop(self, computation: Computation, loop: Instruction) -> HloCost:
        trips = trip_count(self._module, computation, loop)
        cost = HloCost(unknown_loops=() if trips is not None else (loop.name,))
        cost.add(self.computation(loop.called("body")[0]), 1 if trips is None else trips, in_loop=True)
        return cost

    def _inner(self, name: str, repeated: dict[str, bool], *, asynchronous: bool) -> HloCost:
        """Cost of a fused or asynchronous computation.

        A TPU starts a collective in one fusion and ends it in another, with the same channel in both: it counts once.
        """
        inner = self.computation(name, fused=True)
        channels = [channel for channel in self._channels(name) if channel in repeated]
        cost = replace(inner, collectives=Counter())
        if all(repeated[channel] for channel in channels) if channels else False:
            return cost
        repeated.update(dict.fromkeys(channels, True))
        for collective, count in inner.collectives.items():
            overlaps = asynchronous or bool(channels) or collective.asynchronous
            cost.collectives[replace(collective, asynchronous=overlaps)] += count
        return cost

    def _channels(self, name: str) -> list[str]:
        """Channels of the collectives in a computation and in what it calls."""
        found: list[str] = []
        for instruction in self._module.computations[name].instructions.values():
            if instruction.opcode.removesuffix("-start") in COLLECTIVES:
                found += _CHANNEL.findall(instruction.attributes)
            for inner in instruction.called("calls"):
                found += self._channels(inner)
        return found

    def _repeated_channels(self, computation: Computation) -> dict[str, bool]:
        """Channels that stand in more than one fusion of a computation -> whether one was counted already."""
        fusions = [
            name for x in computation.instructions.values() if x.opcode == "fusion" for name in x.called("calls")
        ]
        seen = Counter(channel for name in fusions for channel in set(self._channels(name)))
        return {channel: False for channel, count in seen.items() if count > 1}

    def _collectives(
        self, computation: Computation, instruction: Instruction, op: str, *, asynchronous: bool
    ) -> list[Collective]:
        """An instruction's collectives: one, or two where XLA merged all-reduces of which some are scattered."""
        groups = device_groups(instruction.attributes, self._module.devices)
        operands = instruction.operands[:1] if op == "collective-permute" else instruction.operands
        payloads: dict[str, int] = {}
        for place, name in enumerate(operands):
            type_ = computation.type_of(name)
            kind = op
            if op == "all-reduce" and _is_scattered(computation, instruction, place, type_, groups):
                kind = "reduce-scatter"
            payloads[kind] = payloads.get(kind, 0) + size_bytes(type_)
        size = max(map(len, groups), default=1)
        return [
            self._collective(
                computation,
                instruction,
                kind,
                groups,
                payload * size if kind == "all-gather" else payload,
                asynchronous=asynchronous,
            )
            for kind, payload in payloads.items()
        ]

    def _collective(
        self,
        computation: Computation,
        instruction: Instruction,
        op: str,
        groups: list[list[int]],
        payload: int,
        *,
        asynchronous: bool,
    ) -> Collective:
        size = max(map(len, groups), default=1)
        ring = {"all-reduce": 2 * (size - 1) / size, "collective-permute": 1.0, "collective-broadcast": 1.0}
        return Collective(
            op=op,
            axes=mesh_axes(groups, self._mesh),
            group_size=size,
            bytes=payload,
            wire_bytes=round(payload * ring.get(op, (size - 1) / size)),
            asynchronous=asynchronous,
            in_loop=False,
            source=self._source(computation, instruction),
        )

    def _source(self, computation: Computation, instruction: Instruction) -> str | None:
        """The line of a collective; of one without a line, or of a scan's own slice of its layers: of what uses it."""
        own = self._module.source(instruction)
        if own is not None and _SCAN_SLICE not in instruction.attributes:
            return own
        user: Instruction | None = instruction
        for _ in range(_NEAR):
            user = next(computation.users(user.name), None) if user is not None else None
            line = self._module.source(user) if user is not None else None
            if line not in (None, own):
                return line
        return own


def _weight(cost: HloCost) -> tuple[int, int, int]:
    """What makes a branch costly: products, then what it sends, then what it reads and writes."""
    return cost.flops, sum(cost.wire_bytes_by_axis().values()), cost.bytes_accessed


def _is_scattered(
    computation: Computation, instruction: Instruction, place: int, type_: str, groups: list[list[int]]
) -> bool:
    """Whether the `place`-th array of an all-reduce is scattered."""
    names = [instruction.name]
    if len(instruction.operands) > 1:
        element = re.compile(rf"\bindex={place}\b")
        names = [user.name for user in computation.users(instruction.name) if element.search(user.attributes)]
    size = math.prod(dimensions(type_))
    return bool(names) and all(is_scattered(computation, name, size, groups[0]) for name in names)
