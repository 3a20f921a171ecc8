import logging
from types import SimpleNamespace

import numpy as np
import pytest

from jtrain import Callback
from jtrain.errors import ConfigError
from jtrain.train.callbacks import CallbackList, EarlyStopping
from tests.train.fits import Ask, make


class Count(Callback):
    """Counts steps, over restarts too."""

    def __init__(self, start: int = 0):
        self.count = start

    def on_step_end(self, trainer, step, metrics):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Other(Callback):
    def state_dict(self):
        return {"other": True}


def stopped(scores, mode="min", patience=2, threshold=0.0):
    """Number of the evaluation after which the run was asked to stop; None if it was not."""
    asked = []
    trainer = SimpleNamespace(request_stop=asked.append)
    callback = EarlyStopping("score", mode, patience, threshold)
    for number, score in enumerate(scores, start=1):
        callback.on_evaluate(trainer, {"score": score})
        if asked:
            return number
    return None


def test_a_callbacks_state_survives_a_restart_also_when_another_comes_before_it(tmp_path):
    first = [Count(), Count(start=100), Ask("on_step_end", 2, "stop", "the test says so")]
    make(tmp_path, first, max_steps=6).fit()
    assert [callback.count for callback in first[:2]] == [3, 103]
    second = [Other(), Count(), Count()]
    make(tmp_path, second, max_steps=6).fit()
    assert [callback.count for callback in second[1:]] == [6, 106]


def test_callbacks_are_called_in_the_lists_order():
    called = []
    callbacks = [Callback(), Callback()]
    for number, callback in enumerate(callbacks):
        callback.on_save = lambda trainer, step, number=number: called.append((number, step))
    CallbackList(callbacks)("on_save", None, 7)
    assert called == [(0, 7), (1, 7)]


@pytest.mark.parametrize("given", (Count, print))
def test_what_is_no_callback_is_refused(given):
    with pytest.raises(ConfigError, match="is no Callback"):
        CallbackList([given])


def test_a_state_that_is_not_json_is_refused_by_the_callbacks_name():
    callback = Count(start=np.float32(1))
    with pytest.raises(ConfigError, match="callback Count:0"):
        CallbackList([callback]).state_dict()


@pytest.mark.parametrize(
    ("scores", "options", "expected"),
    (
        ((3, 2, 2.5, 2.6), {}, 4),
        ((3, 2, 2.5, 1.9, 2, 2), {}, 6),
        ((1, 2, 1.5, 1.9), {"mode": "max"}, 4),
        ((3, 2.95, 2.9), {"threshold": 0.2}, 3),
        ((3, 2.95, 2.7, 2.65), {"threshold": 0.2}, None),
        ((float("nan"), 2, 1, 1.5), {}, None),  # a NaN is never the best
        ((2, float("nan"), float("nan")), {}, 3),
        ((2, 2), {"patience": 1}, 2),
    ),
)
def test_early_stopping_waits_for_evaluations_in_a_row_without_a_better_one(scores, options, expected):
    assert stopped(scores, **options) == expected


def test_early_stopping_on_a_figure_that_is_not_there_says_so(caplog):
    callback = EarlyStopping("eval_accurracy", "max", 1)
    with caplog.at_level(logging.WARNING):
        callback.on_evaluate(None, {"eval_loss": 1.0, "eval_accuracy": 0.5})
    assert "eval_accurracy" in caplog.text and "eval_accuracy, eval_loss" in caplog.text
