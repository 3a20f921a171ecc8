import math

import pytest

from jtrain.config.schema import FaultsConfig
from jtrain.errors import NumbersError
from jtrain.train.faults import NumbersCheck
from jtrain.train.session import Counters

FINE = {"finite": True, "loss": 1.0, "grad_norm": 1.0}
NAN = {"finite": False, "loss": math.nan, "grad_norm": math.nan}
OVERFLOW = {"finite": False, "loss": 1.0, "grad_norm": math.inf}


def check(loss_scaling=False, **faults):
    """A check, and the list of its events."""
    events = []
    emit = lambda event, fields: events.append((event, fields["step"]))
    look, counters = NumbersCheck(FaultsConfig(**faults), loss_scaling=loss_scaling, emit=emit), Counters()

    def at(step, values):
        counters.step = step
        look(counters, values)

    return at, events


def test_a_finite_step_starts_the_count_anew():
    look, events = check(max_consecutive_skips=2)
    for step, values in enumerate((NAN, FINE, NAN, FINE, NAN)):
        look(step, values)
    assert events == [("skipped_step", 0), ("skipped_step", 2), ("skipped_step", 4)]
    with pytest.raises(NumbersError, match="2 batches in a row"):
        look(4, NAN)


@pytest.mark.parametrize("policy", ("skip", "stop", "warn"))
def test_an_overflow_of_fp16_gradients_is_a_skipped_step_under_every_policy(policy):
    look, events = check(loss_scaling=True, nonfinite=policy)
    look(7, OVERFLOW)
    assert events == [("skipped_step", 7)]


@pytest.mark.parametrize("loss_scaling", (False, True))
def test_stop_ends_the_run_and_warn_goes_on_without_an_event(loss_scaling, caplog):
    look, events = check(loss_scaling=loss_scaling, nonfinite="stop")
    with pytest.raises(NumbersError, match="update 8 is not finite"):
        look(7, NAN)
    look, events = check(loss_scaling=loss_scaling, nonfinite="warn")
    look(7, NAN)
    assert events == [] and "update 8 is not finite and was applied" in caplog.text
