"""`checkpoint.backup`: copies of durable steps in a second place, and how a run goes on from them."""

import errno
import logging
import os
import shutil
import threading
import time

import jax
import numpy as np
import pytest
from checkpoint_states import same_bits
from etils import epath
from fake_store import install, remove

from jtrain.checkpoint import Checkpoints, DamagedCheckpoint, files, layout, load_parameters, open_run_dir, transfer
from jtrain.checkpoint import backup as module
from jtrain.checkpoint.backup import open_backup
from jtrain.checkpoint.manifest import check_files, new_manifest, read_manifest, write_manifest
from jtrain.errors import CheckpointError, ConfigError, Exit, StorageError


def state_of(step):
    return {"w": np.arange(512, dtype=np.float32) * step, "step": np.int32(step)}


ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state_of(0))


@pytest.fixture
def store(monkeypatch):
    yield install(monkeypatch)
    remove()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(transfer, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(module, "CLOSE_SECONDS", 2.0)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def place(tmp_path):
    return tmp_path / "second"


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.faults)])
def any_place(request, tmp_path):
    if request.param == "folder":
        return str(tmp_path / "second")
    request.getfixturevalue("store")
    return f"{request.param}://bucket/runs/a"


def opened(run, place, **options):
    """Checkpoints with a second place, as a run opens them."""
    backup = open_backup(place, open_run_dir(run))
    backup.bring_back()
    return Checkpoints(run, backup=backup, **options)


def save(run, place, steps, **options):
    with opened(run, place, **{"save_total_limit": None, **options}) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_of(step), {"step": step}, {"loss": float(step % 4)})
        checkpoints.wait()
        checkpoints.wait_for_backup()
    return checkpoints


def copies(place):
    return layout.finished_steps(layout.checkpoints_root(layout.run_path(place)))


def flip(path, byte=100):
    data = bytearray(path.read_bytes())
    data[byte % len(data)] ^= 4
    path.write_bytes(bytes(data))


def values_file(run, step):
    """The file with most bytes: values of arrays."""
    folder = epath.Path(run) / "checkpoints" / str(step)
    return max((folder / name for name in files.walk(folder)), key=lambda path: path.stat().length)


def test_each_durable_step_is_copied_whole_and_its_manifest_comes_last(run, any_place, log, request):
    save(run, any_place, [1, 2], on_event=log)
    root = layout.checkpoints_root(layout.run_path(any_place))
    for step in (1, 2):
        manifest = read_manifest(root / str(step))
        check_files(root / str(step), manifest)
        assert manifest == read_manifest(epath.Path(run) / "checkpoints" / str(step))
        assert {*files.walk(root / str(step))} == {*manifest.files, "manifest.json"}
    if "://" in any_place:
        written = [path for operation, path in request.getfixturevalue("store").log if operation == "write"]
        for step in (1, 2):
            own = [path for path in written if f"/checkpoints/{step}/" in path]
            assert own[-1].endswith("/manifest.json") and len(own) == len(manifest.files) + 1
    told = log.of("backed_up")
    assert [event["step"] for event in told] == [1, 2]
    assert told[0]["to"] == any_place and told[0]["bytes"] > 2048 and told[0]["retries"] == 0
    order = [(kind, fields["step"]) for kind, fields in log.events if kind in ("durable", "backed_up")]
    assert order.index(("durable", 2)) < order.index(("backed_up", 2))


def test_the_same_steps_stay_there_as_in_the_run_directory(run, any_place):
    save(run, any_place, [1, 2, 3, 4, 5], save_total_limit=2, best_metric="loss")
    assert copies(any_place) == [4, 5] == layout.finished_steps(epath.Path(run) / "checkpoints")
    save(run, any_place, [6, 7], save_total_limit=2, best_metric="loss")
    assert copies(any_place) == [4, 7]  # 4 has the best loss


def test_a_run_whose_directory_is_gone_goes_on_from_the_newest_copy_and_says_so_in_one_line(
    run, any_place, log, caplog
):
    save(run, any_place, [1, 2])
    identity = (run / ".run.json").read_text()
    shutil.rmtree(run)
    with caplog.at_level(logging.WARNING), opened(run, any_place, on_event=log) as checkpoints:
        state, meta, step = checkpoints.restore(ABSTRACT)
        assert (step, meta) == (2, {"step": 2}) and same_bits(state, state_of(2))
    assert (run / ".run.json").read_text() == identity
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(f"step 2 was brought back from {any_place} (") and line.endswith("holds no checkpoint")
    (event,) = log.of("backup_restored")
    assert (event["step"], event["source"]) == (2, any_place)
    assert sorted(os.listdir(run / "checkpoints")) == ["2"]


