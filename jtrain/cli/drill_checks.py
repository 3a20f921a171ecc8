"""What a rehearsal looks at: bits, rows, losses, the ledger of time, and which other mesh there is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jtrain.cli.drill_runs import Plan, Ran
from jtrain.config import load_config
from jtrain.config.mesh_rules import AXES, mesh_text
from jtrain.config.schema import Config
from jtrain.errors import CheckpointError, ConfigError, Exit
from jtrain.observe.metrics import read_events, read_metrics
from jtrain.redaction import redact_text
from jtrain.train.row_ledger import Read, read_ledger

TOLERANCES = {"32-true": 1e-5, "64-true": 1e-5}
"""Relative, of a loss on another mesh, by precision: sums are in another order there."""
OTHER_TOLERANCE = 2e-2
CLOCK_SHARE, CLOCK_SECONDS = 0.01, 3.0
"""What the ledger of time may differ from the clock: a share, and the start and the end of a program."""


class Check(NamedTuple):
    """A line of the card.

    Attributes:
      name: what was looked at; the same in every version.
      status: ok; fail; or skipped, and `value` says why.
      value: what was found, in a line.
      remedy: what to do; None where all is well.
      code: the exit code of a rehearsal that fails by it.
    """

    name: str
    status: Literal["ok", "fail", "skipped"]
    value: str
    remedy: str | None = None
    code: int = int(Exit.DONE)

    def shown(self) -> dict[str, Any]:
        """For programs."""
        return {"name": self.name, "status": self.status, "value": self.value, "remedy": self.remedy}


def passed(name: str, value: str) -> Check:
    """A check that is well."""
    return Check(name, "ok", redact_text(value))


def failed(name: str, value: str, remedy: str, code: int) -> Check:
    """A check that is not."""
    return Check(name, "fail", redact_text(value), redact_text(remedy), int(code))


def bits(ours: Ran, reference: Ran) -> Check:
    """The newest checkpoints of two runs: every array, and the counters."""
    from jtrain.checkpoint import Checkpoints

    folders, counters = [], []
    for ran in (ours, reference):
        with Checkpoints(ran.run_dir, read_only=True) as checkpoints:
            step = checkpoints.steps()[-1]
            try:
                checkpoints.verify(step)
            except CheckpointError as error:
                return failed("bits", error.message, "see whether the disk is sound", Exit.CHECKPOINT)
            folders.append(Path(checkpoints.root / str(step)))
            counted = checkpoints.read_meta(step)["counters"]
            counters.append({name: counted[name] for name in ("step", "skipped", "tokens", "examples")})
    count, different = _compare(*folders)
    if counters[0] != counters[1]:
        different.append(f"counters {counters[0]}, and {counters[1]} without faults")
    if different:
        more = "" if len(different) == 1 else f" and {len(different) - 1} more"
        value = f"step {folders[0].name} differs from the reference: {different[0]}{more}"
        return failed("bits", value, "a resumed run is another one: please report it with the log", Exit.CHECKPOINT)
    return passed("bits", f"step {folders[0].name}: all {count} arrays and the counters equal the reference's")


def _compare(one: Path, other: Path) -> tuple[int, list[str]]:
    """How many arrays there are, and those that differ; one at a time, since a state may be large."""
    import jax
    import numpy as np
    from etils import epath

    from jtrain.checkpoint.arrays import read_arrays
    from jtrain.checkpoint.manifest import read_manifest

    records, others = (read_manifest(epath.Path(folder)).arrays for folder in (one, other))
    different = [
        f"{path}: shape or type" for path in records.keys() | others.keys() if records.get(path) != others.get(path)
    ]
    for path, (dtype, shape) in sorted(records.items()):
        if records[path] != others.get(path):
            continue
        wanted = {path: jax.ShapeDtypeStruct(shape, np.dtype(dtype))}
        first, second = (
            np.asarray(read_arrays(epath.Path(folder) / "state", wanted, partial=True)[path]) for folder in (one, other)
        )
        if first.tobytes() != second.tobytes():
            different.append(f"{path}: {int((first != second).sum())} of {first.size} numbers")
    return len(records), different


def rows(name: str, ours: Ran, reference: Ran, first: int, last: int) -> tuple[str | None, str]:
    """Whether updates `first` to `last` have read the rows that those of the reference have, once each.

    Returns:
      What is wrong, or None; and what was found.
    """
    found, wrong = read_ledger(ours.ledger)
    expected = {read.step: read for read in read_ledger(reference.ledger)[0]}
    made = {read.step: read for read in found if read.step is not None and first <= read.step <= last}
    if not wrong and sorted(step for step in made) != list(range(first, last + 1)):
        wrong = [f"updates {sorted(made)} were made, not {first} to {last}"]
    others = [step for step, read in made.items() if not _same(read, expected.get(step))]
    if not wrong and others:
        wrong = [f"update {others[0]} has read other rows than in the reference"]
    return (wrong[0] if wrong else None), f"updates {first} to {last} have read the reference's rows, once each"


def _same(read: Read, other: Read | None) -> bool:
    return other is not None and (read.batch, read.checksum) == (other.batch, other.checksum)


def losses(run_dir: Path) -> dict[int, float]:
    """Step -> loss."""
    return {line["step"]: line["loss"] for line in read_metrics(run_dir, "train") if line["loss"] is not None}


def deviation(ours: Mapping[int, float], reference: Mapping[int, float], steps: Sequence[int]) -> float:
    """The largest relative deviation of a loss; infinite where one is missing."""
    pairs = [(ours.get(step, math.inf), reference.get(step, math.nan)) for step in steps]
    found = [abs(one - other) / max(abs(other), 1e-30) for one, other in pairs]
    return max((value if math.isfinite(value) else math.inf for value in found), default=math.inf)


def tolerance(config: Config) -> float:
    """What `deviation` may be on another mesh."""
    return TOLERANCES.get(config.precision, OTHER_TOLERANCE)


def goodput(ran: Ran) -> tuple[Check, dict[str, Any]]:
    """The ledger of time: its last line, and whether it sums to what the clock says."""
    events = read_events(ran.run_dir, "goodput")
    if not events:
        return failed("goodput", "events.jsonl has no line of it", "please report it with the log", Exit.BUG), {}
    last = events[-1]
    measured, told = last["time"] - ran.began, sum(last["seconds"].values())
    parts = sorted(((seconds, bucket) for bucket, seconds in last["seconds"].items() if seconds >= 0.05), reverse=True)
    listed = ", ".join(f"{bucket.replace('_', ' ')} {seconds:.1f} s" for seconds, bucket in parts)
    value = f"{100 * last['goodput']:.0f} %: {listed}; {told:.1f} s in all, {measured:.1f} s by the clock"
    if abs(told - measured) > max(CLOCK_SHARE * measured, CLOCK_SECONDS):
        return failed("goodput", value, "seconds are missing: please report it with the log", Exit.BUG), last
    return passed("goodput", value), last


def other_meshes(config: Config, mesh: Mapping[str, int], plan: Plan, run_dir: Path) -> Iterator[list[str]]:
    """Flags of meshes that the run could go on with in place of its own, the likeliest first.

    Args:
      config: of the run.
      mesh: its axes with their sizes.
      plan, run_dir: what the flags are for.
    """
    sizes = {axis: mesh.get(axis, 1) for axis in AXES}
    ranks = sizes["data"] * sizes["fsdp"]
    devices = math.prod(sizes.values())
    candidates = [
        sizes | {"data": ranks * sizes["tensor"], "fsdp": 1, "tensor": 1},
        sizes | {"data": 1, "fsdp": ranks},
        sizes | {"data": ranks, "fsdp": 1},
    ]
    more: list[str] = []
    if devices == 1 and config.accelerator == "cpu" and plan.processes == 1:
        candidates, more = [sizes | {"data": 2}], ["--devices", "2"]
    slices = f",slices={config.mesh.slices}" if config.mesh.slices > 1 else ""
    seen = [sizes]
    for candidate in candidates:
        if candidate in seen:
            continue
        seen.append(candidate)
        flags = ["--mesh", mesh_text(candidate) + slices, *more]
        try:
            load_config(plan.source, plan.shortened(run_dir, *flags))
        except ConfigError:
            continue
        yield flags
