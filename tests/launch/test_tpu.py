"""`jtrain launch tpu` against a gcloud that knows one slice: asked for, waited for, preempted, made again."""

import datetime
import json
import shlex

import pytest

from jtrain.errors import ConfigError, PeerLostError
from jtrain.launch import restarts, tpu
from jtrain.launch.attempt import Outcome
from jtrain.launch.gcloud import Slice, default_runtime
from jtrain.launch.job import make_job
from jtrain.launch.supervisor import Stopped

URL = ("--run_dir", "gs://bucket/run")
SLICE = ("--name", "slice", "--zone", "us-z")
MAKE = (*SLICE, "--create", "--accelerator-type", "v5p-16", "--spot")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(tpu, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(tpu, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(restarts.Restarts.__init__, "__kwdefaults__",
                        restarts.Restarts.__init__.__kwdefaults__ | {"first_delay": 0.01})  # fmt: skip


def launch(run, fake, *words):
    return run("launch", "tpu", "demo", *URL, *words, "--python", fake.python, "--install", "touch installed")


def plain(commands):
    """Commands without the key of their leash, which is another one each time."""
    return {shlex.join(words).partition("--once ")[0] for words in commands}


def test_a_slice_is_made_set_up_trained_on_made_again_after_a_preemption_and_given_back(run, fake):
    state = fake.folder / "state.json"
    fake.runs(f"""
import json, pathlib
state = pathlib.Path({str(state)!r})
at(5, durable=4); say(f'host {{rank}} in {{os.getcwd()}}'); meet(2)
if attempt == 1 and rank == 1:
    gone = json.loads(state.read_text()) | {{"request": "SUSPENDED", "node": "PREEMPTED"}}
    state.with_suffix(".new").write_text(json.dumps(gone))
    state.with_suffix(".new").replace(state)
if attempt == 1:
    time.sleep(60)
at(9, durable=8)
""")
    _, out, _ = launch(run, fake, *MAKE, "--dry-run")
    assert not fake.calls()
    code, _, err = launch(run, fake, *MAKE, "--delete")
    assert code == 0, err
    printed = plain(shlex.split(line.removeprefix("gcloud ")) for line in out.splitlines() if line[0] != "#")
    of_others = {line.replace("--worker=0", "--worker=1") for line in printed}
    again = {line.replace("JTRAIN_ATTEMPT=1", "JTRAIN_ATTEMPT=2") for line in printed | of_others}
    told = {line for line in plain(fake.calls()) if "JTRAIN_LAST_END" not in line}
    assert printed <= told <= printed | of_others | again
    verbs = [call[3] for call in fake.calls("queued-resources") if call[3] != "describe"]
    assert verbs == ["create", "delete", "create", "delete"]
    assert "waiting for resources" in err and "the slice slice is preempted" in err
    assert "steps 5 to 5, durable 4, 1 to make again" in err and "from step 4 (preempted" in err
    assert f"[1] host 1 in {fake.folder}/host1/jtrain-run" in err and "done: exit 0 after 2 attempts" in err
    install = [call for call in fake.calls("ssh", "--worker=all") if "touch installed" in str(call)]
    assert len(install) == 2  # of each slice
    (create, _) = fake.calls("queued-resources", "create")
    assert {"--spot", "--accelerator-type=v5p-16", "--runtime-version=v2-alpha-tpuv5", "--node-id=slice"} <= set(create)
    assert (fake.folder / "trained").read_text().splitlines() == [
        "-m jtrain train demo --run_dir gs://bucket/run"
    ] * 4  # fmt: skip


def test_a_slice_that_is_there_is_used_and_the_exit_code_comes_through_ssh(run, fake):
    (fake.folder / "state.json").write_text(json.dumps({"request": None, "node": "READY", "made": 1}))
    fake.runs("rank == 0 and say('error: data.train: nothing there'); sys.exit(12 if rank else 65)")
    code, _, err = launch(run, fake, *SLICE)
    assert code == 65 and "rank 0 (slice/0): data.train: nothing there" in err
    assert not fake.calls("create") and not fake.calls("delete") and not fake.calls("queued-resources")


@pytest.mark.faults
def test_a_maintenance_is_told_of_and_the_run_saves_shortly_before_it(run, fake):
    soon = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=5)).isoformat()
    ready = {"request": None, "node": "READY", "made": 1}
    (fake.folder / "state.json").write_text(json.dumps(ready))
    notice = ready | {"more": {"upcomingMaintenance": {"windowStartTime": soon, "type": "UNSCHEDULED"}}}
    fake.runs(f"""
saves_on_sigterm(); at(5, durable=5); meet(2)
if rank == 0:
    open({str(fake.folder / "new")!r}, "w").write({json.dumps(notice)!r})
    os.replace({str(fake.folder / "new")!r}, {str(fake.folder / "state.json")!r})
time.sleep(60 if attempt == 1 else 0)
""")
    code, _, err = launch(run, fake, *SLICE)
    assert code == 0 and f"maintenance of slice from {soon} on (unscheduled): the run saves" in err
    assert "exit 10: maintenance" in err and "from step 5 (preempted, which counts for nothing)" in err


