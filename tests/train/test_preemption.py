"""SIGTERM at awkward moments: the step is saved, and the next start ends where an undisturbed run ends."""

import os
import signal
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jtrain import Callback, progress
from jtrain.config import load_config
from jtrain.data.arrays import as_rows
from jtrain.errors import ConfigError, Exit, Preempted
from jtrain.observe.metrics import read_events, read_metrics
from jtrain.train.guard import _here, guarded
from jtrain.train.session import Session
from tests.train.fits import BATCH, Diary, checkpoints, examples, make


def run(run_dir, callbacks=(), **changes):
    """A trainer of ten steps, evaluated at 3, 6, 9 and 10."""
    fields = {"eval": {"eval_steps": 3}, "logging": {"log_every_n_steps": 1}, "held_out": examples(11, seed=1)}
    return make(run_dir, callbacks, **fields | changes)


def terminate(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    if getattr(_here, "guard", None) is not None:
        wait_until_asked()
    return {}


def until(true, seconds=20):
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert true()


def wait_until_asked():
    """A signal is taken by a thread of its own, a moment later."""
    until(lambda: _here.guard.preemption.reason)


class At(Callback):
    """SIGTERM when a method is called at a step."""

    def __init__(self, method, step):
        setattr(self, method, lambda trainer, number, *_: number == step and terminate())


def outcome(trainer):
    """The final parameters' bits and the figures on disk."""
    bits = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trainer.state)]
    names = ("step", "split", "loss", "eval_loss", "tokens")
    return bits, [tuple(line.get(name) for name in names) for line in read_metrics(trainer.config.run_dir)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    trainer = run(tmp_path_factory.mktemp("undisturbed"))
    trainer.fit()
    return outcome(trainer)


def stops_at(trainer):
    """The step at which the signal stops the run; it is saved."""
    with pytest.raises(Preempted) as caught:
        trainer.fit()
    assert caught.value.exit_code == Exit.PREEMPTED_SAVED
    assert checkpoints(Path(trainer.config.run_dir))[-1] == trainer.counters.step
    return trainer.counters.step


def goes_on(run_dir, undisturbed, callbacks=()):
    trainer = run(run_dir, callbacks)
    trainer.fit()
    assert outcome(trainer) == undisturbed


def test_a_signal_while_the_step_compiles_stops_after_the_first_step(tmp_path, undisturbed):
    trainer = run(tmp_path)
    compile_step = trainer.train_step.compile
    trainer.train_step.compile = lambda *arguments: terminate() or compile_step(*arguments)
    assert stops_at(trainer) == 1
    goes_on(tmp_path, undisturbed)


def test_a_signal_at_the_end_of_an_evaluation_stops_before_the_next_step(tmp_path, undisturbed):
    assert stops_at(run(tmp_path, compute_metrics=terminate)) == 3
    assert [line["step"] for line in read_metrics(tmp_path, "eval")] == [3]
    goes_on(tmp_path, undisturbed)


def test_a_signal_during_an_evaluation_breaks_it_off_and_the_next_start_makes_it_good(tmp_path, undisturbed):
    trainer = run(tmp_path)
    prepare, calls = trainer.prepare, []

    def prepare_or_terminate(batch, params, variables):
        evaluates = trainer.interrupts is not bool
        calls.append(evaluates)
        if calls.count(True) == 1 and evaluates:
            terminate()
            wait_until_asked()
        return prepare(batch, params, variables)

    trainer.prepare = prepare_or_terminate
    assert stops_at(trainer) == 3 and calls.count(True) == 1
    assert read_metrics(tmp_path, "eval") == []
    goes_on(tmp_path, undisturbed)


def test_an_evaluation_that_was_due_at_the_stop_is_made_good_at_the_next_start(tmp_path, undisturbed):
    assert stops_at(run(tmp_path, [At("on_step_start", 6)])) == 6
    assert [line["step"] for line in read_metrics(tmp_path, "eval")] == [3]
    goes_on(tmp_path, undisturbed)


def test_so_is_what_the_last_step_owes(tmp_path, undisturbed):
    assert stops_at(run(tmp_path, [At("on_step_start", 10)])) == 10
    diary = Diary()
    goes_on(tmp_path, undisturbed, [diary])
    assert diary.entries == [("fit", 10), ("evaluate", 10), ("end", 10)]
    again = Diary()
    run(tmp_path, [again]).fit()  # it is complete
    assert again.entries == []


def test_a_signal_during_the_last_save_does_not_cut_it_off(tmp_path, undisturbed, monkeypatch):
    handlers = []
    close = Session.close
    monkeypatch.setattr(
        Session, "close", lambda session: (handlers.append(signal.getsignal(signal.SIGTERM)), close(session))
    )
    trainer = run(tmp_path, [At("on_save", 10)])
    trainer.fit()
    assert outcome(trainer) == undisturbed and checkpoints(tmp_path) == [10]
    assert handlers != [signal.SIG_DFL]  # what is under way is finished before the signal can kill


def test_the_step_of_a_dry_run_is_not_saved_and_the_exit_code_says_so(tmp_path):
    trainer = run(tmp_path / "run", [At("on_step_start", 2)], fast_dev_run=4)
    with pytest.raises(Preempted) as caught:
        trainer.fit()
    assert caught.value.exit_code == Exit.PREEMPTED_NOT_SAVED
    assert not (tmp_path / "run").exists()


def test_a_thread_that_may_not_install_handlers_trains_all_the_same(tmp_path, undisturbed):
    trainer = run(tmp_path)
    thread = threading.Thread(target=trainer.fit)
    thread.start()
    thread.join()
    assert outcome(trainer) == undisturbed


def test_the_handler_of_before_is_back_after_the_run(tmp_path):
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        run(tmp_path, max_steps=1).fit()
        assert signal.getsignal(signal.SIGTERM) is terminate
    finally:
        signal.signal(signal.SIGTERM, before)


def test_fit_again_in_one_process_goes_on_after_a_stop_and_leaves_a_finished_run_alone(tmp_path, undisturbed):
    trainer = run(tmp_path, [At("on_step_start", 5)])
    assert stops_at(trainer) == 5
    assert [line["step"] for line in trainer.fit().train] == [6, 7, 8, 9, 10]
    assert outcome(trainer) == undisturbed
    assert trainer.fit().train == [] and outcome(trainer) == undisturbed


def test_before_the_first_step_sigterm_ends_the_run_at_once_and_gives_the_handler_back():
    with pytest.raises(Preempted) as caught, guarded(load_config({})):
        signal.raise_signal(signal.SIGTERM)
        threading.Event().wait(10)
    assert caught.value.exit_code == 11
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_before_the_first_step_another_reason_ends_it_too():
    with pytest.raises(Preempted), guarded(load_config({})) as guard:
        threading.Timer(0.1, guard.preemption.ask, ("the end of this spot machine",)).start()
        threading.Event().wait(10)


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGHUP"])
def test_signals_of_the_config_save_and_leave(name, tmp_path):
    before = signal.signal(getattr(signal, name), signal.SIG_DFL)  # under nohup SIGHUP is ignored, and stays so
    send = lambda trainer, number: number == 2 and (signal.raise_signal(getattr(signal, name)), wait_until_asked())
    ask = Callback()
    ask.on_step_start = send
    changes = {} if name == "SIGUSR1" else {"faults": {"preemption_signals": [name]}}
    try:
        assert stops_at(run(tmp_path, [ask], **changes)) == 2
    finally:
        signal.signal(getattr(signal, name), before)
    (event,) = read_events(tmp_path, "preempted")
    assert (event["step"], event["saved"], event["reason"]) == (2, True, name)


def test_a_stop_file_saves_and_leaves_and_keeps_the_run_from_starting(tmp_path, undisturbed, monkeypatch):
    monkeypatch.setattr("jtrain.train.beside._STOP_SECONDS", 0.0)
    ask = Callback()
    ask.on_step_start = lambda trainer, number: number == 5 and ((tmp_path / "STOP").touch(), wait_until_asked())
    assert stops_at(run(tmp_path, [ask])) == 5
    with pytest.raises(ConfigError, match=r"STOP is there.*\n.*remove it"):
        run(tmp_path).fit()
    (tmp_path / "STOP").unlink()
    goes_on(tmp_path, undisturbed)


def test_a_wait_for_data_is_broken_off(tmp_path, undisturbed):
    rows, stalled = as_rows(examples(), seed=None), threading.Event()

    class Stalls:
        def __len__(self):
            return len(rows)

        def rows(self, indices):
            if indices[0] == 3 * BATCH and not stalled.is_set():
                stalled.wait(30)
            return rows.rows(indices)

    waits = lambda: progress.current().phase == "data_wait" and progress.current().seconds > 0.3
    trainer = run(tmp_path, rows=Stalls())
    watch = threading.Thread(target=lambda: (until(waits), terminate()))
    watch.start()
    try:
        assert stops_at(trainer) == 3
    finally:
        stalled.set()
        watch.join()
    goes_on(tmp_path, undisturbed)
