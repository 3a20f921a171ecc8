"""One rehearsal of `jtrain drill`: its runs, what is looked at, and the card."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jtrain.cli import drill_checks as look
from jtrain.cli.drill_checks import Check, failed, passed
from jtrain.cli.drill_runs import Plan, Ran, left_files, left_processes
from jtrain.cli.drill_runs import run as run_plan
from jtrain.cli.drill_worker import STRIKES_FILE
from jtrain.config.mesh_rules import mesh_text
from jtrain.config.schema import Config
from jtrain.errors import ConfigError, Exit
from jtrain.observe.jsonlines import read_lines
from jtrain.observe.metrics import read_events, read_metrics
from jtrain.train.row_ledger import recovered_at


class Drill:
    """One rehearsal.

    Args:
      plan: how the config is shortened.
      config: the run's.
      folder: where it works.
      tell: hears what it is at.
    """

    def __init__(self, plan: Plan, config: Config, folder: Path, tell: Callable[[str], None]):

        self.plan, self._config, self._folder, self._tell = plan, config, folder, tell
        self.checks: list[Check] = []
        self.recoveries: dict[str, float] = {}
        self.goodput: dict[str, Any] = {}
        self.mesh: dict[str, int] = {}
        self.seconds = 0.0

    def run(self) -> int:
        """Makes all runs and checks; the exit code is that of the first check that has failed."""
        _use_no_device()
        began = time.monotonic()
        reference = self._reference()
        if reference is not None:
            faulted = self._faulted()
            if faulted is not None:
                self._compare(faulted, reference)
            self._other_mesh(reference)
        self._leftovers()
        self.seconds = time.monotonic() - began
        return next((check.code for check in self.checks if check.status == "fail"), int(Exit.DONE))

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _reference(self) -> Ran | None:
        plural = "" if self.plan.processes == 1 else "es"
        self._tell(f"{self.plan.steps} updates by {self.plan.processes} process{plural}, without faults")
        ran = run_plan(self.plan, self._folder, "reference")
        if ran.code != Exit.DONE:
            remedy = f"the run itself does not work; see {ran.log}"
            self.checks.append(failed("reference", ran.error, remedy, ran.code))
            return None
        self.mesh = read_events(ran.run_dir, "start")[0]["mesh"]
        self.checks.append(passed("reference", f"{self.plan.steps} updates in {ran.seconds:.1f} s"))
        return ran

    def _strikes(self) -> list[dict[str, Any]]:
        """What strikes which process, one after the other: kills of the last one and of process 0, a word to the last.

        Each comes just before a save, so that the updates since the one before it are lost.
        """
        every, last = self.plan.save_steps, self.plan.processes - 1
        kills = [(rank, "SIGKILL") for rank in sorted({last, 0}, reverse=True)]
        leaves = [(last, signal) for signal in self._config.faults.preemption_signals[:1]]
        strikes = []
        for number, (rank, name) in enumerate([*kills, *leaves], 1):
            saved = min(number, 2) * every
            strikes.append({"rank": rank, "update": saved + every, "durable": saved, "signal": name})
        return strikes

    def _faulted(self) -> Ran | None:
        """The run with faults; None where it has not come to its end."""
        strikes = self._strikes()
        said = ", ".join(f"{strike['signal']} to process {strike['rank']}" for strike in strikes)
        self._tell(f"the same with faults: {said}")
        ran = run_plan(self.plan, self._folder, "faulted", strikes=strikes)
        made = list(read_lines(ran.ledger / STRIKES_FILE))
        self.checks += [self._struck(ran, strike, *made[n : n + 1]) for n, strike in enumerate(strikes)]
        if ran.code != Exit.DONE:
            remedy = f"it was not started again, or did not get on; see {ran.log}"
            self.checks.append(failed("resume", ran.error, remedy, ran.code))
            return None
        plural = "" if len(ran.outcomes) == 2 else "s"
        value = f"started again {len(ran.outcomes) - 1} time{plural} by the supervisor, and done"
        self.checks.append(Check("resume", "ok", value))
        return ran

    def _struck(self, ran: Ran, strike: dict[str, Any], made: dict[str, Any] | None = None) -> Check:
        """What came of one fault, where it was `made`."""
        kill = strike["signal"] == "SIGKILL"
        name = f"kill_rank_{strike['rank']}" if kill else "preemption"
        if made is None:
            return failed(name, "it did not come to that", f"see {ran.log}", ran.code or Exit.BUG)
        outcome = ran.outcomes[made["attempt"] - 1]
        start = "the beginning" if outcome.durable is None else f"step {outcome.durable}"
        what = f"{strike['signal']} before update {strike['update']}: "
        if not kill and outcome.codes != [Exit.PREEMPTED_SAVED] * len(outcome.codes):
            value = f"{what}the processes ended with {outcome.codes}, and not all with 10"
            return failed(name, value, f"see {ran.log}", next(filter(None, outcome.codes), Exit.BUG))
        recovered = recovered_at(ran.ledger, made["time"])
        if recovered is None:
            return failed(name, f"{what}no update was made after it", f"see {ran.log}", ran.code or Exit.BUG)
        seconds = recovered - made["time"]
        if kill:
            self.recoveries[name] = round(seconds, 2)
            what += f"{made['update'] - 1 - (outcome.durable or 0)} to make again, "
        else:
            what += f"step {outcome.durable} is saved by all, "
        return passed(name, f"{what}went on from {start}, the next update after {seconds:.1f} s")

    def _compare(self, faulted: Ran, reference: Ran) -> None:
        self._tell("comparing")
        self.checks.append(look.bits(faulted, reference))
        wrong, found = look.rows("rows", faulted, reference, 1, self.plan.steps)
        remedy = "data was left out or read twice: please report it with the log"
        self.checks.append(passed("rows", found) if wrong is None else failed("rows", wrong, remedy, Exit.DATA))
        check, self.goodput = look.goodput(faulted)
        self.checks.append(check)

    def _other_mesh(self, reference: Ran) -> None:
        """The reference goes on from its last checkpoint but one, on another mesh."""
        meshes = look.other_meshes(self._config, self.mesh, self.plan, reference.run_dir)
        mesh = next(meshes, None)
        if mesh is None:
            why = f"mesh {mesh_text(self.mesh)} is the only one that the devices and the config allow"
            self.checks.append(Check("other_mesh", "skipped", why))
            return
        begin, end = 3 * self.plan.save_steps, self.plan.steps
        self._tell(f"from step {begin} on the mesh {mesh[1]}")
        before = look.losses(reference.run_dir)
        batch = str(read_metrics(reference.run_dir, "train")[0]["examples"])  # it stays, whatever it followed from
        flags = ["--checkpoint.resume", str(begin), "--global_batch_size", batch, "--per_device_batch_size", "null"]
        try:
            ran = run_plan(self.plan, self._folder, "other_mesh", *mesh, *flags, run_dir=reference.run_dir)
        except ConfigError as error:
            self.checks.append(Check("other_mesh", "skipped", f"mesh {mesh[1]}: {error.message}"))
            return
        if ran.code == Exit.CONFIG:
            self.checks.append(Check("other_mesh", "skipped", f"mesh {mesh[1]}: {ran.error}"))
            return
        if ran.code != Exit.DONE:
            self.checks.append(failed("other_mesh", f"mesh {mesh[1]}: {ran.error}", f"see {ran.log}", ran.code))
            return
        wrong, found = look.rows("other_mesh", ran, reference, begin + 1, end)
        far = look.deviation(look.losses(reference.run_dir), before, range(begin + 1, end + 1))
        limit = look.tolerance(self._config)
        value = f"mesh {mesh[1]} from step {begin}: {wrong or found}; losses within {far:.1e} (limit {limit:g})"
        if wrong is None and far <= limit:
            self.checks.append(passed("other_mesh", value))
        else:
            remedy = "stay on one mesh, and please report it with the log"
            self.checks.append(failed("other_mesh", value, remedy, Exit.DATA if wrong else Exit.CHECKPOINT))

    def _leftovers(self) -> None:
        found = [f"process {text}" for text in left_processes(self._folder)]
        found += [text for name in ("reference", "faulted") for text in left_files(self._folder / name)]
        if found:
            self.checks.append(failed("leftovers", ", ".join(found), "please report it with the log", Exit.BUG))
        else:
            self.checks.append(passed("leftovers", "no process and no unfinished file is left"))

    # -- the card -----------------------------------------------------------------------------------------------------

    @property
    def recovery_seconds(self) -> float | None:
        """The median over the kills; None: no run recovered from one."""
        return round(statistics.median(self.recoveries.values()), 2) if self.recoveries else None

    def report(self) -> dict[str, Any]:
        """For programs."""
        return {
            "checks": [check.shown() for check in self.checks],
            "recovery_seconds": self.recovery_seconds,
            "recoveries": self.recoveries,
            "goodput": self.goodput.get("goodput"),
            "goodput_seconds": self.goodput.get("seconds"),
            "steps": self.plan.steps,
            "processes": self.plan.processes,
            "mesh": self.mesh,
            "seconds": round(self.seconds, 1),
        }

    def card(self) -> str:
        """For people."""
        width = max(len(check.name) for check in self.checks)
        lines = []
        for check in self.checks:
            lines.append(f"{check.status:<7}  {check.name:<{width}}  {check.value}")
            if check.remedy:
                lines.append(f"{'':<{width + 11}}{check.remedy}")
        bad = sum(check.status == "fail" for check in self.checks)
        end = "passed" if not bad else f"FAILED ({bad} of {len(self.checks)} checks)"
        plural = "" if self.plan.processes == 1 else "es"
        on = f", mesh {mesh_text(self.mesh)}" if self.mesh else ""
        lines.append(
            f"{end}: {self.plan.steps} updates by {self.plan.processes} process{plural}{on}, in {self.seconds:.0f} s"
        )
        if self.recovery_seconds is not None:
            lines.append(f"recovery from a kill: {self.recovery_seconds:.1f} s")
        return "\n".join(lines)


def _use_no_device() -> None:
    """This program reads checkpoints, and leaves the devices to the runs."""
    jax.config.update("jax_platforms", "cpu")
