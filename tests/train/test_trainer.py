import json
import os
import signal
import threading

import jax
import numpy as np
import pytest

from jtrain import Callback, Trainer
from jtrain.data.arrays import ArrayRows
from jtrain.errors import ConfigError, Exit, NumbersError, Preempted
from jtrain.observe.metrics import read_events, read_metrics
from tests.train.fits import BATCH, Ask, Diary, checkpoints, examples, make, settings, squared_error
from tests.train.linear import Linear

# contract.md, the run directory
TRAIN_LINE = {
    *("step", "split", "time", "loss", "learning_rate", "grad_norm", "tokens", "examples", "step_seconds"),
    *("tokens_per_second", "tokens_per_second_per_device", "mfu", "tflops_per_device", "memory_gib"),
    *("data_wait_seconds", "skipped_steps", "epoch"),
}


def poisoned(batch: int = 2) -> dict[str, np.ndarray]:
    """Five batches in order, of which one gives NaN."""
    data = examples()
    data["y"][batch * BATCH] = np.nan
    return data


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """15 steps; lines and evaluations every 4, saves every 8."""
    run_dir = tmp_path_factory.mktemp("run") / "run"
    diary = Diary()
    trainer = make(
        run_dir,
        [diary],
        held_out=examples(21, seed=1),
        max_steps=15,
        eval={"eval_steps": 4},
        checkpoint={"save_steps": 8},
    )
    initial = jax.device_get(trainer.state.params)
    trainer.fit()
    return trainer, diary, run_dir, initial


def test_a_step_is_logged_then_evaluated_then_saved(run):
    entries = run[1].entries
    assert [entry for entry in entries if entry[1] == 8] == [("step", 8), ("log", 8), ("evaluate", 8), ("save", 8)]
    assert entries[-5:] == [("step", 15), ("log", 15), ("evaluate", 15), ("save", 15), ("end", 15)]
    assert [step for _, step in entries] == sorted(step for _, step in entries)
    assert entries[0] == ("fit", 0)


def test_there_is_a_line_at_step_1_at_each_multiple_and_at_the_last_step(run):
    _, diary, run_dir, _ = run
    assert [line["step"] for line in read_metrics(run_dir, "train")] == [1, 4, 8, 12, 15] == diary.steps("log")
    assert [line["step"] for line in read_metrics(run_dir, "eval")] == [4, 8, 12, 15] == diary.steps("evaluate")
    assert diary.steps("step") == list(range(1, 16))


def test_train_lines_have_the_contracts_keys(run):
    lines = read_metrics(run[2], "train")
    assert all(set(line) == TRAIN_LINE | {"mfu_legacy", "absolute"} for line in lines)
    assert lines[1]["mfu"] is None  # a model of unknown FLOPs, on a CPU
    assert (lines[1]["tokens"], lines[1]["examples"], lines[1]["epoch"]) == (4 * BATCH, 4 * BATCH, 0.8)
    assert set(read_metrics(run[2], "eval")[0]) == {"step", "split", "time", "eval_loss", "eval_absolute"}


def test_the_history_holds_the_lines_of_the_file(run):
    trainer, _, run_dir, _ = run
    for split in ("train", "eval"):
        lines = [{k: v for k, v in line.items() if k not in ("split", "time")} for line in read_metrics(run_dir, split)]
        assert getattr(trainer.history, split) == lines


