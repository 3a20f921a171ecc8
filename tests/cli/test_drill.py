"""`jtrain drill`: what it looks at finds what is wrong, and the rehearsal of a run leaves the run alone."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from jtrain.checkpoint import Checkpoints
from jtrain.cli import drill_checks as look
from jtrain.cli import drill_rehearsal, drill_runs
from jtrain.cli.drill import rehearsable
from jtrain.cli.drill_rehearsal import Drill
from jtrain.cli.drill_runs import Plan, Ran
from jtrain.cli.main import main
from jtrain.config import load_config
from jtrain.launch.attempt import Outcome
from tests.faults.runs import ROOT, config_of

PLAN = Plan("demo", (), 8, 2)


# -- what can't be rehearsed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("demo --run_dir gs://bucket/run", "is a URL"),
        ("demo --data.train=[]", "data.train is empty"),
        ("demo --steps 9", "Write a multiple of four"),
        ("demo --distributed.num_processes 2", "sets where its processes meet"),
        ("", "CONFIG is missing"),
        ("demo --processes 3", "devices: 8 over 3 processes"),
    ],
)
def test_a_run_that_cannot_be_rehearsed_is_told_why(words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["drill", *words.split()]) == 64
    assert says in capsys.readouterr().err
    assert list(tmp_path.glob("runs/*")) == []


def test_a_folder_that_cannot_be_written_ends_with_14(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["drill", "demo", "--run_dir", str(tmp_path / "file" / "run")]) == 14
    assert "can't be written" in capsys.readouterr().err


# -- how a config is shortened ----------------------------------------------------------------------------------------


def shortened(*flags, **changes):
    plan = replace(PLAN, flags=flags, **changes)
    return load_config(plan.source, plan.shortened(Path("/somewhere/else")))


def test_a_rehearsal_is_short_and_writes_beside_the_run():
    config = shortened("--max_steps", "1000000", "--checkpoint.save_minutes", "5", "--run_dir", "/real")
    assert (config.max_steps, config.run_dir, config.checkpoint.save_minutes) == (8, "/somewhere/else", None)
    assert (config.checkpoint.save_steps, config.eval.eval_steps, config.eval.max_batches) == (2, 2, 2)
    assert config.eval.sample_prompts == config.logging.trackers == () and config.logging.log_every_n_steps == 1
    real = load_config("demo")
    for section in ("model", "data", "optimizer", "mesh"):
        assert getattr(config, section) == getattr(real, section)


@pytest.mark.parametrize("warmup", [2000, "1e9 tokens", 0.1, 1])
def test_a_warmup_longer_than_the_rehearsal_is_cut_to_a_quarter_of_it(warmup):
    schedule = shortened("--schedule.name", "wsd", "--schedule.warmup_steps", str(warmup), "--schedule.decay_steps",
                         "500", "--max_steps", "100000").schedule  # fmt: skip
    assert schedule.warmup_steps == (warmup if warmup in (0.1, 1) else 2) and schedule.decay_steps == 2


def test_a_process_holds_the_chips_of_a_tpu_machine_alone():
    assert drill_runs.processes_of(PLAN, Path("/x")) == 2
    assert drill_runs.processes_of(replace(PLAN, source="cpu-tiny"), Path("/x")) == 1  # one device
    tpu = replace(PLAN, source="llama3-8b", flags=("--accelerator", "tpu", "--devices", "auto"))
    assert drill_runs.processes_of(tpu, Path("/x")) == 1


def mesh_flags(plan, mesh):
    config = load_config(plan.source, plan.flags)
    return [" ".join(flags) for flags in look.other_meshes(config, mesh, plan, Path("/x"))]


def test_another_mesh_is_one_that_differs_and_that_the_config_allows():
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    assert mesh_flags(PLAN, mesh) == ["--mesh data=8", "--mesh fsdp=4,tensor=2", "--mesh data=4,tensor=2"]
    few_rows = replace(PLAN, flags=("--global_batch_size", "4"))  # not divisible by eight
    assert mesh_flags(few_rows, mesh)[0] == "--mesh fsdp=4,tensor=2"
    one = Plan("cpu-tiny", (), 8, 1)
    assert mesh_flags(one, {"data": 1}) == ["--mesh data=2 --devices 2"]
    assert mesh_flags(replace(one, flags=("--accelerator", "auto", "--devices", "auto")), {"data": 1}) == []


# -- what is looked at ------------------------------------------------------------------------------------------------


def ran(folder, name, **fields):
    run = Ran(folder / name, folder / f"{name}.rows", folder / f"{name}.log", **fields)
    run.run_dir.mkdir()
    run.ledger.mkdir()
    return run


def save(run, step=4, **changes):
    state = {"w": np.arange(6, dtype=np.float32), "b": np.ones((2, 2), np.float32), **changes}
    counters = {"step": step, "skipped": 0, "tokens": 5, "examples": 6, "owes_evaluation": bool(changes)}
    with Checkpoints(run.run_dir) as checkpoints:
        checkpoints.save(step, {name: np.asarray(value) for name, value in state.items()}, {"counters": counters})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"w": np.asarray([0, 1, 2, 3, 4, np.nextafter(np.float32(5), 6)], np.float32)}, "w: 1 of 6 numbers"),
        ({"b": np.ones(4, np.float32)}, "b: shape or type"),
    ],
    ids=["equal", "one bit", "shape"],
)
def test_bits_that_differ_are_named(changes, says, tmp_path):
    ours, reference = ran(tmp_path, "ours"), ran(tmp_path, "reference")
    save(ours, **changes)
    save(reference)
    check = look.bits(ours, reference)
    if says is None:
        assert (check.status, check.code) == ("ok", 0) and "all 2 arrays" in check.value
    else:
        assert (check.status, check.code) == ("fail", 66) and says in check.value


def test_a_final_checkpoint_that_is_damaged_fails(tmp_path):
    ours, reference = ran(tmp_path, "ours"), ran(tmp_path, "reference")
    save(ours)
    save(reference)
    next((ours.run_dir / "checkpoints" / "4" / "meta").glob("metadata")).unlink()
    assert look.bits(ours, reference).code == 66


def note(run, checksums, steps=None):
    lines = [{"kind": "start", "batch": 0}]
    for batch, number in enumerate(checksums):
        lines += [{"kind": "read", "batch": batch, "checksum": f"{number:x}"}, {"kind": "done", "batch": batch,
                                                                               "step": batch + 1}]  # fmt: skip
    lines = [line for line in lines if steps is None or line.get("step", steps[0]) in steps]
    (run.ledger / "rows-0.jsonl").write_text("".join(json.dumps(line | {"time": 1.0}) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("checksums", "steps", "says"),
    [
        ([1, 2, 3], None, None),
        ([1, 7, 3], None, "update 2 has read other rows"),
        ([1, 2, 3], [1, 3], "updates [1, 3] were made, not 1 to 3"),
    ],
    ids=["equal", "other rows", "an update missing"],
)
def test_rows_that_differ_are_told(checksums, steps, says, tmp_path):
    ours, reference = ran(tmp_path, "ours"), ran(tmp_path, "reference")
    note(ours, checksums, steps)
    note(reference, [1, 2, 3])
    wrong, found = look.rows("rows", ours, reference, 1, 3)
    assert (wrong is None) == (says is None)
    assert says is None or says in wrong
    assert found == "updates 1 to 3 have read the reference's rows, once each"


@pytest.mark.parametrize("told, status", [(99.0, "ok"), (90.0, "fail")])
def test_a_ledger_of_time_that_misses_the_clock_fails(told, status, tmp_path):
    now = time.time()
    run = ran(tmp_path, "run", began=now - 100)
    line = {"event": "goodput", "time": now, "goodput": 0.5, "seconds": {"step": told / 2, "init": told / 2}}
    (run.run_dir / "events.jsonl").write_text(json.dumps(line) + "\n")
    check, last = look.goodput(run)
    assert check.status == status and "in all, 100.0 s by the clock" in check.value
    assert last["goodput"] == 0.5


def test_losses_deviate_by_the_largest_step_and_a_missing_one_counts():
    assert look.deviation({1: 2.0, 2: 4.1}, {1: 2.0, 2: 4.0}, [1, 2]) == pytest.approx(0.025)
    assert look.deviation({1: 2.0}, {1: 2.0, 2: 4.0}, [1, 2]) == float("inf")
    assert look.tolerance(load_config("demo")) == 1e-5
    assert look.tolerance(load_config("demo", ["--precision", "bf16-mixed"])) == 2e-2


def test_each_process_is_killed_in_turn_just_before_a_save_and_one_is_asked_to_leave():
    drill = Drill(PLAN, load_config("demo"), Path("/x"), print)
    strikes = [(s["rank"], s["signal"], s["update"], s["durable"]) for s in drill._strikes()]
    assert strikes == [(1, "SIGKILL", 4, 2), (0, "SIGKILL", 6, 4), (1, "SIGTERM", 6, 4)]
    drill = Drill(replace(PLAN, processes=1), load_config("demo"), Path("/x"), print)
    assert [s["rank"] for s in drill._strikes()] == [0, 0]


def test_a_run_that_does_not_work_ends_the_rehearsal_with_its_exit_code(tmp_path, monkeypatch):
    def run_plan(plan, folder, name, *more, **named):
        run = ran(folder, name, code=65)
        run.outcomes.append(Outcome(code=65))
        return run

    monkeypatch.setattr(drill_rehearsal, "run_plan", run_plan)
    drill = Drill(PLAN, load_config("demo"), tmp_path, lambda text: None)
    assert drill.run() == 65
    assert [(check.name, check.status) for check in drill.checks] == [("reference", "fail"), ("leftovers", "ok")]
    assert "FAILED (1 of 2 checks)" in drill.card()


def test_a_process_and_a_file_that_are_left_are_found(tmp_path):
    (tmp_path / "run" / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "_trash").mkdir()
    assert drill_runs.left_files(tmp_path / "run") == ["checkpoints/4.orbax-checkpoint-tmp"]
    if not Path("/proc/self/environ").exists():
        pytest.skip("no /proc")
    left = subprocess.Popen(["sleep", "60"], env=os.environ | {drill_runs.MARK: str(tmp_path)})
    try:
        deadline = time.monotonic() + 10
        while not (found := drill_runs.left_processes(tmp_path)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert found == [f"{left.pid} (sleep)"]
    finally:
        left.kill()
        left.wait()


def test_a_config_whose_run_is_elsewhere_is_only_read(tmp_path):
    assert rehearsable("demo", ["--run_dir", str(tmp_path / "run")]).run_dir == str(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


# -- whole rehearsals -------------------------------------------------------------------------------------------------

LINE = """
import os, sys
if sys.orig_argv[1:3] == ["-m", "jtrain.cli.drill_worker"]:
    from tests.faults.linear_run import install
    install()
