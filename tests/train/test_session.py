import os
import weakref
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jtrain import Callback
from jtrain.checkpoint import RunLease, arrays
from jtrain.cli.main import main
from jtrain.config import load_config
from jtrain.errors import CheckpointError, ConfigError, Exit
from jtrain.observe.metrics import read_events, read_metrics
from jtrain.train import session
from jtrain.train.session import Session
from jtrain.train.timetable import Timetable
from tests.train.fits import Diary, checkpoints, examples, make, settings


class Wide(nnx.Module):
    """A model of another shape."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.zeros((3, 2)))

    def __call__(self, x):
        return (x @ self.w[...]).sum(-1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 6 steps with checkpoints 2, 4 and 6; its directory is not written by the tests that use it."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    trainer = make(run_dir, max_steps=6, checkpoint={"save_steps": 2}, optimizer={"name": "adamw"})
    trainer.fit()
    return run_dir, trainer


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"seed": 7}, "seed: 42 -> 7"),
        ({"global_batch_size": 4}, "global_batch_size: 8 -> 4"),
        ({"max_length": 512}, "max_length: 1024 -> 512"),
        ({"optimizer": {"name": "lion"}}, "optimizer.name: 'adamw' -> 'lion'"),
        ({"model": {"hidden_size": 64}}, "model.hidden_size: None -> 64"),
        ({"rows": examples(seed=1)}, "fingerprint of the training data"),
        ({"precision": "bf16-true"}, "precision: '32-true' -> 'bf16-true'"),
    ),
)
def test_what_makes_another_run_is_refused_with_the_difference(changes, message, finished):
    run_dir, _ = finished
    before = checkpoints(run_dir), (run_dir / "config.yaml").read_text()
    fields = {"max_steps": 8, "checkpoint": {"save_steps": 2}, "optimizer": {"name": "adamw"}} | changes
    with pytest.raises(ConfigError) as caught:
        make(run_dir, **fields).fit()
    assert message in caught.value.message
    assert "init_from" in caught.value.remedy
    assert (checkpoints(run_dir), (run_dir / "config.yaml").read_text()) == before


def test_a_model_of_another_shape_is_refused_with_its_paths(finished):
    with pytest.raises(CheckpointError, match="params/w") as caught:
        make(finished[0], module=Wide, max_steps=8, optimizer={"name": "adamw"}).fit()
    assert caught.value.exit_code == Exit.CHECKPOINT == 66


def test_harmless_changes_are_said_and_the_run_goes_on(tmp_path, capsys):
    make(tmp_path, max_steps=2).fit()
    diary = Diary()
    changes = {"optimizer": {"learning_rate": 0.05}, "max_steps": 4, "devices": 8, "gradient_accumulation_steps": 1}
    make(tmp_path, [diary], **changes).fit()
    printed = capsys.readouterr().out
    assert "changed on resume: optimizer.learning_rate: 0.1 -> 0.05" in printed
    assert "changed on resume: max_steps: 2 -> 4" in printed and "changed on resume: devices: 1 -> 8" in printed
    assert diary.entries[0] == ("fit", 2) and diary.steps("step") == [3, 4]
    assert read_metrics(tmp_path, "train")[-1]["learning_rate"] == pytest.approx(0.05)
    events = [event["event"] for event in read_events(tmp_path) if event["event"] != "goodput"]
    assert events[-4:] == ["resume", "save", "durable", "end"]


def test_resume_never_refuses_a_directory_that_holds_checkpoints(finished):
    with pytest.raises(ConfigError, match=r"checkpoint.resume is never"):
        make(finished[0], checkpoint={"resume": "never"}).fit()


def test_resume_never_begins_where_there_is_none(tmp_path):
    diary = Diary()
    make(tmp_path, [diary], max_steps=2, checkpoint={"resume": "never"}).fit()
    assert diary.entries[0] == ("fit", 0)


def test_a_run_that_goes_back_to_a_step_sets_the_newer_ones_aside(tmp_path):
    fields = {"max_steps": 6, "checkpoint": {"save_steps": 2}}
    first = make(tmp_path, **fields)
    first.fit()
    diary = Diary()
    back = make(tmp_path, [diary], max_steps=5, checkpoint={"save_steps": 0, "resume": 2})
    back.fit()
    assert diary.entries[0] == ("fit", 2) and diary.steps("step") == [3, 4, 5]
    assert checkpoints(tmp_path) == [2, 5]
    assert sorted(os.listdir(tmp_path / "checkpoints" / "_superseded")) == ["4", "6"]
    (superseded,) = read_events(tmp_path, "superseded")
    assert superseded["steps"] == [4, 6]
    forward = make(tmp_path, **fields)
    forward.fit()
    np.testing.assert_array_equal(forward.state.params["w"], first.state.params["w"])


def test_a_step_that_is_not_there_is_named(finished):
    with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
        make(finished[0], checkpoint={"resume": 3}, max_steps=8, optimizer={"name": "adamw"}).fit()


@pytest.mark.parametrize("source", ("run", "checkpoint"))
def test_init_from_takes_the_parameters_and_begins_anew(source, finished, tmp_path):
    run_dir, old = finished
    path = run_dir if source == "run" else run_dir / "checkpoints" / "6"

    class Look(Callback):
        def on_fit_start(self, trainer):
            self.params, self.ema = jax.device_get((trainer.state.params, trainer.state.ema))
            self.moments = [np.asarray(leaf).any() for leaf in jax.tree.leaves(trainer.state.opt_state)]
            self.counters = trainer.counters.step, trainer.counters.tokens

    look = Look()
    trainer = make(
        tmp_path,
        [look],
        rows=examples(seed=5),
        seed=3,
        max_steps=2,
        checkpoint={"init_from": str(path)},
        optimizer={"name": "adamw", "ema_decay": 0.5},
    )
    trainer.fit()
    for name in ("w", "b"):
        np.testing.assert_array_equal(look.params[name], old.state.params[name])
        np.testing.assert_array_equal(look.ema[name], look.params[name])
    assert look.counters == (0, 0) and not any(look.moments)
    assert trainer.counters.step == 2
    assert read_events(tmp_path)[0]["event"] == "start"
    again = make(  # started again it resumes, and does not go back to the parameters of the other run
        tmp_path, rows=examples(seed=5), seed=3, max_steps=2, checkpoint={"init_from": str(path)},
        optimizer={"name": "adamw", "ema_decay": 0.5},
    )  # fmt: skip
    assert again.fit().train == [] and again.counters.step == 2


@pytest.mark.parametrize("source", ("checkpoint", "init_from"))
def test_a_state_that_is_there_is_freed_before_the_one_that_replaces_it_is_read(source, tmp_path, monkeypatch):
    make(tmp_path / "first", max_steps=2).fit()
    place = {"checkpoint": {"init_from": str(tmp_path / "first")}} if source == "init_from" else {}
    trainer = make(tmp_path / ("second" if place else "first"), max_steps=4, **place)
    before = [weakref.ref(leaf) for leaf in jax.tree.leaves(trainer.state)]
    alive = []

    def read_arrays(*arguments, **options):
        alive.extend(reference() is not None for reference in before)
        return original(*arguments, **options)

    original = arrays.read_arrays
    monkeypatch.setattr(arrays, "read_arrays", read_arrays)
    trainer.fit()
    assert trainer.counters.step == 4 and alive and not any(alive)


def test_init_from_a_place_without_checkpoints_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no finished checkpoint"):
        make(tmp_path / "run", checkpoint={"init_from": str(tmp_path)}).fit()


def test_a_run_directory_in_use_is_refused_by_whom_holds_it(tmp_path):
    trainer = make(tmp_path, max_steps=1)
    with RunLease(tmp_path), pytest.raises(ConfigError, match=f"is in use by process {os.getpid()}") as caught:
        trainer.fit()
    assert caught.value.exit_code == Exit.CONFIG == 64
    trainer.fit()  # free again: the refusal left no lock behind
    assert checkpoints(tmp_path) == [1]


def test_how_checkpoints_are_kept_comes_from_the_config(tmp_path, monkeypatch):
    seen = {}

    class Seen(session.Checkpoints):
        def __init__(self, run_dir, **options):
            seen.update(options)
            super().__init__(run_dir, **options)

    monkeypatch.setattr(session, "Checkpoints", Seen)
    kept = {"save_total_limit": 7, "keep_best": 2, "best_mode": "max", "async_save": False}
    make(tmp_path, max_steps=1, checkpoint=kept | {"best": "eval_absolute"}).fit()
    assert seen.pop("on_event") and seen.pop("lease").run_dir == str(tmp_path)
    assert seen.pop("backup") is None and seen == kept | {"best_metric": "eval_absolute"}


def test_trackers_and_the_level_of_the_console_come_from_the_config(tmp_path, capsys):
    make(tmp_path / "quiet", max_steps=1, logging={"level": "warning", "trackers": []}).fit()
    assert capsys.readouterr().out == "" and not (tmp_path / "quiet" / "tb").exists()
    make(tmp_path / "plain", max_steps=1, logging={"trackers": ["tensorboard"]}).fit()
    assert "step 1/1" in capsys.readouterr().out and len(list((tmp_path / "plain" / "tb").iterdir())) == 1


def test_save_minutes_saves_by_the_clock_at_log_points(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: clock.now))

    class Tick(Callback):
        def on_step_start(self, trainer, step):
            clock.now = 60.0 * step

    diary = Diary()
    fields = {"checkpoint": {"save_minutes": 2.5, "save_total_limit": None}, "logging": {"log_every_n_steps": 2}}
    make(tmp_path, [diary, Tick()], max_steps=11, **fields).fit()
    # Lines at 1, 2, 4, 6, 8, 10, 11. From 0: 4 is the first 150 s later; then 8; and the last.
    assert diary.steps("save") == [4, 8, 11] == checkpoints(tmp_path)


def test_a_dry_session_has_no_files_and_logs_to_the_console_alone(tmp_path, capsys):
    config = load_config(settings(tmp_path / "run", fast_dev_run=True), env={})
    with Session(config, Timetable.of(config, 8, None)) as dry:
        dry.emit("start")
        dry.log(1, "train", {"loss": 1.5})
        assert not dry.resumes()
        dry.write_config()
    assert not (tmp_path / "run").exists()
    assert "step 1/1 | loss 1.5000" in capsys.readouterr().out


def test_the_config_that_is_written_starts_the_same_run(finished):
    run_dir, trainer = finished
    assert load_config(run_dir / "config.yaml", env={}) == trainer.config


def test_a_run_dir_that_cannot_be_written_is_said_before_the_data_is_looked_for(capsys):
    assert main(["pretrain", "--run_dir", "/proc/jtrain", "--data.train", "README.md", "--accelerator", "cpu"]) == 14
    assert "/proc/jtrain" in capsys.readouterr().err


def test_so_is_a_directory_that_belongs_to_another_run(tmp_path, capsys):
    make(tmp_path, max_steps=2).fit()
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xff not text")  # would be answered with 65
    assert main(["pretrain", "--run_dir", str(tmp_path), "--data.train", str(path), "--accelerator", "cpu"]) == 64
    assert "belongs to a run with another config" in capsys.readouterr().err
