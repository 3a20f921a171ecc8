"""L1 to L3: one run at a time in a run directory, on one machine, on several, and in an object store."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid

import pytest
from checkpoint_states import make_state

from jtrain.checkpoint import Checkpoints, finish, lease, open_run_dir
from jtrain.checkpoint.lease import Holder, RunLease, TakenOver, holder_of
from jtrain.checkpoint.lease_files import InFolder, InStore, files_of
from jtrain.errors import ConfigError, Exit, StorageError

_HOLDER = """
import sys, time
from jtrain.checkpoint.lease import RunLease
lease = RunLease(sys.argv[1], "theirs", seconds=float(sys.argv[2]))
lease.acquire()
print("held", flush=True)
time.sleep(60)
"""


def start_holder(folder, seconds=60.0):
    command = [sys.executable, "-c", _HOLDER, str(folder), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "held"
    return process


@pytest.fixture
def holder(tmp_path):
    process = start_holder(tmp_path)
    yield process
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


@pytest.fixture(params=["folder", "store"])
def place(request, tmp_path):
    return str(tmp_path) if request.param == "folder" else f"memory://bucket-{uuid.uuid4().hex}/run"


@pytest.fixture
def elsewhere(monkeypatch):
    """What is taken within it is taken on another machine."""

    def on(name, take):
        with monkeypatch.context() as patch:
            patch.setattr(lease, "machine", lambda: name)
            take()

    return on


def silence(held):
    """As a machine that is gone: its thread renews no more."""
    held._over.set()


def test_l1_a_second_run_is_told_who_holds_the_directory(tmp_path, holder):
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=f"in use by process {holder.pid} on .+, started 20") as caught:
        RunLease(tmp_path).acquire()
    assert caught.value.exit_code == Exit.CONFIG and time.monotonic() - begin < 2.0
    assert holder_of(tmp_path).pid == holder.pid


def test_l2_of_a_dead_process_of_this_machine_it_is_taken_at_once(tmp_path, holder):
    before = files_of(tmp_path).tokens()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert holder_of(tmp_path) is None
    begin = time.monotonic()
    with RunLease(tmp_path, "ours") as held:
        assert time.monotonic() - begin < 1.0
        assert held.token == before[-1] + 1 and files_of(tmp_path).tokens() == [held.token]
        found = holder_of(tmp_path)
        assert (found.pid, found.run_id) == (os.getpid(), "ours")
    assert holder_of(tmp_path) is None


def test_l2_a_zombie_and_a_process_with_the_number_of_a_dead_one_hold_nothing(tmp_path, holder):
    data = files_of(tmp_path).read(1)
    found = Holder(**json.loads(data))
    assert not found.free
    assert dataclasses.replace(found, begun="1").free  # the number was used again
    holder.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while not found.free and time.monotonic() < deadline:  # nobody has waited for it: a zombie
        time.sleep(0.01)
    assert found.free and holder.returncode is None


def test_l2_of_a_machine_that_is_gone_it_is_taken_when_it_expires(place, elsewhere):
    theirs, ours = RunLease(place, seconds=1.0), RunLease(place, seconds=1.0)
    elsewhere("far", theirs.acquire)
    silence(theirs)
    begin = time.monotonic()
    ours.acquire()
    assert 1.0 <= time.monotonic() - begin < 10.0
    assert ours.token == theirs.token + 1
    ours.release()


def test_l1_of_a_machine_that_is_there_it_is_refused(place, elsewhere):
    theirs = RunLease(place, seconds=3.0)
    elsewhere("far", theirs.acquire)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on"):
        RunLease(place).acquire()
    theirs.check()
    theirs.release()
    with RunLease(place) as ours:  # what was given back is not waited for
        assert ours.token == theirs.token + 2 or ours.token == 2


def test_l3_who_wakes_after_a_takeover_is_told_and_writes_nothing(place, elsewhere):
    theirs, ours = RunLease(place, seconds=0.6), RunLease(place, seconds=60.0)
    elsewhere("far", theirs.acquire)
    silence(theirs)
    theirs.check()  # late, but nobody has come
    time.sleep(0.7)
    assert not theirs.lost
    ours.acquire()
    before = files_of(place).read(ours.token)
    time.sleep(0.7)
    assert theirs.lost
    for _ in range(2):
        with pytest.raises(TakenOver, match=r"was taken over by process .+ because this run was not") as caught:
            theirs.check()
    assert caught.value.exit_code == Exit.CONFIG
    theirs.release()
    assert files_of(place).tokens() == [ours.token] and files_of(place).read(ours.token) == before
    ours.check()
    ours.release()


def test_l3_a_stopped_process_is_taken_over_when_it_has_been_silent_for_long_enough(tmp_path):
    process = start_holder(tmp_path, 1.0)
    try:
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.3)
        with RunLease(tmp_path) as ours:
            assert ours.token == 2
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_thread_renews_it(place):
    with RunLease(place, seconds=0.6) as held:
        first = files_of(place).read(held.token)
        time.sleep(1.5)
        again = files_of(place).read(held.token)
        assert again != first and len(again) == len(first) == 512
        assert not held.lost
        with pytest.raises(ConfigError):
            RunLease(place).acquire()


def test_the_same_process_can_not_hold_it_twice_and_release_frees_it(place):
    with RunLease(place), pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        RunLease(place).acquire()
    with RunLease(place) as held:
        assert held.token == 2


def test_of_many_that_start_at_once_one_gets_it(place):
    leases, got, refused = [RunLease(place) for _ in range(8)], [], []
    gate = threading.Barrier(len(leases))

    def take(one):
        gate.wait()
        try:
            one.acquire()
            got.append(one)
        except ConfigError:
            refused.append(one)

    threads = [threading.Thread(target=take, args=(one,)) for one in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1 and len(refused) == 7
    got[0].check()
    got[0].release()


def test_one_that_was_renewed_while_it_was_taken_over_stays(tmp_path, elsewhere, monkeypatch):
    theirs, ours = RunLease(tmp_path, seconds=0.5), RunLease(tmp_path)
    elsewhere("far", theirs.acquire)
    silence(theirs)
    create = InFolder.create

    def late(self, token, data):
        InFolder.rewrite(self, token - 1, files_of(tmp_path).read(token - 1).replace(b'"count": 0', b'"count": 1'))
        return create(self, token, data)

    with monkeypatch.context() as patch:
        patch.setattr(InFolder, "create", late)
        with pytest.raises(ConfigError, match="in use"):
            ours.acquire()
    assert files_of(tmp_path).tokens() == [theirs.token]
    theirs.check()


def test_a_file_that_is_half_written_is_waited_for(tmp_path):
    files = files_of(tmp_path)
    assert files.create(1, b"")
    with RunLease(tmp_path, seconds=0.4) as held:
        assert held.token == 2


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_does_not_keep_it(tmp_path):
    held = RunLease(tmp_path)
    held.acquire()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, b"x")
        time.sleep(20)
        os._exit(0)
    try:
        os.read(read_end, 1)
        held.release()
        with RunLease(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_directory_that_is_not_there_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="absent"):
        RunLease(tmp_path / "absent").acquire()
    assert not (tmp_path / "absent").exists()


def test_d6_files_that_somebody_removed_are_made_again_only_where_the_run_is_the_same(tmp_path):
    run = open_run_dir(tmp_path / "run")
    with RunLease(run.path, run.run_id) as held:
        (tmp_path / "run" / ".lease" / "00000001").unlink()
        held.check()
        assert files_of(run.path).tokens() == [1]
        (tmp_path / "run").rename(tmp_path / "away")
        with pytest.raises(StorageError, match="removed under the run"):
            held.check()
        open_run_dir(tmp_path / "run")
        with pytest.raises(StorageError, match="removed under the run"):
            held.check()
        assert not held.lost


def test_d6_another_run_in_its_place_has_taken_over(tmp_path):
    (tmp_path / "x").mkdir()
    with RunLease(tmp_path / "x", "a") as held:
        (tmp_path / "x").rename(tmp_path / "y")
        other = open_run_dir(tmp_path / "x")
        with RunLease(other.path, other.run_id), pytest.raises(TakenOver):
            held.check()


def test_w1_the_wall_clock_takes_no_part(tmp_path, monkeypatch):
    with RunLease(tmp_path) as held:
        for shift in (3600.0, -3600.0):
            with monkeypatch.context() as patch:
                now = time.time()
                patch.setattr(time, "time", lambda now=now, shift=shift: now + shift)
                with pytest.raises(ConfigError):
                    RunLease(tmp_path).acquire()
                held.check()


@pytest.mark.parametrize("successor_saves", [False, True])
def test_l3_a_save_that_is_under_way_when_the_run_is_taken_over_does_not_count(
    tmp_path, mesh, elsewhere, successor_saves
):
    theirs, ours = RunLease(tmp_path, seconds=0.5), RunLease(tmp_path)
    elsewhere("far", theirs.acquire)
    silence(theirs)
    checkpoints = Checkpoints(tmp_path, lease=theirs)
    checkpoints.save(1, make_state(1, mesh), {})
    checkpoints.wait()
    goes_on, check = threading.Event(), theirs.check
    theirs.check = lambda: (threading.current_thread() is threading.main_thread() or goes_on.wait(60), check())
    checkpoints.save(2, make_state(2, mesh), {})  # stopped before it counts
    saving = checkpoints._current.thread
    ours.acquire()
    if successor_saves:
        with Checkpoints(tmp_path, lease=ours) as other:
            assert other.steps() == [1]
            other.save(2, make_state(20, mesh), {"whose": "ours"})
    goes_on.set()
    saving.join()
    with pytest.raises(TakenOver):
        checkpoints.wait()
    with pytest.raises(TakenOver):
        checkpoints.save(3, make_state(3, mesh), {})
    with pytest.raises(TakenOver):
        checkpoints.poll()
    reader = Checkpoints(tmp_path, read_only=True)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == (["1", "2"] if successor_saves else ["1"])
    if successor_saves:
        reader.verify(2)
        assert reader.read_meta(2) == {"whose": "ours"}
    ours.release()


def test_a_step_gets_its_name_when_it_is_whole(tmp_path, mesh, monkeypatch):
    seen = []
    write = finish.write_manifest
    monkeypatch.setattr(
        finish, "write_manifest", lambda *a: (seen.append(sorted(os.listdir(tmp_path / "checkpoints"))), write(*a))
    )
    with RunLease(tmp_path) as held, Checkpoints(tmp_path, lease=held) as checkpoints:
        checkpoints.save(5, make_state(5, mesh), {})
        checkpoints.wait()
    assert seen == [["_saving.1"]] and sorted(os.listdir(tmp_path / "checkpoints")) == ["5"]


def test_the_store_makes_no_object_twice(place):
    files = files_of(place)
    assert isinstance(files, InStore) == place.startswith("memory")
    assert files.create(1, b"a") and not files.create(1, b"b") and files.read(1) == b"a"
    files.rewrite(1, b"c")
    assert (files.tokens(), files.read(1), files.read(2)) == ([1], b"c", None)
    files.remove(1), files.remove(1)
    assert files.tokens() == []
