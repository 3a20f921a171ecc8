"""`jtrain launch local` and the hosts of a run."""

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jtrain.cli.launch import LAUNCHERS
from jtrain.config import layers, names
from jtrain.errors import ConfigError
from jtrain.launch.attempt import Outcome
from jtrain.launch.hosts import OUT_SECONDS, Hosts, parse_hosts
from jtrain.launch.job import make_job
from jtrain.launch.local import Local, gpu_shares
from tests.launch.test_supervisor import gone

ROOT = Path(__file__).parents[2]


# -- hosts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text, expected", [("2", (2, 2)), ("2:4", (2, 4)), (" 1 ", (1, 1))])
def test_hosts_are_a_number_or_a_least_and_a_most(text, expected):
    assert parse_hosts(text) == expected


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_lost_host_is_left_out_until_its_time_is_over():
    clock = Clock()
    hosts = Hosts(list("abcd"), 2, clock=clock)
    assert hosts.choose() == list("abcd")
    hosts.lost("b")
    assert hosts.choose() == list("acd") and hosts.back() is None
    clock.now = OUT_SECONDS
    assert hosts.back() == "b" and hosts.choose() == list("abcd")
    hosts.lost("b")  # again: for twice as long
    clock.now += 1.5 * OUT_SECONDS
    assert hosts.choose() == list("acd")


def test_when_too_few_are_there_the_one_that_is_due_next_is_tried():
    clock = Clock()
    hosts = Hosts(list("abc"), 2, clock=clock)
    hosts.lost("a")
    clock.now = 1.0
    hosts.lost("c")
    assert hosts.choose() == ["a", "b"]


def test_the_run_takes_as_many_hosts_as_it_can_be_divided_over():
    asked = []
    hosts = Hosts(list("abcd"), 1, lambda count: asked.append(count) or ("3 is odd" if count == 3 else None))
    hosts.lost("d")
    assert hosts.choose() == ["a", "b"]
    assert [hosts.back() for _ in range(9)] == [None] * 9 and asked == [3, 2]  # each number once
    with pytest.raises(ConfigError, match="over 1 to 4 hosts; 4 hosts: no"):
        Hosts(list("abcd"), 1, lambda count: "no").choose()


# -- commands ---------------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_every_command_with_one_meeting_place(run):
    code, out, err = run("launch", "local", "cpu-tiny", "--hosts", "2", "--devices", "2", "--dry-run")
    commands = [line for line in out.splitlines() if not line.startswith("#")]
    assert code == 0 and len(commands) == 2 and not err
    assert len({command.split("COORDINATOR_ADDRESS=")[1].split()[0] for command in commands}) == 1
    for rank, command in enumerate(commands):
        assert f"JTRAIN_DISTRIBUTED__PROCESS_ID={rank} " in command and "JTRAIN_SUPERVISED=1" in command
        assert command.endswith(f"-m jtrain.launch.leash {sys.executable} -m jtrain train cpu-tiny --devices 2")


def test_each_attempt_has_another_port_and_fewer_hosts_have_their_own_devices_alone():
    job = make_job("cpu-tiny", ["--devices", "4", "--mesh", "data=-1"])
    local = Local(job, 2, 4)
    first = local.workers({})
    local.ended(Outcome(code=-9, lost_host="local1"))
    second = local.workers({})
    name = "JTRAIN_DISTRIBUTED__COORDINATOR_ADDRESS"
    places = [{worker.environment[name] for worker in attempt} for attempt in (first, second)]
    assert all(len(place) == 1 for place in places) and places[0] != places[1]
    # 8 rows of a batch go over 4 and over 2 devices, and not over 3.
    assert [w.host for w in second] == ["local0", "local2"]
    assert [w.command[-2:] for w in first + second] == [["--devices", "4"]] * 4 + [["--devices", "2"]] * 2
    assert [w.environment["JTRAIN_DISTRIBUTED__PROCESS_ID"] for w in second] == ["0", "1"]


def test_gpus_are_divided_over_the_processes(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,4,5")
    assert gpu_shares(2) == ["0,1", "4,5"] and gpu_shares(1) is None
    with pytest.raises(ConfigError, match="4 GPUs can't be divided over 3"):
        gpu_shares(3)


def test_a_launched_run_whose_process_is_killed_ends_well(run, fake, monkeypatch):
    monkeypatch.setattr("jtrain.launch.local.sys.executable", fake.python)
    fake.runs_shell("meet; [ $rank = 0 ] && [ $attempt = 1 ] && exit 12; [ $attempt = 2 ] || kill -9 $$")
    code, _, err = run("launch", "local", "demo", "--hosts", "2", "--max-infra-restarts", "1")
    assert code == 0, err
    assert "exit 12: rank 1 (local1): killed by SIGKILL" in err and "done: exit 0 after 2 attempts" in err
    trained = (fake.folder / "trained").read_text().splitlines()
    assert trained == ["-m jtrain train demo --max-infra-restarts 1"] * 4


@pytest.mark.faults
def test_an_elastic_run_goes_on_with_what_is_there(run, fake, monkeypatch):
    monkeypatch.setattr("jtrain.launch.local.sys.executable", fake.python)
    fake.runs_shell("[ $attempt = 2 ] || { [ $rank = 3 ] && kill -9 $$; sleep 60; }")
    words = ("--hosts", "2:4", "--devices", "4", "--mesh", "data=-1")
    code, _, err = run("launch", "local", "cpu-tiny", *words)
    assert code == 0, err
    assert "attempt 1: 4 processes on local0, local1, local2, local3" in err
    assert "attempt 2: 2 processes on local0, local1" in err  # 8 rows can't be divided over 3
    trained = (fake.folder / "trained").read_text().splitlines()
    assert [line.rpartition(" ")[2] for line in trained] == ["4"] * 4 + ["2"] * 2


def test_every_command_of_the_page_can_be_looked_at(run):
    page = (ROOT / "docs" / "launch.md").read_text()
    blocks = "".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL)).replace("\\\n", " ")
    commands = [shlex.split(line)[1:] for line in blocks.splitlines()]
    assert {command[1] for command in commands} == {"local", "tpu", "slurm", "gke"}
    for command in commands:
        code, out, err = run(*command, *([] if "--dry-run" in command else ["--dry-run"]))
        assert code == 0 and out and not err


