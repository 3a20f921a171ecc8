"""`checkpoint.backup` of whole runs: the bits they go on with, and that leaving does not wait for a store."""

import logging
import os
import shutil
import signal
import threading
import time

import jax
import numpy as np
import pytest
from fake_store import install, remove

from jtrain import Callback
from jtrain.checkpoint import backup, layout, transfer
from jtrain.errors import ConfigError, Preempted
from jtrain.observe.metrics import read_events, read_metrics
from jtrain.train import guard
from tests.checkpoint.two_processes import answers_of_two
from tests.train.fits import checkpoints, make

OPTIMIZER = {"name": "adamw"}


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(transfer, "FIRST_PAUSE_SECONDS", 0.001)
    yield install(monkeypatch)
    remove()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    trainer = make(tmp_path_factory.mktemp("whole") / "run", max_steps=10, optimizer=OPTIMIZER)
    trainer.fit()
    return bits(trainer)


def bits(trainer):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trainer.state.params)]


def start(run, place, steps, callbacks=(), **changes):
    section = {"save_steps": 2, "save_total_limit": 2, "backup": str(place)}
    return make(run, callbacks, max_steps=steps, checkpoint=section, optimizer=OPTIMIZER, **changes)


def copies(place):
    return layout.finished_steps(layout.checkpoints_root(layout.run_path(place)))


def test_a_run_whose_directory_is_gone_goes_on_from_the_copies(tmp_path, undisturbed, caplog, capsys):
    run, place = tmp_path / "run", tmp_path / "second"
    start(run, place, 6).fit()
    assert checkpoints(run) == [4, 6] == copies(place)
    assert {event["step"] for event in read_events(run, "backed_up")} == {2, 4, 6}
    shutil.rmtree(run)
    capsys.readouterr()
    trainer = start(run, place, 10)
    trainer.fit()
    assert bits(trainer) == undisturbed
    (event,) = read_events(run, "backup_restored")
    assert event["step"] == 6 and event["source"] == str(place)
    assert read_events(run, "resume")[-1]["step"] == 6
    assert [line["step"] for line in read_metrics(run, "train")] == [1, 4, 6, 8, 10]  # the old lines came back, too
    assert checkpoints(run) == [8, 10] == copies(place)


@pytest.mark.faults
def test_c_a_damaged_newest_step_costs_nothing_where_there_is_a_copy(tmp_path, undisturbed):
    run, place = tmp_path / "run", tmp_path / "second"
    start(run, place, 6).fit()
    (run / "checkpoints" / "6" / "meta" / "metadata").write_bytes(b"")
    trainer = start(run, place, 10)
    trainer.fit()
    assert bits(trainer) == undisturbed
    assert read_events(run, "resume")[-1]["step"] == 6
    assert [event["step"] for event in read_events(run, "corrupt")] == [6]
    assert os.listdir(run / "checkpoints" / "_quarantine") == ["6"]


@pytest.mark.faults
def test_a_store_that_fails_all_the_time_ends_nothing_and_is_counted(tmp_path, store, undisturbed):
    run = tmp_path / "run"
    start(run, "s3://bucket/a", 2).fit()

    def fail(operation, path):
        if operation == "write":
            raise OSError("503 Slow Down")

    store.before = staticmethod(fail)
    trainer = start(run, "s3://bucket/a", 10)
    trainer.fit()
    assert bits(trainer) == undisturbed and checkpoints(run) == [8, 10]
    failed = read_events(run, "backup_failed")
    assert failed and [event["failures"] for event in failed] == list(range(1, len(failed) + 1))
    assert failed[-1]["step"] == 10 and "503 Slow Down" in failed[-1]["reason"]
    store.before = staticmethod(lambda operation, path: None)
    start(run, "s3://bucket/a", 10).fit()  # complete: restores, copies what is missing, and ends
    assert copies("s3://bucket/a")[-1] == 10


class Term(Callback):
    """SIGTERM after an update."""

    def on_step_end(self, trainer, step, metrics):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.faults
def test_t1_a_preempted_run_leaves_within_its_grace_though_a_copy_hangs(
    tmp_path, store, undisturbed, monkeypatch, caplog
):
    run, hang, grace = tmp_path / "run", threading.Event(), 60.0
    monkeypatch.setattr(guard, "LEAVING_SECONDS", grace - 1.0)
    monkeypatch.setattr(backup, "CLOSE_SECONDS", 1.0)
    trainer = start(run, "s3://bucket/a", 10, [Term()], faults={"preemption_grace_seconds": grace})
    store.before = staticmethod(
        lambda operation, path: operation == "write" and "/checkpoints/" in path and hang.wait(90)
    )
    began = time.monotonic()
    try:
        with pytest.raises(Preempted) as caught:
            trainer.fit()
        assert time.monotonic() - began < grace
    finally:
        hang.set()
    (event,) = read_events(run, "preempted")
    step = event["step"]
    assert caught.value.exit_code == 10 and event["saved"] and checkpoints(run)[-1] == step
    assert not read_events(run, "backed_up")
    store.before = staticmethod(lambda operation, path: None)
    again = start(run, "s3://bucket/a", 10)
    again.fit()
    assert bits(again) == undisturbed and copies("s3://bucket/a") == checkpoints(run) == [8, 10]


def test_resume_never_is_refused_where_copies_lie(tmp_path):
    run, place = tmp_path / "run", tmp_path / "second"
    start(run, place, 2).fit()
    shutil.rmtree(run)
    section = {"backup": str(place), "resume": "never"}
    with pytest.raises(ConfigError, match=r"checkpoint\.resume is never, but checkpoint\.backup"):
        make(run, max_steps=4, checkpoint=section, optimizer=OPTIMIZER).fit()
    assert logging.getLogger("jtrain").level >= 0 and copies(place) == [2]


@pytest.mark.faults
def test_two_processes_bring_a_step_back_together(tmp_path):
    answers = answers_of_two("backup_worker.py", tmp_path / "run", tmp_path / "second")
    for answer in answers:
        assert answer["restored"] == [[2, {"step": 2}, True, 2], [2, {"step": 2}, True, None]]
    assert answers[0]["events"].count("backup_restored") == 2 and answers[0]["events"].count("corrupt") == 1
    assert answers[1]["events"] == []
    assert copies(tmp_path / "second") == [1, 2]
