"""What `jtrain explain` tells of a config: compiled as a run would compile it, without its data."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

import jtrain
from jtrain.config.schema import Config
from jtrain.data.packing import plan_rows
from jtrain.data.rows import PackedRows, TrainRows
from jtrain.data.store import TokenStore
from jtrain.observe.hlo import HloCost, analyze
from jtrain.observe.partitioned import compile_and_partition
from jtrain.parallel.sharding import bytes_per_device
from jtrain.parallel.xla import compiler_options
from jtrain.tasks.pretrain import PretrainTrainer
from jtrain.tasks.source import ModelSource
from jtrain.train.optimizers import path_of
from jtrain.train.program import Program

_STEPS = 1000
"""Length of the run where the config counts it in epochs of data that is not read: no collective depends on it."""


def explain(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compiles the train step of a config.

    Returns:
      The keys of `jtrain explain --json`, and what the tables show besides: `mesh` (axis -> size), `sent` (axis ->
      bytes that a device sends a step), `state_bytes`, `pipeline` (the schedule as a picture), `notes`.

    Raises:
      JtrainError: the config can't be run; a missing tokenizer is the only file that is looked for.
    """
    trainer = trainer_without_data(config)
    program = trainer.program
    with trainer.train_loader() as batches:
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batches[0])
    lowered = program.train_step.lower(program.plan.abstract, batch)
    platform = program.mesh.devices.flat[0].platform
    # Machine code that nobody runs need not be fast; on an accelerator the options are those of the run.
    quick = compiler_options("cpu", run_once=True) if platform == "cpu" else {}
    compiled, text = compile_and_partition(lowered, quick)
    cost = analyze(text, dict(program.mesh.shape))
    memory = compiled.memory_analysis()
    found = {
        "parameters": _parameters(program),
        "collectives": _collectives(cost),
        "temporary_bytes": int(memory.temp_size_in_bytes),
        "peak_memory_bytes": _peak(memory, platform),
    }
    besides = {
        "mesh": dict(program.mesh.shape),
        "sent": cost.wire_bytes_by_axis(),
        "state_bytes": bytes_per_device(program.plan.abstract),
        "pipeline": None if program.pipeline is None else program.pipeline.tables(program.batch.accumulation).picture(),
        "notes": _notes(cost, platform),
    }
    return found, besides


def trainer_without_data(config: Config) -> PretrainTrainer:
    """The task's own trainer, over one row of zeros in place of its data."""
    changes: dict[str, Any] = {"data": config.data.model_copy(update={"eval": None})}
    if not isinstance(config.max_steps, int):
        changes |= {"max_steps": _STEPS, "num_train_epochs": None}
    config = ModelSource(config.model_copy(update=changes)).config  # with the model's own limit as max_length
    store = TokenStore.from_documents([[0] * config.max_length])
    rows = TrainRows([PackedRows(store, plan_rows(store.edges, config.max_length, "best_fit"))], seed=0)
    return PretrainTrainer(config, train_dataset=rows)


def _parameters(program: Program) -> dict[str, Any]:
    leaves, tree = jax.tree_util.tree_flatten_with_path(program.plan.abstract.params)
    names = tree.flatten_up_to(program.model.names)
    return {
        path_of(path): {
            "logical": None if logical is None else list(logical),
            "spec": _spec(leaf.sharding, len(leaf.shape)),
            "shape": list(leaf.shape),
            "bytes_per_device": bytes_per_device(leaf),
        }
        for (path, leaf), logical in zip(leaves, names, strict=True)
    }


def _spec(sharding: NamedSharding, rank: int) -> list[Any]:
    """One entry a dimension: None, an axis, or a list of axes."""
    entries = [*sharding.spec, *[None] * (rank - len(sharding.spec))]
    lists = [[entry] if isinstance(entry, str) else list(entry or ()) for entry in entries]
    return [None if not axes else axes[0] if len(axes) == 1 else axes for axes in lists]


def _collectives(cost: HloCost) -> list[dict[str, Any]]:
    counts: Counter[tuple[Any, ...]] = Counter()
    for collective, count in cost.collectives.items():
        axes = "+".join(collective.axes)
        counts[collective.op, axes, collective.bytes, collective.in_loop, _place(collective.source)] += count
    rows = [
        {"op": op, "axis": axis, "bytes": size, "count": count, "in_loop": in_loop, "source": source}
        for (op, axis, size, in_loop, source), count in counts.items()
    ]
    return sorted(rows, key=lambda row: (-row["bytes"] * row["count"], row["axis"], row["op"], row["source"] or ""))


def _place(source: str | None) -> str | None:
    """`file:line`, our own files as `jtrain/...` and those below the working directory without it."""
    if source is None:
        return None
    for folder in (Path(jtrain.__file__).parent.parent, Path.cwd()):
        source = re.sub(rf"^{re.escape(str(folder))}{re.escape(os.sep)}", "", source)
    return source


def _peak(memory: Any, platform: str) -> int:
    """XLA's own figure; XLA:CPU's leaves the temporary buffer out, so there it is all that a step holds."""
    if platform != "cpu":
        return int(memory.peak_memory_in_bytes)
    result = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.argument_size_in_bytes + result + memory.temp_size_in_bytes)


def _notes(cost: HloCost, platform: str) -> list[str]:
    notes = []
    if platform == "cpu":
        notes.append(
            "collectives are those of the partitioned program, before XLA:CPU merges and widens them; an all-reduce of "
            "which each device keeps its part counts as the reduce-scatter that TPU and GPU make of it"
        )
    branches = sorted({_place(c.source) or "?" for c in cost.collectives if c.conditional})
    if branches:
        notes.append(
            f"collectives of {', '.join(branches)} stand in a branch and are counted as if every update took it; with "
            "dcn.local_steps: H one in H does"
        )
    if cost.unknown_loops:
        notes.append(f"loops whose trips can't be told are counted once: {', '.join(cost.unknown_loops)}")
    return notes
