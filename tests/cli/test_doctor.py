"""`jtrain doctor`: each check against a machine that is made up, and all of them together on this one."""

import json
import os
import re
import socket
import stat
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jtrain.checkpoint import RunLease
from jtrain.cli import doctor, doctor_machine, doctor_run, doctor_storage, tested
from jtrain.cli.doctor_checks import Answer, Check, Examination, examine, output, probe, size
from jtrain.cli.doctor_storage import Needs
from jtrain.cli.main import main
from jtrain.config import load_config
from jtrain.errors import ConfigError, DataError
from jtrain.observe.metrics import Events

ROOT = Path(__file__).parents[2]
GIB = 2**30
NEEDS = Needs(parameters=10**9, checkpoint_bytes=12 * GIB, state_bytes=3 * GIB, gradient_bytes=GIB)


def config_of(**fields):
    return load_config(fields, env={})


@pytest.fixture
def machine(monkeypatch):
    """One CPU device and a small model, as the probes would tell."""
    answers = {
        "devices": Answer({"platform": "cpu", "kinds": {"cpu": 1}, "count": 1, "memory": None, "used": 0}),
        "state": Answer({"parameters": 10, "checkpoint_bytes": 120, "state_bytes": 120, "gradient_bytes": 40}),
    }
    asked = []

    def answer(what, request, seconds):
        asked.append((what, request))
        return answers[what]

    monkeypatch.setattr(doctor_run, "probe", answer)
    monkeypatch.setattr(doctor_storage, "_SAMPLE_BYTES", 1 << 20)
    return SimpleNamespace(answers=answers, asked=asked)


def by_name(checks):
    return {check.name: check for check in checks}


def one(name, checks):
    return by_name(checks)[name]