@pytest.mark.parametrize("node, code", [("PREEMPTED", 11), (None, 11), ("READY", 255)])
def test_a_broken_connection_to_a_slice_that_is_gone_is_a_preemption(node, code, fake):
    (fake.folder / "state.json").write_text(json.dumps({"request": None, "node": node, "made": 1}))
    platform = tpu.Tpu(make_job("demo", URL), Slice("slice", "us-z"), tpu.Setup())
    outcome = Outcome(code=255)
    platform.ended(outcome)
    assert outcome.code == code


def test_a_maintenance_far_ahead_is_told_of_once(tmp_path):
    job = make_job("demo", URL)
    platform = tpu.Tpu(job, Slice("s", "z"), tpu.Setup())
    node = {"upcomingMaintenance": {"windowStartTime": "2999-01-01T00:00:00Z", "type": "SCHEDULED"}}
    assert platform._maintenance_of(node) == ("say", "maintenance of s from 2999-01-01T00:00:00Z on (scheduled)")
    assert platform._maintenance_of(node) is None and platform._maintenance_of({}) is None


@pytest.mark.faults
def test_config_and_data_are_copied_with_their_folder(run, fake, tmp_path):
    project = tmp_path / "project"
    (project / "data").mkdir(parents=True)
    (project / "data" / "a.txt").write_text("text")
    (project / "run.yaml").write_text("data: {train: [data/a.txt]}\nmax_steps: 3\nrun_dir: gs://bucket/run\n")
    (fake.folder / "state.json").write_text(json.dumps({"request": None, "node": "READY", "made": 1}))
    fake.runs("at(1); assert open('data/a.txt').read() == 'text'")
    for host in (0, 1):
        (fake.folder / f"host{host}").mkdir()
    words = ("launch", "tpu", str(project / "run.yaml"), *SLICE, "--python", fake.python, "--install", "")
    code, _, err = run(*words)
    assert code == 64 and "a.txt is on this machine alone" in err and "--copy" in err
    code, _, err = run(*words, "--copy", str(project))
    assert code == 0, err
    assert (fake.folder / "trained").read_text().splitlines() == ["-m jtrain train run.yaml"] * 2


def test_it_leaves_when_asked_to_while_it_waits_for_the_slice(fake):
    platform = tpu.Tpu(make_job("demo", URL), Slice("slice", "us-z", accelerator_type="v5p-8"), tpu.Setup())
    asked = iter([0, 0, 1])
    with pytest.raises(Stopped):
        platform.workers({}, lambda: next(asked))


@pytest.mark.parametrize(
    "state, kind, text",
    [
        ({"request": "FAILED", "node": None}, ConfigError, "the request for slice has failed"),
        ({"request": "ODD", "node": None}, PeerLostError, "in state ODD"),
    ],
)
def test_a_request_that_can_not_be_met_ends_with_its_reason(state, kind, text, fake):
    (fake.folder / "state.json").write_text(json.dumps(state | {"made": 0}))
    platform = tpu.Tpu(make_job("demo", URL), Slice("slice", "us-z", accelerator_type="v5p-8"), tpu.Setup())
    with pytest.raises(kind, match=text):
        platform.workers({}, lambda: 0)


@pytest.mark.parametrize(
    "words, expected",
    [
        ((), "--name is missing"),
        (("--name", "a"), "--zone is missing"),
        (SLICE, "would lie on the disks of the slice"),
        ((*SLICE, *URL, "--create"), "--accelerator-type v5p-64"),
        ((*SLICE, *URL, "--spot"), "without --create"),
        ((*SLICE, *URL, "--create", "--accelerator-type", "h100-8"), "Known: v2"),
        ((*SLICE, *URL, "--internal-ip", "--iap"), "Keep one of them"),
        ((*SLICE, *URL, "--copy", "/no/such"), "is no folder"),
        ((*SLICE, *URL, "--data.train", "mine.txt"), "mine.txt is on this machine alone"),
        ((*SLICE, *URL), "there is no such slice"),
    ],
)
def test_mistakes_are_answered_before_a_machine_is_paid_for(words, expected, run, fake):
    code, _, err = run("launch", "tpu", "demo", *words)
    assert code == 64 and expected in err and not fake.calls("create") and not fake.calls("ssh")


def test_without_gcloud_the_remedy_is_said(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = run("launch", "tpu", "demo", *SLICE, *URL)
    assert code == 64 and "gcloud is not on PATH" in err and "--dry-run" in err


def test_what_gcloud_says_of_a_mistake_is_passed_on(run, fake, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "gcloud"
    program.write_text("#!/bin/sh\necho 'ERROR: (gcloud) You do not currently have an active account' >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    code, _, err = run("launch", "tpu", "demo", *SLICE, *URL)
    assert code == 64 and "active account" in err and "Try it: gcloud compute tpus tpu-vm describe slice" in err


def test_a_host_gets_an_environment_with_the_project_or_a_release(tmp_path):
    assert "jtrain[tpu]==1.2" in tpu.install_command(str(tmp_path), "1.2")
    (tmp_path / "pyproject.toml").touch()
    assert "'.[tpu]'" in tpu.install_command(str(tmp_path), "1.2")


def test_runtimes_of_known_types():
    assert default_runtime("v6e-16") == "v2-alpha-tpuv6e" and default_runtime("v4-32") == "tpu-ubuntu2204-base"
