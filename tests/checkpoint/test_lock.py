import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jtrain.checkpoint.lock import RunLock
from jtrain.errors import ConfigError, Exit, StorageError

_HOLDER = """
import sys, time
from jtrain.checkpoint.lock import RunLock
lock = RunLock(sys.argv[1], "theirs")
lock.acquire()
print("held", flush=True)
time.sleep(60)
"""


def _holder(folder):
    process = subprocess.Popen([sys.executable, "-c", _HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "held"
    return process


def test_a_second_run_is_told_who_holds_the_directory_and_a_dead_owner_frees_it_at_once(tmp_path):
    process = _holder(tmp_path)
    try:
        with pytest.raises(ConfigError, match=f"process {process.pid} on .+, started 20") as caught:
            RunLock(tmp_path).acquire()
        assert caught.value.exit_code == Exit.CONFIG
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    begin = time.monotonic()
    with RunLock(tmp_path, "ours"):
        assert time.monotonic() - begin < 1.0
        owner = json.loads((tmp_path / ".lock").read_text())
        assert (owner["pid"], owner["run_id"]) == (os.getpid(), "ours")


def test_the_same_process_can_not_hold_it_twice_and_release_frees_it(tmp_path):
    first = RunLock(tmp_path)
    with first, pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        RunLock(tmp_path).acquire()
    with RunLock(tmp_path):
        pass


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, b"x")
        time.sleep(20)
        os._exit(0)
    try:
        os.read(read_end, 1)
        lock.release()
        with RunLock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_directory_that_is_not_there_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="absent"):
        RunLock(tmp_path / "absent").acquire()


def test_a_url_is_locked_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with RunLock("gs://bucket/run"), pytest.raises(ConfigError, match="gs://bucket/run"):
        RunLock("gs://bucket/run").acquire()