# -- all of them -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """`doctor CONFIG --json` of this machine, with the probes: the exit code, its checks, and the folder."""
    folder = tmp_path_factory.mktemp("doctor")
    (folder / "a.jsonl").write_text('{"text": "some words"}\n')
    flags = ["--data.train", str(folder / "a.jsonl"), "--run_dir", str(folder / "runs" / "x"), "--seed", "7"]
    secrets = {"HF_TOKEN": "hf_CANARYcanaryCANARYcanary", "AWS_SECRET_ACCESS_KEY": "CANARY-secret"}
    before = set(folder.rglob("*"))
    environment = {**os.environ, **secrets, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    code = (
        "import io, sys, contextlib\nfrom jtrain.cli.main import main\nout = io.StringIO()\n"
        "with contextlib.redirect_stdout(out): code = main(sys.argv[1:])\n"
        "import json; print(json.dumps({'code': code, 'out': out.getvalue()}))"
    )
    command = [sys.executable, "-c", code, "doctor", "cpu-tiny", *flags, "--json"]
    text, failure = output(command, 200, env=environment)
    assert text is not None, failure
    answer = json.loads(text.splitlines()[-1])
    return answer["code"], answer["out"], before, folder


def test_a_run_that_can_begin_passes_and_leaves_nothing_behind(real):
    code, out, before, folder = real
    checks = [Check(**check) for check in json.loads(out)["checks"]]
    failed = [check for check in checks if check.status == "fail"]
    assert code == 0 and not failed
    assert {"config", "versions", "driver", "devices", "host_memory", "model", "device_memory", "run_dir", "disk_space",
            "write_speed", "ports", "clock", "open_files", "locked_memory", "shared_memory", "credentials",
            "compile_cache", "data.train[0]", "tokenizer"} == {check.name for check in checks}  # fmt: skip
    assert all(check.value for check in checks)
    assert all(check.remedy for check in checks if check.status != "ok")
    assert set(folder.rglob("*")) == before


def test_credentials_are_named_and_never_printed(real):
    _, out, _, _ = real
    value = one("credentials", [Check(**check) for check in json.loads(out)["checks"]]).value
    assert "HF_TOKEN present" in value and "AWS_SECRET_ACCESS_KEY present" in value
    assert "CANARY" not in out


def test_the_state_is_that_of_the_run(real):
    """cpu-tiny: AdamW keeps two float32 moments beside float32 parameters, and a few counters."""
    checks = [Check(**check) for check in json.loads(real[1])["checks"]]
    parameters = int(re.search(r"([\d,]+) parameters", one("model", checks).value)[1].replace(",", ""))
    copies, each, unit = re.search(r"(\d+) checkpoints of ([\d.]+) (\w+)", one("disk_space", checks).value).groups()
    assert unit == "MiB" and int(copies) == 4
    assert float(each) * 2**20 == pytest.approx(3 * 4 * parameters, rel=0.02)


def test_without_a_config_the_machine_is_looked_at(machine, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [what for what, _ in machine.asked] == ["devices"]
    assert lines[-1].endswith("0 failed") and any(line.startswith("ok    devices") for line in lines)
    assert os.listdir(tmp_path) == []


def test_a_config_that_is_wrong_has_failed_and_the_machine_is_looked_at_all_the_same(machine, capsys):
    assert main(["doctor", "cpu-tiny", "--optimizer.nam", "adamw", "--json"]) == 64
    checks = [Check(**check) for check in json.loads(capsys.readouterr().out)["checks"]]
    assert one("config", checks).status == "fail" and "optimizer.name" in one("config", checks).remedy
    assert one("devices", checks).status == "ok"


def test_every_mistake_of_a_config_is_told_at_once(machine, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "bad.jsonl").write_text("{\n")
    flags = ["--run_dir", str(tmp_path / "file"), "--data.train", str(tmp_path / "nowhere.txt"), "--data.eval"]
    assert main(["doctor", "cpu-tiny", *flags, str(tmp_path / "bad.jsonl"), "--data.tokenizer", "none.json"]) == 64
    out = capsys.readouterr().out
    failed = re.findall(r"^fail\s+(\S+)", out, re.MULTILINE)
    assert failed == ["run_dir", "data.train[0]", "data.eval[0]", "tokenizer"]
    assert "4 failed" in out


def test_no_check_hangs_or_takes_another_down():
    def hangs():
        time.sleep(60)

    def breaks():
        raise KeyError("x")

    def refuses():
        raise ConfigError("seed: 1 with token=abcdefgh", "write 2")

    begun = time.monotonic()
    checks = examine([
        Examination("first", lambda: Check("first", "ok", "here")),
        Examination("hangs", hangs, 0.3),
        Examination("breaks", breaks),
        Examination("refuses", refuses),
        Examination("several", lambda: [Check("a", "ok", "1"), Check("b", "warn", "2", "3")]),
    ])  # fmt: skip
    assert time.monotonic() - begun < 30
    assert [(check.name, check.status) for check in checks] == [
        ("first", "ok"), ("hangs", "fail"), ("breaks", "fail"), ("refuses", "fail"), ("a", "ok"), ("b", "warn")
    ]  # fmt: skip
    assert "no answer in 0 s" in checks[1].value and "KeyError: 'x'" in checks[2].value
    assert checks[3] == Check("refuses", "fail", "seed: 1 with token=***", "write 2")


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path):
    child = tmp_path / "child"
    script = f"sleep 60 & echo $! > {child}; wait"
    assert output(["bash", "-c", script], 0.5) == (None, "no answer in 0 s")
    number = int(child.read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            break
        if state == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child is alive")
    assert output(["bash", "-c", "echo no GPU >&2; exit 3"], 5) == (None, "no GPU")
    assert output(["bash", "-c", "exit 3"], 5) == (None, "it ended with 3")


def test_a_probe_that_breaks_says_why():
    found, failure = probe("nothing", {}, 60)
    assert found is None and "KeyError" in failure


# -- the machine -------------------------------------------------------------------------------------------------------

TABLE = tested.Tested(
    least={"jax": "0.10.2", "flax": "0.12.8"},
    rows={"3.12": {"flax": "0.12.8", "jax": "0.12.0.1", "jaxlib": "0.12.0"}},
)


@pytest.mark.parametrize(
    ("python", "changes", "status", "words"),
    [
        ("3.12", {}, "ok", "all 3 packages as tested"),
        ("3.12", {"flax": "0.13.0"}, "warn", "flax 0.13.0 (tested: 0.12.8)"),
        ("3.14", {}, "warn", "Python 3.14: not tested"),
        ("3.12", {"flax": "0.12.7"}, "fail", "flax 0.12.7 (at least 0.12.8)"),
        ("3.12", {"flax": "0.9"}, "fail", "flax 0.9 (at least 0.12.8)"),
        ("3.12", {"flax": None}, "fail", "flax is missing"),
        ("3.12", {"jaxlib": "0.11.0"}, "fail", "jax 0.12.0.1 with jaxlib 0.11.0"),
    ],
)
def test_versions_against_the_tested_ones(python, changes, status, words):
    found = {"jax": "0.12.0.1", "jaxlib": "0.12.0", "flax": "0.12.8"} | changes
    check = doctor_machine.versions(TABLE, python, {name: v for name, v in found.items() if v is not None})
    assert check.status == status and words in check.value


def test_the_table_of_tested_versions_is_that_of_this_project():
    table = tested.read()
    assert table.least == tested.least_of(ROOT / "pyproject.toml")
    ci = (ROOT / ".ci" / "run").read_text()
    assert set(table.rows) == set(re.search(r"versions=\((3[\d. ]+)\)", ci)[1].split())
    assert "-m jtrain.cli.tested jtrain/cli/tested.json pyproject.toml" in ci
    for row in table.rows.values():
        assert set(row) == {*table.least, *tested.BESIDE}
        assert all(tested.number(row[name]) >= tested.number(least) for name, least in table.least.items())
    assert table.rows["3.11"]["jax"] == "0.10.2"


def test_ci_writes_the_row_of_its_interpreter(tmp_path, monkeypatch):
    table = tmp_path / "tested.json"
    assert tested.write(table, ROOT / "pyproject.toml") and not tested.write(table, ROOT / "pyproject.toml")
    monkeypatch.setattr(tested, "python_version", lambda: "3.9")
    assert tested.write(table, ROOT / "pyproject.toml")
    rows = tested.read(table).rows
    assert next(iter(rows)) == "3.9" and len(rows) == 2 and rows["3.9"]["numpy"]


@pytest.mark.parametrize(
    ("rows", "status", "words"),
    [
        ("NVIDIA H100, 550.54, 81559, 4, 0\n" * 8, "ok", "8 x NVIDIA H100, driver 550.54"),
        ("NVIDIA H100, 520.1, 81559, 4, 0\n", "fail", "cuda12 needs 525"),
        ("NVIDIA H100, 550.54, 81559, 4, 0\nNVIDIA H100, 550.54, 81559, 4, 3\n", "fail", "errors on GPU 1"),
        ("NVIDIA T4, 550.54, 15000, 9000, [N/A]\n", "warn", "GPU 0 (9000 MiB)"),
        ("", "fail", "nvidia-smi: no answer"),
    ],
)
def test_the_nvidia_driver_as_nvidia_smi_tells(rows, status, words, tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '%b' {json.dumps(rows)}\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    packages = {"jax-cuda12-plugin": "0.12.0", "jaxlib": "0.12.0", "nvidia-nccl-cu12": "2.27.3"}
    monkeypatch.setattr(doctor_machine, "_version", packages.get)
    check, nccl = list(doctor_machine.driver())
    assert check.status == status and words in check.value and bool(check.remedy) == (status != "ok")
    assert nccl == Check("nccl", "ok", "NCCL 2.27.3, jax-cuda12-plugin 0.12.0")


@pytest.mark.parametrize(
    ("packages", "status", "words"),
    [
        ({}, "fail", "no jax plugin"),
        ({"jax-cuda13-plugin": "0.11.0", "jaxlib": "0.12.0"}, "fail", "plugin 0.11.0 with jaxlib 0.12.0"),
        ({"jax-cuda13-plugin": "0.12.0", "jaxlib": "0.12.0"}, "warn", "no NCCL"),
    ],
)
def test_nccl_and_the_plugin_of_jax(packages, status, words, monkeypatch):
    monkeypatch.setattr(doctor_machine, "_version", packages.get)
    extra = "cuda13" if packages else None
    check = doctor_machine.nccl(extra, packages.get("nvidia-nccl-cu13"), packages.get("jax-cuda13-plugin"))
    assert check.status == status and words in check.value and check.remedy


def test_a_plugin_without_a_driver_has_failed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor_machine, "_version", {"jax-cuda12-plugin": "0.12.0"}.get)
    (check,) = doctor_machine.driver()
    assert check.status == "fail" and "no NVIDIA driver" in check.value


def test_limits(monkeypatch, tmp_path):
    limits = {
        doctor_machine.resource.RLIMIT_NOFILE: (256, 1024),
        doctor_machine.resource.RLIMIT_MEMLOCK: (65536, 65536),
    }
    monkeypatch.setattr(doctor_machine.resource, "getrlimit", limits.get)
    monkeypatch.setattr(doctor_machine.os.path, "exists", lambda path: path == "/dev/infiniband")
    files, locked, _ = doctor_machine.ulimits(gpus=True)
    assert files == Check("open_files", "warn", "at most 256", "ulimit -n 1024")
    assert (locked.status, locked.value) == ("warn", "64.0 KiB")
    assert [check.status for check in doctor_machine.ulimits(gpus=False)][1:] == ["ok", "ok"]
    assert doctor_machine.shared_memory(True, str(tmp_path / "none")).status == "warn"
    monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    assert doctor_machine.shared_memory(True, str(tmp_path)).status == "warn"
    assert doctor_machine.shared_memory(False, str(tmp_path)).status == "ok"


@pytest.mark.parametrize(
    ("env", "places", "status"),
    [
        ({}, ["/data/a.txt", "hf:org/name"], "ok"),
        ({}, ["gs://b/a.txt"], "warn"),
        ({}, ["s3://b/a.txt"], "warn"),
        ({"AWS_PROFILE": "CANARY"}, ["s3://b/a.txt"], "ok"),
        ({"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere/CANARY.json"}, ["gs://b"], "warn"),
    ],
)
def test_credentials(env, places, status, tmp_path):
    check = doctor_machine.credentials({"HOME": str(tmp_path), **env}, places)
    assert check.status == status and "CANARY" not in f"{check.value} {check.remedy}"
    assert all(
        f"{name} {'present' if env.get(name) else 'absent'}" in check.value for name in doctor_machine.CREDENTIALS
    )


def test_a_log_in_counts_as_credentials(tmp_path):
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[default]")
    check = doctor_machine.credentials({"HOME": str(tmp_path)}, ["s3://b"])
    assert check.status == "ok" and "AWS_ACCESS_KEY_ID present (logged in)" in check.value


# -- the run -----------------------------------------------------------------------------------------------------------


def there(count=8, memory=None, used=0):
    return {"platform": "gpu", "kinds": {"H100": count}, "count": count, "memory": memory, "used": used}


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"mesh": {"fsdp": 4, "tensor": 2}}, "ok", "8 x H100; mesh fsdp=4 tensor=2"),
        ({"mesh": {"fsdp": 3}}, "fail", "fsdp 3 = 3 does not divide 8 devices"),
        ({"devices": 16}, "fail", "devices: 16"),
        ({"devices": 4}, "warn", "mesh data=4"),
    ],
)
def test_devices_against_the_mesh(fields, status, words):
    check = doctor_run.devices(config_of(**fields), there(), 8, True)
    assert check.status == status and words in check.value and bool(check.remedy) == (status != "ok")