@pytest.mark.parametrize(
    "argv, expected",
    [
        ("", 0),
        ("lokal demo", "Did you mean local"),
        ("local", "CONFIG is missing"),
        ("local nothing", "no recipe 'nothing'"),
        ("local missing.yaml", "does not exist"),
        ("local demo more", "one argument too many"),
        ("local demo --hosts", "no value"),
        ("local demo --hosts 0", "a run needs a host"),
        ("local demo --hosts 4:2", "Write --hosts 2:4"),
        ("local demo --hosts two", "no number of hosts"),
        ("local demo --hosts -1", "no number of hosts"),
        ("local demo --hosts 3", "Write devices: 9"),
        ("local demo --hosts 2:4", "an axis of -1"),
        ("local cpu-tiny --hosts 2:4 --devices 6 --mesh data=-1 --global_batch_size 12", "Write devices: 8"),
        ("local demo --hosts 2 --accelerator tpu --devices auto", "jtrain launch tpu"),
        ("local demo --dry-run=yes", "takes no value"),
        ("local demo --distributed.process_id 0", "the launcher sets"),
        ("local demo --checkpoint.resume never", "--max-restarts 0"),
        ("local demo --max-restarts -1", "at least 0"),
        ("local demo --faults.watchdog_minutes 1", "at least 3"),
        ("local demo --max_step 3", "Did you mean --max_steps"),
        ("local demo --hots 3", "Did you mean --hosts"),
    ],
)
def test_mistakes_are_answered_before_anything_starts(argv, expected, run):
    code, out, err = run("launch", *argv.split())
    if expected == 0:
        assert code == 0 and "gke" in out
    else:
        assert code == 64 and expected in err and "Traceback" not in err


@pytest.mark.parametrize("name", LAUNCHERS)
def test_options_stand_in_the_help_and_hide_no_field(name, run):
    options = importlib.import_module(f"jtrain.cli.launch_{name}").OPTIONS
    code, out, _ = run("launch", name, "--help")
    assert code == 0 and all(re.search(rf"--{option}\b", out) for option in options)
    assert not [option for option in options if layers.known(names.plain(option))]


def test_an_elastic_run_needs_a_batch_that_does_not_follow_from_the_hosts(tmp_path):
    (tmp_path / "c.yaml").write_text("accelerator: cpu\nmax_steps: 3\nper_device_batch_size: 4\n")
    with pytest.raises(ConfigError) as error:
        Local(make_job(str(tmp_path / "c.yaml"), []), 2, 4)
    assert "4 x 1 = 4 rows a data-parallel rank, so 2 hosts would train with 2/4" in error.value.message


def test_a_supervisor_imports_no_jax():
    modules = ", ".join(f"jtrain.cli.{name}" for name in ("main", *(f"launch_{x}" for x in LAUNCHERS)))
    script = f"import sys, {modules}; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


# -- ends -------------------------------------------------------------------------------------------------------------

ORPHANS = """
import sys
from jtrain.launch.attempt import Limits
from jtrain.launch.restarts import Restarts
from jtrain.launch.supervisor import Supervisor
from tests.launch.test_supervisor import Scripts
script = "import subprocess; child = subprocess.Popen(['sleep', '60']); print(os.getpid(), child.pid); time.sleep(60)"
sys.exit(Supervisor(Scripts(script, script), Restarts(0, 0), Limits({})).run())
"""


def test_nothing_is_left_when_the_supervisor_is_killed(tmp_path):
    supervisor = subprocess.Popen(
        [sys.executable, "-c", ORPHANS], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=os.environ | {"MEET": str(tmp_path), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    lines = [supervisor.stdout.readline() for _ in range(2)]
    pids = [int(word) for line in lines for word in line.split() if word.isdigit()]
    assert len(pids) == 4 and not any(gone_now(pid) for pid in pids)
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()
    assert all(gone(pid) for pid in pids)


def gone_now(pid):
    return not Path(f"/proc/{pid}").exists()


def test_a_worker_dies_with_its_leash():
    leash = subprocess.Popen(
        [sys.executable, "-m", "jtrain.launch.leash", sys.executable, "-c",
         "import os, time; print(os.getpid(), flush=True); time.sleep(60)"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    pid = int(leash.stdout.readline())
    leash.send_signal(signal.SIGKILL)
    leash.wait()
    assert gone(pid)
    leash.stdin.close()
    leash.stdout.close()


@pytest.mark.parametrize("ends, code", [("os._exit(13)", 13), ("os.kill(os.getpid(), 9)", 137)])
def test_what_a_worker_leaves_behind_ends_with_it_and_its_code_is_told(ends, code):
    script = f"import os, subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); {ends}"
    command = [sys.executable, "-m", "jtrain.launch.leash", sys.executable, "-c", script]
    leash = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid = int(leash.stdout.readline())
    assert leash.wait(20) == code and gone(pid)
    leash.stdin.close()
    leash.stdout.close()
