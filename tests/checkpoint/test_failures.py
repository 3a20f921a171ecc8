import errno
import os
import subprocess

import numpy as np
import pytest
from checkpoint_states import make_state
from etils import epath

from jtrain.checkpoint import Checkpoints, files, finish
from jtrain.checkpoint.failures import Failure, describe, unpack
from jtrain.errors import ConfigError, Exit, PeerLostError, StorageError


def raising(number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def leftovers(folder):
    return sorted(name for name in os.listdir(folder / "checkpoints") if not name.isdigit() and name != "_trash")


@pytest.mark.parametrize("error", [StorageError("m", "r"), ConfigError("m"), PeerLostError("m", "r")])
def test_an_error_is_the_same_on_the_process_that_unpacks_it(error):
    failure = describe(error, epath.Path("/run"), "can't save")
    again = unpack(failure.pack()).error()
    assert type(again) is type(error) and (again.message, again.remedy) == (error.message, error.remedy)


def test_what_is_neither_storage_nor_a_peer_is_a_bug_and_names_its_class():
    failure = describe(KeyError("x"), epath.Path("/run/5"), "can't save")
    assert failure == Failure("KeyError", "/run/5: can't save: KeyError: 'x'", None, lasting=True)
    assert type(failure.error()) is RuntimeError


def test_a_time_out_is_a_lost_peer():
    assert isinstance(describe(TimeoutError("barrier"), epath.Path("/r"), "can't save").error(), PeerLostError)


def test_a_full_disk_may_heal_and_a_read_only_one_may_not():
    assert not describe(OSError(errno.ENOSPC, "x"), epath.Path("/r"), "can't save").lasting
    assert describe(OSError(errno.EROFS, "x"), epath.Path("/r"), "can't save").lasting


@pytest.mark.parametrize("target", [(finish.files, "sync_tree"), (finish, "hash_files"), (finish, "write_manifest")])
def test_a_failed_save_does_not_count_is_cleared_away_and_is_made_up_by_the_next(
    tmp_path, mesh, log, monkeypatch, target
):
    with Checkpoints(tmp_path, on_event=log) as checkpoints:
        checkpoints.save(1, make_state(1, mesh), {})
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(*target, raising(errno.ENOSPC))
            checkpoints.save(2, make_state(2, mesh), {})
            with pytest.raises(StorageError, match=f"{tmp_path}.*No space left") as caught:
                checkpoints.wait()
            assert caught.value.exit_code == Exit.STORAGE
        assert checkpoints.steps() == [1] and checkpoints.durable_step == 1 and leftovers(tmp_path) == []
        assert [event["step"] for event in log.of("save_failed")] == [2]
        assert checkpoints.save(2, make_state(2, mesh), {})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]


def test_training_goes_on_over_three_failures_in_a_row_and_ends_at_the_fourth(tmp_path, mesh, monkeypatch):
    monkeypatch.setattr(finish, "write_manifest", raising(errno.EIO))
    checkpoints = Checkpoints(tmp_path, max_save_failures=3)
    for step in (1, 2, 3):
        checkpoints.save(step, make_state(step, mesh), {})
        checkpoints._current.thread.join()
        checkpoints.poll()  # tolerated
    checkpoints.save(4, make_state(4, mesh), {})
    checkpoints._current.thread.join()
    with pytest.raises(StorageError, match="Input/output error"):
        checkpoints.poll()
    checkpoints.close()
    assert checkpoints.steps() == [] and leftovers(tmp_path) == []


def test_a_success_in_between_sets_the_count_back(tmp_path, mesh, monkeypatch):
    checkpoints = Checkpoints(tmp_path, max_save_failures=1)
    for step in range(1, 7):
        with monkeypatch.context() as patch:
            if step % 2:
                patch.setattr(finish, "write_manifest", raising(errno.EIO))
            checkpoints.save(step, make_state(step, mesh), {})
            checkpoints._current.thread.join()
            checkpoints.poll()
    checkpoints.close()
    assert checkpoints.steps() == [2, 4, 6]


def test_a_failure_that_was_tolerated_still_ends_in_an_error_when_one_waits_for_the_last_save(
    tmp_path, mesh, monkeypatch
):
    monkeypatch.setattr(finish, "write_manifest", raising(errno.EIO))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1, mesh), {})
    checkpoints._current.thread.join()
    checkpoints.poll()
    with pytest.raises(StorageError):
        checkpoints.wait()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_disk_that_became_read_only_ends_the_run_at_the_next_poll(tmp_path, mesh, monkeypatch, number):
    monkeypatch.setattr(finish, "write_manifest", raising(number))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1, mesh), {})
    checkpoints._current.thread.join()
    with pytest.raises(StorageError, match=str(tmp_path)):
        checkpoints.poll()


def test_too_little_space_is_found_before_anything_is_written(tmp_path, mesh, monkeypatch):
    monkeypatch.setattr(files, "free_bytes", lambda path: 1000)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, make_state(1, mesh), {})
    with pytest.raises(StorageError, match="needs 4,904 bytes, 1,000 are free"):
        checkpoints.wait()
    assert os.listdir(tmp_path / "checkpoints") == []


def test_a_run_directory_that_was_removed_is_not_made_again(tmp_path, mesh):
    run = tmp_path / "run"
    run.mkdir()
    checkpoints = Checkpoints(run)
    run.rmdir()
    checkpoints.save(1, make_state(1, mesh), {})
    with pytest.raises(StorageError, match="is gone"):
        checkpoints.wait()
    assert not run.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")
def test_a_disk_that_is_really_full_or_read_only_is_a_storage_error_and_heals(tmp_path, monkeypatch):
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mount is not allowed here")
    monkeypatch.setattr(files, "free_bytes", lambda path: None)  # so that the writers meet the full disk
    big = {"x": np.random.default_rng(0).normal(size=(256, 1024)).astype("f")}  # 1 MiB
    checkpoints = Checkpoints(tmp_path, save_total_limit=None)
    try:
        checkpoints.save(1, big, {})
        checkpoints.wait()
        filler = tmp_path / "filler"
        filler.write_bytes(bytes(2 << 20))
        checkpoints.save(2, big, {})
        with pytest.raises(StorageError, match="No space left"):
            checkpoints.wait()
        assert checkpoints.steps() == [1] and leftovers(tmp_path) == []
        filler.unlink()
        checkpoints.save(2, big, {})
        checkpoints.wait()
        checkpoints.verify(2)
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        checkpoints.save(3, big, {})
        with pytest.raises(StorageError, match="Read-only"):
            checkpoints.wait()
        assert checkpoints.steps() == [1, 2]
    finally:
        checkpoints.close()
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_an_event_that_can_not_be_written_does_not_undo_a_save(tmp_path, mesh):
    def on_event(kind, fields):
        if kind == "durable":
            raise OSError(errno.ENOSPC, "events.jsonl")

    with Checkpoints(tmp_path, on_event=on_event) as checkpoints:
        checkpoints.save(1, make_state(1, mesh), {})
    assert checkpoints.steps() == [1]