@pytest.mark.parametrize(
    ("memory", "used", "status"),
    [(80 * GIB, 0, "ok"), (5 * GIB, 0, "warn"), (4 * GIB, 0, "fail"), (80 * GIB, 70 * GIB, "fail")],
)
def test_the_state_against_the_memory_of_a_device(memory, used, status):
    """4 GiB of state and gradients; a program gets nine tenths of the memory."""
    check = doctor_run.device_memory(NEEDS, there(memory=memory, used=used), 8, 1)
    assert check.status == status and "4.0 GiB on a device" in check.value


def test_cpu_devices_share_the_memory_of_their_host(monkeypatch):
    monkeypatch.setattr(doctor_run, "available_memory", lambda: 20 * GIB)
    found = there(4) | {"platform": "cpu"}
    assert doctor_run.device_memory(NEEDS, found, 8, 2).status == "ok"  # 4 of the 8 here: 16 GiB
    assert doctor_run.device_memory(NEEDS, there(8), 8, 1).status == "fail"


def test_a_mesh_that_does_not_fit_still_has_a_size(machine, tmp_path):
    config = config_of(mesh={"fsdp": 4, "tensor": 2}, run_dir=str(tmp_path / "run"))
    checks = list(doctor_run.devices_and_memory(config, True))
    assert one("devices", checks).status == "fail" and one("model", checks).status == "ok"
    assert machine.asked[-1][1]["devices"] == 8 and "device_memory" not in by_name(checks)