def test_a_lines_figures_are_that_updates_own(run):
    trainer, _, run_dir, initial = run
    rows = trainer.train_rows.rows(np.arange(BATCH))
    error = np.float64(rows["x"]) @ np.float64(initial["w"]) + initial["b"] - rows["y"]
    gradient = [*(2 * error @ rows["x"] / BATCH), 2 * error.mean()]
    first = read_metrics(run_dir, "train")[0]
    assert first["loss"] == pytest.approx((error**2).mean(), rel=1e-6)
    assert first["grad_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-6)
    assert first["learning_rate"] == pytest.approx(0.1)


def test_every_save_is_durable_before_the_run_says_its_end(run):
    events = read_events(run[2])
    kinds = [line["event"] for line in events if line["event"] not in ("save", "goodput")]
    assert kinds == ["start", "durable", "durable", "end"]
    assert [line["step"] for line in events if line["event"] == "durable"] == [8, 15] == checkpoints(run[2])
    assert (run[2] / "config.yaml").exists()


@pytest.mark.parametrize(("max_steps", "save_steps", "saved"), ((15, 10, [10, 15]), (10, 5, [5, 10]), (3, 0, [3])))
def test_the_last_step_is_saved_once(max_steps, save_steps, saved, tmp_path):
    diary = Diary()
    make(tmp_path, [diary], max_steps=max_steps, checkpoint={"save_steps": save_steps}).fit()
    assert diary.steps("save") == saved == checkpoints(tmp_path)


@pytest.mark.parametrize(
    ("scores", "limit", "kept"),
    (
        ((1, 2, 3, 4), 1, [2, 8]),
        ((4, 1, 3, 2), 1, [4, 8]),
        ((4, 3, 2, 1), 1, [8]),
        ((1, 2, 3, 4), 2, [2, 8]),
        ((4, 3, 2, 1), 2, [6, 8]),
    ),
)
def test_the_newest_and_the_best_survive(scores, limit, kept, tmp_path):
    script = iter(scores)
    make(
        tmp_path,
        held_out=examples(8),
        max_steps=8,
        compute_metrics=lambda sums: {"score": next(script)},
        eval={"eval_steps": 2},
        checkpoint={"save_steps": 2, "best": "score", "save_total_limit": limit},
    ).fit()
    assert checkpoints(tmp_path) == kept


# Requests


def test_a_callback_may_ask_for_a_line_an_evaluation_and_a_save(tmp_path):
    diary = Diary()
    asked = [Ask("on_step_end", 2, request) for request in ("log", "evaluate", "save")]
    make(tmp_path, [diary, *asked], held_out=examples(8), max_steps=6).fit()
    assert diary.steps("log") == [1, 2, 4, 6]
    assert diary.steps("evaluate") == [3, 6]  # update 3 was in flight when step 2 ended
    assert diary.steps("save") == [3, 6] == checkpoints(tmp_path)


@pytest.mark.parametrize(
    ("method", "step", "last"), (("on_step_end", 2, 3), ("on_log", 4, 5), ("on_evaluate", 3, 3), ("on_save", 6, 6))
)
def test_a_run_that_is_asked_to_stop_leaves_a_line_an_evaluation_and_a_save(method, step, last, tmp_path):
    diary = Diary()
    trainer = make(
        tmp_path,
        [diary, Ask(method, step, "stop", "the test says so")],
        held_out=examples(8),
        eval={"eval_steps": 3},
        checkpoint={"save_steps": 6},
    )
    trainer.fit()
    assert trainer.counters.step == last
    assert diary.steps("log")[-1] == diary.steps("evaluate")[-1] == diary.steps("save")[-1] == last
    assert diary.entries[-1] == ("end", last)
    for kind in ("log", "evaluate", "save"):
        assert len(set(diary.steps(kind))) == len(diary.steps(kind))
    assert checkpoints(tmp_path)[-1] == last


def test_what_a_callback_of_a_save_asks_for_is_not_forgotten(tmp_path):
    diary = Diary()
    asked = [Ask("on_save", 2, request) for request in ("evaluate", "save")]
    make(tmp_path, [diary, *asked], held_out=examples(8), max_steps=6, checkpoint={"save_steps": 2}).fit()
    assert diary.steps("evaluate") == [3, 6]
    assert diary.steps("save") == [2, 3, 4, 6]


# Early stopping


def stopping(run_dir, scores, callbacks=(), patience=2, **changes):
    script = iter(scores)
    diary = Diary()
    trainer = make(
        run_dir,
        [*callbacks, diary],
        held_out=examples(8),
        max_steps=20,
        compute_metrics=lambda sums: {"score": next(script)},
        eval={"eval_steps": 2, "early_stopping_patience": patience},
        checkpoint={"best": "score"},
        **changes,
    )
    trainer.fit()
    return trainer, diary


def test_early_stopping_counts_over_a_resume_and_a_stopped_run_stays_stopped(tmp_path):
    whole, diary = stopping(tmp_path / "whole", (3, 2, 2.5, 2.6, 1))
    assert whole.counters.step == 8  # the best was at 4; 6 and 8 are no better
    assert diary.steps("log")[-1] == diary.steps("save")[-1] == 8

    first, _ = stopping(tmp_path / "parts", (3, 2, 2.5), [Ask("on_step_end", 5, "stop", "the test says so")])
    assert first.counters.step == 6
    second, _ = stopping(tmp_path / "parts", (2.6, 1))
    assert second.counters.step == 8
    third, diary = stopping(tmp_path / "parts", (1,))
    assert third.counters.step == 8 and diary.steps("step") == []
    fourth, _ = stopping(tmp_path / "parts", (1, 2, 3, 4, 5, 6), patience=3)
    assert fourth.counters.step == 16  # better at 10; 12, 14 and 16 are no better


# Numbers that are not finite


def test_a_skipped_batch_leaves_no_trace_but_its_counts(tmp_path):
    schedule = {"schedule": {"name": "linear", "min_ratio": 0.0}, "logging": {"log_every_n_steps": 1}, "max_steps": 4}
    skipped = make(tmp_path / "skipped", rows=poisoned(), **schedule)
    clean_rows = {name: np.delete(v, np.s_[2 * BATCH : 3 * BATCH], axis=0) for name, v in poisoned().items()}
    clean = make(tmp_path / "clean", rows=clean_rows, **schedule)
    for trainer in (skipped, clean):
        trainer.fit()
    losses = [[(line["loss"], line["learning_rate"]) for line in t.history.train] for t in (skipped, clean)]
    assert losses[0] == losses[1] and np.isfinite(losses).all()
    np.testing.assert_array_equal(skipped.state.params["w"], clean.state.params["w"])
    lines = read_metrics(tmp_path / "skipped", "train")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["skipped_steps"] for line in lines] == [0, 0, 1, 1]
    assert [line["examples"] for line in lines] == [8, 16, 32, 40]
    (event,) = read_events(tmp_path / "skipped", "skipped_step")
    assert (event["step"], event["loss"]) == (2, None)


