"""SIGTERM at awkward moments: the step is saved, and the next start ends where an undisturbed run ends."""

import os
import signal
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jtrain import Callback
from jtrain.errors import Exit, Preempted
from jtrain.observe.metrics import read_metrics
from jtrain.train.preemption import leaves_at_once
from jtrain.train.session import Session
from tests.train.fits import Diary, checkpoints, examples, make


def run(run_dir, callbacks=(), **changes):
    """A trainer of ten steps, evaluated at 3, 6, 9 and 10."""
    fields = {"eval": {"eval_steps": 3}, "logging": {"log_every_n_steps": 1}, "held_out": examples(11, seed=1)}
    return make(run_dir, callbacks, **fields | changes)


def terminate(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    return {}


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


def test_a_signal_during_an_evaluation_lets_it_end_and_stops_after_the_next_step(tmp_path, undisturbed):
    assert stops_at(run(tmp_path, compute_metrics=terminate)) == 4
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
    with pytest.raises(Preempted) as caught, leaves_at_once():
        signal.raise_signal(signal.SIGTERM)
        time.sleep(10)
    assert caught.value.exit_code == 11
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