def test_devices_that_do_not_answer_are_told_of(machine, tmp_path):
    machine.answers["devices"] = Answer(None, "no answer in 90 s")
    machine.answers["state"] = Answer({"failure": "model.path: x is damaged", "remedy": "download it again"})
    checks = list(doctor_run.devices_and_memory(config_of(run_dir=str(tmp_path / "run")), True))
    assert one("devices", checks).status == "fail" and "TPU pod" in one("devices", checks).remedy
    assert one("model", checks) == Check("model", "fail", "model.path: x is damaged", "download it again")
    assert one("disk_space", checks).status == "ok"


def test_ports():
    def check(**section):
        return doctor_run.ports(config_of(distributed=section))

    assert check().status == "ok"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        own = {"num_processes": 2, "process_id": 0}
        assert (found := check(coordinator_address=address, **own)).status == "fail" and "in use" in found.value
    assert check(coordinator_address=address, **own).status == "ok"
    assert check(coordinator_address="192.0.2.1:80", num_processes=2, process_id=1).status == "ok"
    assert check(coordinator_address="192.0.2.1:80", num_processes=2, process_id=0).status == "fail"
    assert check(coordinator_address="192.0.2.1:80", bind_address=address, **own).status == "ok"
    assert check(coordinator_address=f"0.0.0.0:{address.rpartition(':')[2]}", **own).status == "warn"
    assert check(coordinator_address="no.such.host.invalid:80", **own).status == "fail"