def test_a_resume_behind_a_skipped_batch_reads_on_where_the_run_was(tmp_path):
    fields = {"rows": poisoned(), "logging": {"log_every_n_steps": 1}, "max_steps": 5}
    whole = make(tmp_path / "whole", **fields)
    whole.fit()
    make(tmp_path / "parts", [Ask("on_step_end", 2, "stop", "the test says so")], **fields).fit()
    resumed = make(tmp_path / "parts", **fields)
    resumed.fit()
    assert (resumed.counters.step, resumed.counters.skipped) == (5, 1)
    names = ("step", "loss", "examples", "skipped_steps")
    kept = [[tuple(line[name] for name in names) for line in read_metrics(d, "train")]
            for d in (tmp_path / "whole", tmp_path / "parts")]  # fmt: skip
    assert kept[0] == kept[1]


def test_under_stop_a_batch_that_is_not_finite_ends_the_run_with_exit_15(tmp_path):
    diary = Diary()
    trainer = make(tmp_path, [diary], rows=poisoned(), faults={"nonfinite": "stop"})
    with pytest.raises(NumbersError, match="update 3 is not finite: loss=nan") as caught:
        trainer.fit()
    assert caught.value.exit_code == Exit.NUMBERS == 15
    assert diary.entries[-1] == ("NumbersError", 2)
    assert np.isfinite(trainer.state.params["w"]).all()
    assert "NumbersError" in read_events(tmp_path, "end")[0]["error"]


def test_batches_skipped_one_after_the_other_end_the_run(tmp_path):
    data = examples()
    data["y"][2 * BATCH :] = np.nan
    trainer = make(tmp_path, rows=data, faults={"max_consecutive_skips": 3})
    with pytest.raises(NumbersError, match="3 batches in a row after step 2"):
        trainer.fit()
    assert len(read_events(tmp_path, "skipped_step")) == 3


class Terminate(Callback):
    """Sends SIGTERM to this process when batch number `batch` is asked for."""

    def __init__(self, batch: int):
        self.batch, self.seen = batch, 0

    def on_step_start(self, trainer, step):
        if self.seen == self.batch:
            os.kill(os.getpid(), signal.SIGTERM)
        self.seen += 1


def test_sigterm_saves_and_says_so_and_the_line_of_the_step_stays_its_own(tmp_path):
    fields = {"rows": poisoned(), "logging": {"log_every_n_steps": 1}, "max_steps": 5}
    diary = Diary()
    trainer = make(tmp_path, [diary, Terminate(batch=2)], **fields)  # the batch that is skipped
    with pytest.raises(Preempted) as caught:
        trainer.fit()
    assert caught.value.exit_code == Exit.PREEMPTED_SAVED == 10
    assert diary.steps("save") == [2] == checkpoints(tmp_path)
    assert read_events(tmp_path, "preempted")[0]["saved"] is True
    assert [(line["step"], line["loss"] is None) for line in read_metrics(tmp_path, "train")] == [
        (1, False),
        (2, False),
    ]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    resumed = make(tmp_path, **fields)
    resumed.fit()
    assert (resumed.counters.step, resumed.counters.skipped, resumed.counters.examples) == (5, 1, 48)


