"""D1 to D6, L1 to L3: a disk that is full, read-only, broken, slow or gone under a run; a second run in its place.

Runs of one process (two where processes have to agree), in mounts and under strace where the machine lets us.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from jtrain.checkpoint import files
from jtrain.errors import StorageError
from jtrain.observe.metrics import read_metrics
from tests.faults.runs import ROOT, codes, config_of, durable, events, said, start
from tests.parity.launch import Running
from tests.parity.test_kill import result
from tests.train.fits import make

full = pytest.mark.faults
PARTS = ("step", "counters", "lines", "bits")


def config_for(folder, **changes):
    return config_of(folder, **{"devices": 1, "eval": {"eval_steps": 0}, **changes})


def start_one(config, name, *before, folder=None, out=None, **environment):
    """`jtrain train` of one process, behind the words of another program where they are given."""
    folder = folder or Path(config["run_dir"]).parent
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    with (folder / f"{name}.out").open("wb") as own, (folder / f"{name}.err").open("wb") as err:
        process = subprocess.Popen(
            [*before, sys.executable, str(Path(__file__).with_name("linear_run.py")), "train", str(path)],
            cwd=folder,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)} | environment,
            stdin=subprocess.DEVNULL,
            stdout=own if out is None else out,
            stderr=err if out is None else out,
        )
    return Running(process, folder, name)


def wait_until(true, running, seconds=400):
    deadline = time.monotonic() + seconds
    while not true():
        assert running.process.poll() is None and time.monotonic() < deadline, said([running])
        time.sleep(0.01)


def ends(running, code):
    assert codes([running], 400) == [code], said([running])


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """What a run of one process ends with that nothing happens to."""
    config = config_for(tmp_path_factory.mktemp("alone"))
    ends(start_one(config, "whole"), 0)
    return result(config)


def goes_on_alone(config, alone):
    ends(start_one(config, "again"), 0)
    is_whole(config, alone)


def is_whole(config, alone):
    found = result(config)
    for part in PARTS:
        assert found[part] == alone[part], part
    assert_clean(Path(config["run_dir"]) / "checkpoints")


def assert_clean(checkpoints):
    """O6: there is no file but those of steps."""
    paths = [path.relative_to(checkpoints) for path in checkpoints.rglob("*") if path.is_file()]
    assert [str(path) for path in paths if not path.parts[0].isdigit()] == []


@pytest.fixture
def mounted():
    """`mounted(folder, options)` mounts a tmpfs there."""
    places = []

    def mount(folder, options):
        if os.getuid() != 0:
            pytest.skip("only root can mount")
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True)
        if done.returncode:
            pytest.skip("mount is not allowed here")
        places.append(folder)
        return folder

    yield mount
    for folder in reversed(places):
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def traced(running, inject):
    """strace on a running process, with a fault; it ends with the block."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    calls = inject.partition(":")[0]
    tracer = subprocess.Popen(
        ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}", "-e", f"inject={inject}",
         "-p", str(running.process.pid)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    time.sleep(0.3)
    if tracer.poll() is not None:
        pytest.skip(f"ptrace is not allowed here: {tracer.stderr.read()[:200]!r}")
    try:
        yield
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.wait()
        tracer.stderr.close()