"""
SHIFTED = """
    if os.environ["JTRAIN_ATTEMPT"] != "1":
        from jtrain.data.loader import DataLoader
        get = DataLoader.get
        DataLoader.get = lambda self, step, give_up: get(self, step + 1, give_up)
"""


def rehearse(folder, *options, worker=LINE):
    """Rehearses a run of the linear model, whose directory is there and holds a file: code, report, what was told."""
    config = config_of(folder, data={"train": [str(folder / "rows.txt")], "shuffle": True}, max_steps=1000)
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    (folder / "sitecustomize.py").write_text(worker)
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text("the real one\n")
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": f"{folder}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "jtrain", "drill", str(folder / "run.yaml"), "--json", *options],
        cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=540, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("{"), done.stderr
    assert (folder / "run" / "config.yaml").read_text() == "the real one\n"
    assert [path.name for path in (folder / "run").iterdir()] == ["config.yaml"]
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.faults
@pytest.mark.timeout(580)
def test_a_rehearsal_of_two_processes_passes_and_leaves_nothing(tmp_path):
    code, report, told = rehearse(tmp_path)
    assert code == 0, (report, told)
    statuses = {check["name"]: check["status"] for check in report["checks"]}
    names = ["reference", "kill_rank_1", "kill_rank_0", "preemption", "resume", "bits", "rows", "goodput",
             "other_mesh", "leftovers"]  # fmt: skip
    assert statuses == dict.fromkeys(names, "ok")
    assert report["recovery_seconds"] > 0 and set(report["recoveries"]) == {"kill_rank_0", "kill_rank_1"}
    assert 0 < report["goodput"] < 1 and report["processes"] == 2 and report["mesh"]["data"] == 2
    assert not list(tmp_path.glob("run.drill-*"))


@pytest.mark.faults
@pytest.mark.timeout(580)
def test_a_run_that_reads_other_rows_after_a_restart_fails_and_its_folder_stays(tmp_path):
    code, report, told = rehearse(tmp_path, "--processes", "1", "--devices", "1", worker=LINE + SHIFTED)
    failed = {check["name"] for check in report["checks"] if check["status"] == "fail"}
    assert code == 66 and failed == {"bits", "rows"}, (report, told)
    (folder,) = tmp_path.glob("run.drill-*")
    assert (folder / "faulted.log").exists() and str(folder) in told
