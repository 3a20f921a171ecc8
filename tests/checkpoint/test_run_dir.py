import os
import subprocess

import pytest

from jtrain.checkpoint import Checkpoints
from jtrain.checkpoint.run_dir import open_run_dir
from jtrain.errors import ConfigError, Exit, StorageError


def test_the_directory_and_its_parents_are_made_and_the_identity_stays(tmp_path):
    first = open_run_dir(tmp_path / "a" / "b")
    again = open_run_dir(tmp_path / "a" / "b")
    assert first.new and not again.new
    assert first.run_id == again.run_id and len(first.run_id) == 32
    assert open_run_dir(tmp_path / "other").run_id != first.run_id
    assert sorted(os.listdir(first.path)) == [".run.json"]


def test_a_relative_path_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert os.fspath(open_run_dir("run").path) == str(tmp_path / "run")


def test_a_file_in_its_place_is_a_config_error(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        open_run_dir(tmp_path / "run")
    with pytest.raises(StorageError, match="Not a directory"):
        open_run_dir(tmp_path / "run" / "deeper")


@pytest.mark.parametrize("name", ["a[1]", "a*", "a?/b"])
def test_a_path_that_orbax_takes_as_a_pattern_is_refused(tmp_path, name):
    # Orbax 0.12 said "Skipping merge of OCDBT checkpoints", and the arrays could not be read back.
    for make in (open_run_dir, Checkpoints):
        with pytest.raises(ConfigError, match="as a pattern"):
            make(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_file_in_place_of_the_checkpoints_is_a_storage_error(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(StorageError, match="checkpoints: can't be cleared: Not a directory"):
        Checkpoints(tmp_path)


def test_a_damaged_identity_is_named(tmp_path):
    (tmp_path / ".run.json").write_text("{")
    with pytest.raises(StorageError, match=r"\.run\.json is damaged"):
        open_run_dir(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("options", ["ro", "size=4k"])
def test_a_read_only_or_full_disk_is_a_storage_error_with_the_path(tmp_path, options):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mount is not allowed here")
    try:
        if options != "ro":
            (tmp_path / "filler").write_bytes(bytes(4096))
        with pytest.raises(StorageError, match=str(tmp_path)) as caught:
            open_run_dir(tmp_path / "run" if options == "ro" else tmp_path)
        assert caught.value.exit_code == Exit.STORAGE
        assert caught.value.remedy
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