def fill(folder, leave):
    """Fills a disk up to so many bytes."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    size = filler.stat().st_size
    os.truncate(filler, max(0, size - leave))
    return filler


def failed(running):
    return running.err.count("was not saved") + running.out.count("was not saved")


# D: the disk


@full
@pytest.mark.parametrize("leave", [0, 12288], ids=["D1-full", "D1-full-within-a-save"])
def test_d1_d2_a_disk_that_is_full_for_a_while_costs_saves_and_nothing_else(leave, alone, mounted, tmp_path):
    disk = mounted(tmp_path / "disk", "size=8m")
    config = config_for(disk)
    running = start_one(config, "first", folder=tmp_path, SLOW="0.15")
    wait_until(lambda: 4 in durable(config), running)
    filler = fill(disk, leave)
    wait_until(lambda: failed(running) == 2, running)
    filler.unlink()
    ends(running, 0)
    is_whole(config, alone)  # no line of metrics is lost, either
    assert [event["step"] for event in events(config, "save_failed")] == [8, 12]


@full
def test_d1_a_disk_that_stays_full_ends_the_run_with_14_after_four_saves(alone, mounted, tmp_path):
    disk = mounted(tmp_path / "disk", "size=8m")
    config = config_for(disk, checkpoint={"save_steps": 2, "best": None})
    running = start_one(config, "first", folder=tmp_path, SLOW="0.15")
    wait_until(lambda: 2 in durable(config), running)
    filler = fill(disk, 12288)
    ends(running, 14)
    assert failed(running) == 4, said([running])
    assert "No space left on device" in running.err and str(disk) in running.err
    assert "free space there, lower checkpoint.save_total_limit, or give another run_dir" in running.err
    assert_clean(disk / "run" / "checkpoints")
    filler.unlink()
    ends(start_one(config, "again", folder=tmp_path), 0)
    is_whole(config, alone)


@full
def test_d2_a_disk_that_is_full_for_what_is_printed_leaves_training_as_it_is(alone, tmp_path):
    config = config_for(tmp_path)
    with Path("/dev/full").open("wb") as full_disk:
        running = start_one(config, "first", out=full_disk)
        ends(running, 0)
    is_whole(config, alone)


@full
def test_d2_a_disk_that_is_full_for_logs_alone_leaves_training_and_saves_as_they_are(alone, mounted, tmp_path):
    disk = mounted(tmp_path / "logs", "size=1m")
    config = config_for(disk)
    mounted(disk / "run" / "checkpoints", "size=8m")
    running = start_one(config, "first", folder=tmp_path, SLOW="0.15")
    wait_until(lambda: 4 in durable(config), running)
    filler = fill(disk, 0)
    ends(running, 0)
    found = result(config)
    assert all(found[part] == alone[part] for part in ("step", "counters", "bits"))
    assert "metrics.jsonl can't be written" in running.err + running.out
    assert "could not be written and are lost" in running.err + running.out
    read_metrics(config["run_dir"])  # whole lines only
    filler.unlink()


@full
def test_d3_a_disk_that_becomes_read_only_ends_the_run_with_14_and_its_path(alone, mounted, tmp_path):
    config = config_for(tmp_path)
    folder = mounted(tmp_path / "run" / "checkpoints", "size=8m")
    running = start_one(config, "first", SLOW="0.3")
    wait_until(lambda: 4 in durable(config), running)
    remount = ["mount", "-o", "remount,ro", str(folder)]
    wait_until(lambda: subprocess.run(remount, capture_output=True).returncode == 0, running)
    ends(running, 14)
    assert "Read-only file system" in running.err and str(folder) in running.err
    assert "make it writable for this user, or give another run_dir" in running.err
    second = start_one(config, "second")
    ends(second, 14)
    assert str(folder) in second.err and not second.steps  # before step 1
    subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
    goes_on_alone(config, alone)


@full
def test_d3_a_run_directory_that_is_read_only_from_the_start_is_told_of_before_step_1(mounted, tmp_path):
    config = config_for(tmp_path)
    mounted(tmp_path / "run", "ro,size=1m")
    running = start_one(config, "first")
    ends(running, 14)
    assert str(tmp_path / "run") in running.err and "Read-only file system" in running.err and not running.steps


@full
@pytest.mark.parametrize(
    "inject", ["fsync,fdatasync:error=EIO", "rename,renameat,renameat2:error=EIO"], ids=["D4-fsync", "D4-rename"]
)
def test_d4_a_save_that_the_disk_refuses_does_not_count_and_is_made_up_for(inject, alone, tmp_path):
    config = config_for(tmp_path)
    running = start_one(config, "first", SLOW="0.3")
    wait_until(lambda: 4 in durable(config), running)
    with traced(running, inject):
        wait_until(lambda: failed(running), running)
        assert durable(config) == [4]
    ends(running, 0)
    is_whole(config, alone)
    assert 8 in [event["step"] for event in events(config, "save_failed")]


@full
def test_d4_a_disk_that_stays_broken_ends_the_run_with_14(alone, tmp_path):
    config = config_for(tmp_path, checkpoint={"save_steps": 2, "best": None})
    running = start_one(config, "first", SLOW="0.3")
    wait_until(lambda: 2 in durable(config), running)
    with traced(running, "fsync,fdatasync:error=EIO"):
        ends(running, 14)
    assert "Input/output error" in running.err and str(tmp_path) in running.err
    assert durable(config) and durable(config)[-1] <= 4
    goes_on_alone(config, alone)


@full
def test_d5_a_slow_disk_costs_time_that_is_accounted_for(alone, tmp_path):
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    config = config_for(tmp_path, checkpoint={"save_steps": 10, "best": None})
    calls = "fsync,fdatasync"
    slow = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", "/dev/null", "-e", f"trace={calls}"]
    running = start_one(config, "first", *slow, "-e", f"inject={calls}:delay_enter=300000")
    ends(running, 0)
    found = result(config)
    assert all(found[part] == alone[part] for part in PARTS)
    saves, made = events(config, "save"), events(config, "durable")
    assert [save["step"] for save in saves] == [save["step"] for save in made] == [10, 20]
    # What blocks is the copy, and the save before: never the syncs of this one.
    assert made[0]["seconds"] > 3.0 and saves[0]["blocking_seconds"] < made[0]["seconds"] / 2
    ledger = events(config, "goodput")[-1]
    assert ledger["seconds"]["save_stall"] > 3.0
    assert sum(ledger["seconds"].values()) == pytest.approx(ledger["wall_seconds"], rel=0.01)


@full
def test_d6_a_run_directory_that_was_removed_under_the_run_is_not_made_anew(tmp_path):
    config = config_for(tmp_path, checkpoint={"save_steps": 2, "best": None})
    running = start_one(config, "first", SLOW="0.3")
    wait_until(lambda: 2 in durable(config), running)
    (tmp_path / "run").rename(tmp_path / "away")  # at once, whatever is being written there
    ends(running, 14)
    assert f"{tmp_path / 'run'} is gone" in running.err and "was removed under the run" in running.err
    assert not (tmp_path / "run").exists()


@full
def test_d6_checkpoints_that_were_removed_are_saved_anew_in_a_directory_that_is_still_the_runs(alone, tmp_path):
    config = config_for(tmp_path)
    running = start_one(config, "first", SLOW="0.3")
    wait_until(lambda: 4 in durable(config), running)
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "away")
    ends(running, 0)
    is_whole(config, alone)
    assert 4 not in durable(config)


@full
def test_d6_a_directory_that_took_its_place_is_left_alone(tmp_path):
    config = config_for(tmp_path, checkpoint={"save_steps": 2, "best": None})
    running = start_one(config, "first", SLOW="0.3")
    wait_until(lambda: 2 in durable(config), running)
    (tmp_path / "run").rename(tmp_path / "away")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json").write_text('{"run_id": "another", "made": ""}')
    ends(running, 14)
    assert "is no longer the directory of this run" in running.err
    assert os.listdir(tmp_path / "run") == [".run.json"]


def test_d1_a_disk_without_room_for_one_checkpoint_is_told_of_before_step_1(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "free_bytes", lambda path: 10)
    with pytest.raises(StorageError, match=r"a checkpoint needs \d+ bytes, 10 are free") as caught:
        make(tmp_path).fit()
    assert caught.value.exit_code == 14 and read_metrics(tmp_path) == []


def test_d1_a_disk_without_room_for_all_that_are_kept_is_warned_of(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(files, "free_bytes", lambda path: 50)
    make(tmp_path, max_steps=1, checkpoint={"save_total_limit": 3}).fit()
    text = capsys.readouterr().out
    assert "the 3 checkpoints that are kept, and one that is being written, need " in text and "50 are free" in text


def test_d3_checkpoints_that_can_not_be_written_are_told_of_before_step_1(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(StorageError, match="Not a directory"):
        make(tmp_path).fit()
    assert read_metrics(tmp_path) == []


# L: the lease


def hashes(folder):
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            found[path] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


@full
def test_l1_l2_a_second_run_is_refused_while_the_first_is_alive_and_goes_on_at_once_when_it_is_dead(alone, tmp_path):
    config = config_for(tmp_path)
    first = start_one(config, "first", SLOW="0.5")
    wait_until(lambda: 4 in durable(config), first)
    second = start_one(config, "second")
    ends(second, 64)
    assert f"in use by process {first.process.pid} on " in second.err and ", started 20" in second.err
    first.process.kill()
    first.process.wait()
    goes_on_alone(config, alone)


@full
def test_l3_a_run_that_was_stopped_and_taken_over_is_fenced_when_it_wakes(alone, tmp_path):
    config = config_for(tmp_path)
    first = start_one(config, "first", SLOW="0.3", LEASE="3")
    wait_until(lambda: 4 in durable(config), first)
    first.process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(3.5)
        second = start_one(config, "second", LEASE="3")
        ends(second, 0)
        before = hashes(tmp_path / "run")
    finally:
        first.process.send_signal(signal.SIGCONT)
    ends(first, 64)
    assert "was taken over by process" in first.err and "it writes nothing more" in first.err
    assert hashes(tmp_path / "run") == before
    is_whole(config, alone)


@full
def test_l3_two_processes_that_were_stopped_within_a_save_are_fenced(reference, tmp_path):
    config = config_of(tmp_path)
    # Process 0 stands before the manifest of step 8, where it is stopped.
    first = start(config, "first", SLOW="0.2", LEASE="3", POINT="manifest", POINT_RANK="none")
    marker = tmp_path / "at-manifest"
    wait_until(marker.exists, first[0])
    for one in first:
        one.process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(3.5)
        second = start(config, "second", LEASE="3")
        assert codes(second) == [0, 0], said(second)
        before = hashes(tmp_path / "run")
    finally:
        for one in first:
            one.process.send_signal(signal.SIGCONT)
    found = codes(first)
    assert found[0] == 64 and found[1] in (12, 64, -signal.SIGABRT), said(first)
    assert hashes(tmp_path / "run") == before
    found = result(config)
    assert all(found[part] == reference[part] for part in PARTS)