def test_the_clock_against_that_of_the_file_system(tmp_path, monkeypatch):
    config = config_of(run_dir=str(tmp_path / "run"))
    assert doctor_storage.clock(config).status == "ok" and os.listdir(tmp_path) == []
    now = time.time
    for skew, word in ((3.0, "3.0 s ahead of"), (-3.0, "3.0 s behind")):
        monkeypatch.setattr(doctor_storage.time, "time", lambda skew=skew: now() + skew)
        check = doctor_storage.clock(config)
        assert check.status == "warn" and word in check.value
    monkeypatch.undo()
    (tmp_path / "run").mkdir()
    Events(tmp_path / "run").emit("start")
    assert doctor_storage.clock(config).status == "ok"
    with open(tmp_path / "run" / "events.jsonl", "a") as file:
        file.write(json.dumps({"event": "end", "time": now() + 100}) + "\n")
    assert "in the future" in doctor_storage.clock(config).value


def test_a_run_directory_that_is_in_use_or_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_storage, "_SAMPLE_BYTES", 1 << 20)
    config = config_of(run_dir=str(tmp_path))
    assert [check.status for check in doctor_storage.run_dir(config, None)] == ["ok"] * 3
    with RunLease(tmp_path):
        (check,) = doctor_storage.run_dir(config, None)
        assert check.status == "fail" and f"process {os.getpid()} on " in check.value
    (tmp_path / "file").write_text("")
    (check,) = doctor_storage.run_dir(config_of(run_dir=str(tmp_path / "file" / "x")), None)
    assert check.status == "fail" and "is a file" in check.value
    assert list(doctor_storage.run_dir(config_of(run_dir=str(tmp_path), fast_dev_run=True), None)) == []


def test_a_run_directory_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(folder):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(doctor_storage, "write_speed", refuse)
    (check,) = doctor_storage.run_dir(config_of(run_dir=str(tmp_path)), NEEDS)
    assert check.status == "fail" and "Read-only" in check.value


@pytest.mark.parametrize(
    ("fields", "free", "status", "words"),
    [
        ({"save_total_limit": 3}, 48, "ok", "4 checkpoints of 12.0 GiB"),
        ({"save_total_limit": 3}, 47, "fail", "4 checkpoints of 12.0 GiB"),
        ({"save_total_limit": 1}, 24, "ok", "2 checkpoints"),
        ({"save_total_limit": 1, "keep_best": 3}, 60, "ok", "5 checkpoints"),  # the newest, three best, one on its way
        ({"save_total_limit": None, "save_steps": 10}, 120, "ok", "10 checkpoints"),
        ({"save_total_limit": None, "save_steps": 10}, 119, "fail", "10 checkpoints"),
        ({"save_total_limit": None, "save_steps": 0.1}, 200, "warn", "all are kept"),
    ],
)
def test_space_for_the_checkpoints_that_are_kept(fields, free, status, words, tmp_path):
    data = {"eval": 0.1} if "keep_best" in fields else {}
    config = config_of(run_dir=str(tmp_path / "run"), max_steps=100, checkpoint=fields, data=data)
    space, _ = doctor_storage.space(config, NEEDS, tmp_path, free * GIB, 1e9)
    assert space.status == status and words in space.value