# The rest


def test_a_fast_dev_run_takes_n_batches_of_each_and_writes_nothing(tmp_path):
    counts = []
    trainer = make(
        tmp_path / "run",
        held_out=examples(40),
        fast_dev_run=2,
        compute_metrics=lambda sums: counts.append(sums["loss"][1]) or {},
        checkpoint={"save_steps": 1},
        eval={"eval_steps": 1},
    )
    history = trainer.fit()
    assert [line["step"] for line in history.train] == [1, 2]
    assert counts == [16.0, 16.0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("prefetch", (0, 2))
def test_batches_are_read_ahead_on_another_thread_where_that_is_wanted(prefetch, tmp_path):
    readers = []

    class Watched(ArrayRows):
        def rows(self, indices):
            readers.append(threading.current_thread() is threading.main_thread())
            return super().rows(indices)

    trainer = make(tmp_path, rows=Watched(examples()), data={"prefetch": prefetch})
    readers.clear()
    with trainer.train_loader() as loader:
        for step in range(3):
            loader[step]
    assert set(readers) == ({False} if prefetch else {True})  # the wait for the first may be broken off, too


def test_a_run_that_broke_off_before_its_first_save_starts_anew(tmp_path):
    class Fail(Callback):
        def __init__(self):
            self.failed = False

        def on_step_end(self, trainer, step, metrics):
            if step == 3 and not self.failed:
                self.failed = True
                raise RuntimeError("once")

    fields = {"max_steps": 5, "logging": {"log_every_n_steps": 1}}
    trainer = make(tmp_path / "broken", [Fail()], **fields)
    with pytest.raises(RuntimeError, match="once"):
        trainer.fit()
    again = trainer.fit()
    clean = make(tmp_path / "clean", **fields)
    assert [line["loss"] for line in again.train] == [line["loss"] for line in clean.fit().train]
    assert trainer.counters == clean.counters


def test_a_run_that_is_complete_says_so_and_trains_nothing(tmp_path, capsys):
    make(tmp_path, max_steps=4).fit()
    diary = Diary()
    trainer = make(tmp_path, [diary], max_steps=3)
    assert trainer.fit().train == []
    assert "the run is complete: max_steps=3, and step 4 is reached" in capsys.readouterr().out
    assert diary.entries == []


def test_figures_that_a_step_hook_adds_stand_in_the_lines(tmp_path):
    def hook(gradients, state, metrics):
        return gradients, metrics | {"largest": abs(gradients["w"]).max()}

    history = make(tmp_path, step_hook=hook, max_steps=1).fit()
    assert 0 < history.train[0]["largest"] <= history.train[0]["grad_norm"]


def test_figures_of_other_data_are_returned_and_not_logged(tmp_path):
    trainer = make(tmp_path, held_out=examples(21, seed=1), max_steps=2)
    trainer.fit()
    lines = (tmp_path / "metrics.jsonl").read_text()
    other = trainer.evaluate(examples(5, seed=7))
    assert other["eval_loss"] != trainer.history.eval[-1]["eval_loss"]
    assert (tmp_path / "metrics.jsonl").read_text() == lines
    assert len(trainer.history.eval) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda trainer: trainer.fit(), "train_data is missing"),
        (lambda trainer: trainer.evaluate(), "there is no evaluation data"),
        (lambda trainer: trainer.predict(examples(8)), "predict needs predict_fn"),
    ),
)
def test_what_is_missing_is_named(call, message, tmp_path):
    trainer = Trainer(settings(tmp_path), model=Linear, loss_fn=squared_error)
    with pytest.raises(ConfigError, match=message):
        call(trainer)


def test_sections_may_be_given_as_keywords(tmp_path):
    trainer = Trainer(
        run_dir=str(tmp_path), max_steps=1, global_batch_size=8, precision="32-true", compile_cache="",
        mesh="fsdp=4,tensor=2", optimizer={"name": "lion"}, logging={"trackers": []},
        model=Linear, loss_fn=squared_error, train_data=examples(),
    )  # fmt: skip
    assert dict(trainer.mesh.shape)["fsdp"] == 4 and trainer.config.optimizer.name == "lion"
    trainer.fit()
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["loss"] > 0