@pytest.mark.faults
def test_a_copy_that_is_newer_than_the_run_directory_is_gone_on_from(run, place, tmp_path):
    save(run, place, [1])
    shutil.copytree(run, tmp_path / "old")
    save(run, place, [2, 3])
    with opened(tmp_path / "old", place) as checkpoints:
        assert checkpoints.restore(ABSTRACT)[2] == 3


def test_a_damaged_step_is_replaced_by_its_copy_and_put_in_quarantine(run, any_place, log):
    save(run, any_place, [1, 2])
    flip(values_file(run, 2))
    with opened(run, any_place, on_event=log) as checkpoints:
        state, _, step = checkpoints.restore(ABSTRACT)
        assert step == 2 and same_bits(state, state_of(2))
        checkpoints.verify(2)
    assert os.listdir(run / "checkpoints" / "_quarantine") == ["2"]
    assert [event["step"] for event in log.of("corrupt")] == [2]
    assert "hash differs" in log.of("backup_restored")[0]["reason"]


@pytest.mark.faults
def test_where_step_and_copy_are_damaged_the_one_before_is_taken(run, place, log):
    save(run, place, [1, 2])
    for where in (run, place):
        flip(values_file(where, 2))
    with opened(run, place, on_event=log) as checkpoints:
        state, _, step = checkpoints.restore(ABSTRACT)
        assert step == 1 and same_bits(state, state_of(1))
    assert not log.of("backup_restored") and os.listdir(run / "checkpoints" / "_quarantine") == ["2"]


@pytest.mark.faults
def test_an_older_copy_serves_where_the_run_directory_has_no_intact_step(run, place):
    save(run, place, [1, 2, 3])
    shutil.rmtree(run / "checkpoints" / "1")
    shutil.rmtree(place / "checkpoints" / "3")
    for where, step in ((run, 2), (run, 3), (place, 2)):
        flip(values_file(where, step))
    with opened(run, place) as checkpoints:
        assert checkpoints.restore(ABSTRACT)[2] == 1


def test_c11_where_every_copy_is_damaged_a_run_without_its_directory_does_not_begin_anew(run, place):
    save(run, place, [1, 2])
    for step in (1, 2):
        flip(values_file(place, step))
    shutil.rmtree(run)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"none of \[1, 2\] in .*second is intact") as caught:
            opened(run, place)
        assert caught.value.exit_code == Exit.CHECKPOINT
    assert copies(place) == [1, 2]


def test_a_store_that_fails_is_told_of_and_counted_and_the_next_step_is_copied(run, store, log):
    with opened(run, "gs://bucket/a", on_event=log, save_total_limit=None) as checkpoints:

        def fail(operation, path):
            if operation == "write" and path.endswith("/meta/metadata"):
                raise OSError(errno.EIO, "503 Service Unavailable")

        for step, broken in ((1, True), (2, True), (3, False)):
            store.before = staticmethod(fail if broken else lambda operation, path: None)
            checkpoints.save(step, state_of(step), {})
            checkpoints.wait()
            checkpoints.poll()
            checkpoints.wait_for_backup()
    assert checkpoints.steps() == [1, 2, 3] and copies("gs://bucket/a") == [3]
    assert [(e["step"], e["failures"]) for e in log.of("backup_failed")] == [(1, 1), (2, 2)]
    assert "503" in log.of("backup_failed")[0]["reason"]
    assert not store().exists("gs://bucket/a/checkpoints/1") or not store().find("gs://bucket/a/checkpoints/1")


@pytest.mark.faults
def test_a_file_is_tried_again_a_bounded_number_of_times(run, store, log):
    seen = []

    def fail(operation, path):
        if operation == "write" and path.endswith("/meta/metadata"):
            seen.append(path)
            if len(seen) < wanted:
                raise OSError(errno.EIO, "503")

    wanted = transfer.ATTEMPTS
    with opened(run, "gs://bucket/a", on_event=log) as checkpoints:
        store.before = staticmethod(fail)
        checkpoints.save(1, state_of(1), {})
        checkpoints.wait()
        checkpoints.wait_for_backup()
        assert log.of("backed_up")[0]["retries"] == wanted - 1
        seen.clear()
        wanted = 100
        checkpoints.save(2, state_of(2), {})
        checkpoints.wait()
        checkpoints.wait_for_backup()
    assert len(seen) == transfer.ATTEMPTS and log.of("backup_failed")[0]["step"] == 2