def test_checkpoints_that_are_there_need_no_more_space(tmp_path):
    step = tmp_path / "checkpoints" / "10"
    step.mkdir(parents=True)
    with open(step / "values", "wb") as file:
        file.truncate(12 * GIB)  # a hole: it takes no space here
    config = config_of(run_dir=str(tmp_path))
    assert one("disk_space", doctor_storage.space(config, NEEDS, tmp_path, 36 * GIB, 1e9)).status == "ok"
    assert one("disk_space", doctor_storage.space(config, NEEDS, tmp_path, 35 * GIB, 1e9)).status == "fail"


def test_a_slow_disk_is_told_of(tmp_path):
    config = config_of(run_dir=str(tmp_path))
    speed = one("write_speed", doctor_storage.space(config, NEEDS, tmp_path, 99 * GIB, 10 << 20))
    assert speed.status == "warn" and "1,228.8 s" in speed.value
    assert doctor_storage.write_speed(tmp_path) > 0 and os.listdir(tmp_path) == []


def test_a_run_directory_in_a_store(tmp_path, monkeypatch):
    from etils import epath

    (check,) = doctor_storage.run_dir(config_of(run_dir="nosuchstore://bucket/run"), None)
    assert check.status == "fail" and "nosuchstore" in check.value and "bucket" in check.remedy
    monkeypatch.setattr(epath, "Path", lambda url: tmp_path / url.partition("://")[2])
    (check,) = doctor_storage.run_dir(config_of(run_dir="gs://bucket/run"), None)
    assert check.status == "ok" and "can be written" in check.value
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"some words", None),
        ("a.jsonl", b'\n{"text": "x"}\n{\n', None),
        ("a.jsonl", b'{"content": "x"}\n', "no text in 'text'; it has content"),
        ("a.jsonl", b"not json\n", "the first record"),
        ("a.jsonl", b"", "holds no record"),
        ("a.parquet", b"PAR1", "a.parquet"),
        ("a.csv", b"a,b", "can't be read as data"),
    ],
)
def test_the_first_record_of_a_source(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    config = config_of()
    if words is None:
        check = doctor_run.data(config, str(tmp_path / name), "data.train[0]")
        assert check.status == "ok" and check.name == "data.train[0]"
    else:
        with pytest.raises(DataError, match=words):
            doctor_run.data(config, str(tmp_path / name), "data.train[0]")


def test_data_that_is_not_there_and_data_of_the_hub(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        doctor_run.data(config_of(), str(tmp_path / "*.txt"), "data.train[0]")
    assert doctor_run.data(config_of(), "hf:org/name", "data.train[0]").status == "ok"
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("x" * 1024)
    assert "3 files, 3.0 KiB" in doctor_run.data(config_of(), str(tmp_path), "data.train[0]").value


def test_the_tokenizer():
    assert doctor_run.tokenizer(config_of()).status == "ok"
    with pytest.raises(DataError):
        doctor_run.tokenizer(config_of(data={"tokenizer": "/nowhere.json"}))


def test_the_compile_cache(tmp_path):
    assert doctor_run.compile_cache(config_of(compile_cache="")).value == "none"
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="another user"):
        doctor_run.compile_cache(config_of(compile_cache=str(tmp_path / "open")))
    (tmp_path / "file").write_text("")
    assert doctor_run.compile_cache(config_of(compile_cache=str(tmp_path / "file" / "x"))).status == "warn"


def test_sizes():
    assert [size(number) for number in (0, 1023, 1536, 2**20, 3 * GIB, 5 * 2**40)] == [
        "0 bytes", "1023 bytes", "1.5 KiB", "1.0 MiB", "3.0 GiB", "5.0 TiB"
    ]  # fmt: skip


def test_help(capsys):
    assert main(["doctor", "--help"]) == 0
    assert "--json" in capsys.readouterr().out and doctor.USAGE in doctor.HELP
