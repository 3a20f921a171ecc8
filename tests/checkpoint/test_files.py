import errno
import os

import pytest
from etils import epath

from jtrain.checkpoint import files
from jtrain.errors import StorageError


def test_an_atomic_write_leaves_the_old_file_whole_when_it_fails(tmp_path, monkeypatch):
    path = epath.Path(tmp_path / "x")
    files.write_atomic(path, b"old")

    def fail(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_every_file_and_folder_and_the_parent_are_synced(tmp_path, monkeypatch):
    (tmp_path / "step" / "a" / "b").mkdir(parents=True)
    for name in ("step/1", "step/a/2", "step/a/b/3"):
        (tmp_path / name).write_text("x")
    synced = []
    monkeypatch.setattr(files, "sync", lambda path: synced.append(os.path.relpath(path, tmp_path)))
    files.sync_tree(epath.Path(tmp_path / "step"))
    assert sorted(synced) == sorted(["step/1", "step/a/2", "step/a/b/3", "step/a/b", "step/a", "step", "."])
    assert synced[-2:] == ["step", "."]


def test_walk_names_files_relative_and_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("c", "a", "b/2", "b/1"):
        (tmp_path / name).write_text("")
    assert list(files.walk(epath.Path(tmp_path))) == ["a", "b/1", "b/2", "c"]


@pytest.mark.parametrize(
    ("error", "number"),
    [  # texts as TensorStore words them
        (OSError(errno.ENOSPC, "x"), errno.ENOSPC),
        (ValueError("RESOURCE_EXHAUSTED: Failed to write file: No space left on device"), errno.ENOSPC),
        (RuntimeError("Error [OS error 30: EROFS Read-only file system]"), errno.EROFS),
        (ValueError("shapes differ"), None),
        (ConnectionResetError(errno.ECONNRESET, "peer"), None),
    ],
)
def test_a_disk_at_fault_is_recognised_by_errno_or_text(error, number):
    assert files.storage_errno(error) == number


def test_the_cause_of_an_error_is_looked_at_too():
    try:
        try:
            raise OSError(errno.EDQUOT, "quota")
        except OSError as inner:
            raise ValueError("outer") from inner
    except ValueError as error:
        assert files.storage_errno(error) == errno.EDQUOT


def test_a_storage_error_names_path_reason_and_remedy():
    error = files.storage_error("/data/run", errno.ENOSPC, "can't save")
    assert isinstance(error, StorageError)
    assert error.message == "/data/run: can't save: No space left on device"
    assert "save_total_limit" in error.remedy