def test_a_copy_cut_off_between_two_objects_is_no_step_and_is_made_again(run, store, log):
    """What a kill leaves: every prefix of the objects, in the order in which they were written."""
    save(run, "gs://bucket/a", [1, 2])
    objects = {path: bytes(file.getvalue()) for path, file in store.store.items()}
    order = [p for operation, p in store.log if operation == "write" and "/checkpoints/2/" in p]
    for cut in range(len(order)):
        store.store.clear()
        keep = {path for path in objects if "/checkpoints/2/" not in path} | {*order[:cut]}
        for path in keep:
            store().pipe_file(path, objects[path])
        assert copies("gs://bucket/a") == [1]
    with opened(run, "gs://bucket/a", save_total_limit=None) as checkpoints:  # the step is here, whole
        checkpoints.restore(ABSTRACT)
        checkpoints.wait_for_backup()
    assert copies("gs://bucket/a") == [1, 2]
    root = layout.checkpoints_root(layout.run_path("gs://bucket/a"))
    check_files(root / "2", read_manifest(root / "2"))


def test_training_does_not_wait_for_a_store_that_hangs_and_the_end_of_the_run_does_not_hang(
    run, store, caplog, monkeypatch
):
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.2)
    hang, reached = threading.Event(), threading.Event()

    def wait(operation, path):
        if operation == "write" and "/checkpoints/" in path:
            reached.set()
            hang.wait(60)

    began = time.monotonic()
    checkpoints = opened(run, "gs://bucket/a", save_total_limit=1)
    store.before = staticmethod(wait)
    try:
        for step in (1, 2, 3):
            checkpoints.save(step, state_of(step), {})
            checkpoints.wait()
            assert reached.wait(20)
        assert checkpoints.durable_step == 3 and {*checkpoints.steps()} == {1, 3}  # 1 is being copied
        left = iter([0.1, 0.0])
        checkpoints.wait_for_backup(lambda: next(left))
        with caplog.at_level(logging.WARNING):
            checkpoints.close()
        assert time.monotonic() - began < 30
    finally:
        hang.set()
    assert "step 3 is not copied to gs://bucket/a yet: the next start does it" in caplog.text
    assert checkpoints.steps() == [3] or {*checkpoints.steps()} == {1, 3}
    store.before = staticmethod(lambda operation, path: None)
    with opened(run, "gs://bucket/a", save_total_limit=1) as checkpoints:
        checkpoints.restore(ABSTRACT)
        checkpoints.wait_for_backup()
    assert copies("gs://bucket/a") == [3]


@pytest.mark.faults
def test_a_copy_that_does_not_move_is_given_up(run, store, monkeypatch, caplog):
    monkeypatch.setattr(module, "STALL_SECONDS", 0.1)
    monkeypatch.setattr(module, "TURN_SECONDS", 0.2)
    hang = threading.Event()
    checkpoints = opened(run, "gs://bucket/a")
    store.before = staticmethod(lambda operation, path: "/checkpoints/" in path and hang.wait(60))
    try:
        checkpoints.save(1, state_of(1), {})
        checkpoints.wait()
        checkpoints.wait_for_backup()
        assert "has not moved for" in caplog.text
    finally:
        hang.set()
        checkpoints.close()


def test_a_step_that_was_damaged_before_it_was_copied_is_not_copied(run, place, log, monkeypatch):
    original = module.Backup.offer

    def damaged(self, manifest):
        flip(values_file(run, manifest.step))
        original(self, manifest)

    monkeypatch.setattr(module.Backup, "offer", damaged)
    save(run, place, [1], on_event=log)
    assert copies(place) == []
    (event,) = log.of("backup_failed")
    assert "step 1 is damaged" in event["reason"] and "hash differs" in event["reason"]


def test_steps_ahead_of_a_run_that_went_back_are_set_aside_there_too(run, any_place):
    save(run, any_place, [1, 2, 3])
    with opened(run, any_place, save_total_limit=None) as checkpoints:
        checkpoints.restore(ABSTRACT, step=1)
        assert checkpoints.save(2, {"w": state_of(7)["w"], "step": np.int32(2)}, {"line": 2})
        checkpoints.wait()
        checkpoints.wait_for_backup()
    assert copies(any_place) == [1, 2]
    root = layout.checkpoints_root(layout.run_path(any_place))
    assert {entry.name for entry in (root / "_superseded").iterdir()} == {"2", "3"}
    shutil.rmtree(run)
    with opened(run, any_place) as checkpoints:
        state, meta, step = checkpoints.restore(ABSTRACT)
    assert (step, meta) == (2, {"line": 2}) and same_bits(state["w"], state_of(7)["w"])


def test_what_stands_beside_the_checkpoints_comes_back_too_and_is_not_written_over(run, any_place):
    open_run_dir(run)
    (run / "model" / "tokenizer").mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 1\n")
    (run / "model" / "tokenizer" / "x.json").write_text("{}")
    save(run, any_place, [1])
    shutil.rmtree(run)
    open_run_dir(run)
    (run / "config.yaml").write_text("seed: 2\n")
    opened(run, any_place).close()
    assert (run / "model" / "tokenizer" / "x.json").read_text() == "{}"
    assert (run / "config.yaml").read_text() == "seed: 2\n"


