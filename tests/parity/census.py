"""Bytes that collectives move in a compiled step, and the least that the mathematics needs: both per device and step.

Bytes are those that a device sends by a ring over g devices: (g-1)/g of an array that is gathered, scattered or
exchanged, twice that for an all-reduce, all of what a permutation sends.

    taken = census(program, length=64)        # of any program with a train step
    need = Needs(program.mesh.shape)
    need.gather("fsdp", weight_bytes, times=2)
    assert taken.sent("fsdp") <= 1.10 * need.sent("fsdp")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jtrain.config import load_config
from jtrain.models.config import DecoderConfig
from jtrain.models.decoder import Decoder
from jtrain.models.presets import preset
from jtrain.observe.hlo import Collective, analyze
from jtrain.observe.partitioned import compile_and_partition
from jtrain.tasks.pretrain import pretrain_loss
from jtrain.train.program import Program, build_program, mesh_and_batch

CHEAP = {"xla_backend_optimization_level": 0}
"""The collectives are settled before machine code is made: it need not be good."""


@dataclass(frozen=True)
class Census:
    """Collectives of a step -> executions; `compiled` for its memory analysis."""

    collectives: Counter[Collective]
    compiled: Any

    def sent(self, axis: str) -> int:
        """Bytes that a device sends in collectives over `axis`, or over several axes of which it is one."""
        return sum(c.wire_bytes * n for c, n in self.collectives.items() if axis in c.axes)

    def calls(self, *, op: str | None = None, axis: str | None = None, least: int = 1) -> Counter[Collective]:
        """Those of an operation, over an axis, of at least so many bytes."""
        return Counter(
            {
                c: n
                for c, n in self.collectives.items()
                if (op is None or c.op == op) and (axis is None or axis in c.axes) and c.bytes >= least
            }
        )

    def table(self) -> str:
        """One line a collective, the most bytes first: what a failed assertion prints."""
        rows = sorted(self.collectives.items(), key=lambda item: -item[0].wire_bytes * item[1])
        return "\n".join(
            f"{c.wire_bytes * n:>10,} = {n:>3} x {c.wire_bytes:>9,}  {c.op:<18} {'+'.join(c.axes):<12} {c.source}"
            for c, n in rows
        )


@dataclass
class Needs:
    """The least that has to be sent, axis by axis; an array of `size` bytes, `times` a step."""

    mesh: Mapping[str, int]
    bytes: Counter[str] = field(default_factory=Counter)

    def gather(self, axis: str, size: float, times: float = 1) -> None:
        """Also a reduce-scatter, and an all-to-all: (g-1)/g of the whole array."""
        self.bytes[axis] += times * size * (self.mesh[axis] - 1) / self.mesh[axis]

    scatter = exchange = gather

    def reduce(self, axis: str, size: float, times: float = 1) -> None:
        """An all-reduce."""
        self.gather(axis, size, 2 * times)

    def permute(self, axis: str, size: float, times: float = 1) -> None:
        """Every device sends `size` bytes to a neighbour."""
        if self.mesh[axis] > 1:
            self.bytes[axis] += times * size

    def sent(self, axis: str) -> float:
        return self.bytes[axis]


def census(program: Program, *, length: int) -> Census:
    """Compiles the train step of a program for rows of `length` tokens, and counts."""
    lowered = program.train_step.lower(program.plan.abstract, abstract_batch(program, length))
    compiled, text = compile_and_partition(lowered, CHEAP)
    cost = analyze(text, dict(program.mesh.shape))
    assert not cost.unknown_loops
    return Census(cost.collectives, compiled)


def abstract_batch(program: Program, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of a decoder as shapes."""
    rows = (program.batch.accumulation, program.batch.rows)
    tokens = jax.ShapeDtypeStruct((*rows, length), jnp.int32, sharding=program.batch_sharding)
    batch = dict.fromkeys(("input_ids", "labels", "segment_ids", "position_ids"), tokens)
    return batch | {"row": jax.ShapeDtypeStruct(rows, jnp.int32, sharding=program.batch_sharding)}


def decoder_program(
    mesh: Mapping[str, int], shape: Mapping[str, Any], *, length: int = 64, rows: int = 8, **config: Any
) -> tuple[Program, DecoderConfig]:
    """A decoder's program on a mesh of CPU devices, and its shape.

    Args:
      mesh: axis -> size; axes that are not named are 1.
      shape: fields of `DecoderConfig` over those of the preset llama-tiny.
      length: tokens of a row.
      rows: rows of a step.
      **config: further fields of the config.
    """
    settings = {"max_steps": 1, "max_length": length, "global_batch_size": rows, "precision": "32-true"} | config
    loaded = load_config(settings | {"mesh": {"data": 1, **mesh}}, env={})
    devices = 1
    for size in mesh.values():
        devices *= size
    resolved, device_mesh, batch = mesh_and_batch(loaded, jax.devices()[:devices])
    decoder = preset("llama-tiny", **shape)
    program = build_program(
        resolved, lambda rngs: Decoder(decoder, rngs), pretrain_loss(), mesh=device_mesh, batch=batch, max_steps=1
    )
    return program, decoder
