"""D1: what Orbax still has to say of a save that failed, when it is closed, is no error of the run."""

import errno

import numpy as np
import pytest

from jtrain.checkpoint import Checkpoints
from jtrain.errors import StorageError

STATE = {"w": np.ones(3, np.float32)}


def with_a_failing_end(path):
    checkpoints = Checkpoints(path)
    checkpoints.save(1, STATE, {"step": 1})
    checkpoints.wait()
    close = checkpoints._orbax.close

    def fails():
        close()
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints._orbax.close = fails
    return checkpoints


def test_d1_orbax_that_ends_on_a_full_disk_is_no_error_of_the_run(tmp_path, caplog):
    with_a_failing_end(tmp_path).close()
    assert "No space left on device" in caplog.text
    assert Checkpoints(tmp_path, read_only=True).steps() == [1]


def test_d1_nor_does_it_hide_the_error_of_the_last_save(tmp_path, monkeypatch):
    checkpoints = with_a_failing_end(tmp_path)

    def full():
        raise StorageError("full")

    monkeypatch.setattr(checkpoints, "wait", full)
    with pytest.raises(StorageError):
        checkpoints.close()