def test_a_place_of_another_run_or_of_something_else_is_refused(run, place, tmp_path):
    save(run, place, [1])
    save(tmp_path / "other", tmp_path / "third", [1])
    with pytest.raises(ConfigError, match="holds the copies of another run"):
        opened(tmp_path / "other", place)
    strange = tmp_path / "strange"
    (strange / "checkpoints" / "5").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no copies of a run"):
        opened(tmp_path / "new", strange)
    assert (strange / "checkpoints" / "5").exists()
    for inside in (run, run / "second", run.parent):
        with pytest.raises(ConfigError, match="lie in each other"):
            opened(run, inside)


def test_a_run_that_is_to_begin_anew_is_refused_where_copies_lie(run, place):
    save(run, place, [1])
    shutil.rmtree(run)
    with pytest.raises(ConfigError, match=r"checkpoint\.backup='.*second' holds the steps \[1\]"):
        open_backup(place, open_run_dir(run)).check_fresh()


@pytest.mark.faults
def test_a_place_that_can_not_be_reached_ends_a_run_without_checkpoints_and_warns_one_that_has_some(run, store, caplog):
    save(run, "gs://bucket/a", [1])

    def unreachable(operation, path):
        raise OSError("no route to host")

    store.before = staticmethod(unreachable)
    with opened(run, "gs://bucket/a") as checkpoints:
        assert checkpoints.restore(ABSTRACT)[2] == 1
    assert "gs://bucket/a can't be reached" in caplog.text
    shutil.rmtree(run)
    with pytest.raises(StorageError, match="gs://bucket/a can't be reached: OSError: no route to host"):
        opened(run, "gs://bucket/a")


def test_s1_a_copy_whose_manifest_leads_out_of_its_folder_writes_nothing_there(run, place, tmp_path):
    save(run, place, [1, 2])
    folder = epath.Path(place) / "checkpoints" / "2"
    shutil.copy(folder / "meta" / "metadata", tmp_path / "canary")  # what the name leads to
    manifest = read_manifest(folder)
    record = manifest.files["meta/metadata"]
    names = {**manifest.files, "../../../canary": record}
    write_manifest(folder, new_manifest(2, names, manifest.arrays, {}))
    shutil.rmtree(run)
    with opened(run, place) as checkpoints:
        assert checkpoints.restore(ABSTRACT)[2] == 1
    assert not (run / "canary").exists()


@pytest.mark.faults
def test_a_run_that_was_fenced_off_writes_nothing_more_to_its_second_place(run, place, caplog):
    with opened(run, place, save_total_limit=None) as checkpoints:

        def lost():
            raise ConfigError("taken over")

        checkpoints._backup._check_lease = lost
        checkpoints.save(1, state_of(1), {})
        checkpoints.wait()
        checkpoints.wait_for_backup()
    assert copies(place) == [] and "nothing more is copied" in caplog.text


@pytest.mark.faults
def test_a_full_disk_while_a_step_is_brought_back_is_a_storage_error_and_leaves_nothing(run, place, monkeypatch):
    save(run, place, [1])
    shutil.rmtree(run)
    monkeypatch.setattr(files, "free_bytes", lambda path: 100)
    with pytest.raises(StorageError, match="No space left") as caught:
        opened(run, place)
    assert caught.value.exit_code == Exit.STORAGE
    assert not any((run / "checkpoints").iterdir())


def test_a_run_directory_at_s3_is_refused_with_what_to_write_instead(store):
    for open_it in (open_run_dir, Checkpoints):
        with pytest.raises(
            ConfigError, match=r"s3://bucket/run: Orbax reads and writes checkpoints in folders"
        ) as caught:
            open_it("s3://bucket/run")
        assert "checkpoint.backup: s3://bucket/run" in caught.value.remedy
    with pytest.raises(ConfigError, match="s3://bucket/run: Orbax reads") as caught:
        load_parameters("s3://bucket/run", {})
    assert "copy it into a folder" in caught.value.remedy


@pytest.mark.faults
def test_a_damaged_file_names_step_file_and_reason_when_it_is_brought_back(run, place):
    save(run, place, [1])
    name = "meta/metadata"
    flip(epath.Path(place) / "checkpoints" / "1" / name, 1)
    backup = open_backup(place, open_run_dir(run))
    with pytest.raises(DamagedCheckpoint) as caught:
        backup.fetch(1, "a test")
    assert (caught.value.step, caught.value.file, caught.value.reason) == ("1", name, "hash differs")
