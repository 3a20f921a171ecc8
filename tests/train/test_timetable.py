import pytest

from jtrain.config import load_config
from jtrain.errors import ConfigError
from jtrain.train.timetable import Timetable

ROWS = range(63 * 8)  # 63 micro-batches of 8 rows


def timetable(rows_per_step=64, rows=ROWS, **fields):
    return Timetable.of(load_config(fields, env={}), rows_per_step, rows)


def test_the_last_part_of_an_epoch_is_a_step_of_its_own():
    # 63 micro-batches, 8 to a step: 7.875 steps
    assert timetable(num_train_epochs=1).max_steps == 8
    assert timetable(max_steps="1 epoch").max_steps == 8
    assert timetable(num_train_epochs=2).max_steps == timetable(max_steps="2 epochs").max_steps == 16
    assert timetable(num_train_epochs=8).max_steps == timetable(max_steps="8 epochs").max_steps == 63


def test_epochs_are_counted_exactly():
    # 1.1 steps an epoch; in floats 10 * 1.1 is more than 11
    table = {"rows_per_step": 10, "rows": range(11)}
    assert (
        timetable(num_train_epochs=10, **table).max_steps == timetable(max_steps="10 epochs", **table).max_steps == 11
    )
    assert timetable(num_train_epochs=0.1, rows_per_step=10, rows=range(100)).max_steps == 1


def test_without_a_length_it_is_one_epoch():
    assert timetable().max_steps == 8


def test_lengths_may_be_steps_ratios_percent_tokens_and_epochs():
    table = timetable(
        max_steps=100, max_length=32, eval={"eval_steps": 0.045}, checkpoint={"save_steps": "30%"}, logging_steps=7
    )
    assert (table.eval_every, table.save_every, table.log_every) == (5, 30, 7)  # 4.5 is rounded up
    table = timetable(
        max_steps="1e5 tokens", max_length=32, eval={"eval_steps": "1 epoch"}, checkpoint={"save_steps": 0}
    )
    assert table.max_steps == 49  # 1e5 / (64 * 32) = 48.8
    assert (table.eval_every, table.save_every) == (8, 0)


def test_things_are_due_at_their_multiples_and_at_the_end():
    table = timetable(max_steps=25, eval={"eval_steps": 10}, checkpoint={"save_steps": 4}, logging_steps=6)
    steps = range(1, 26)
    assert [k for k in steps if table.logs(k)] == [1, 6, 12, 18, 24, 25]
    assert [k for k in steps if table.evaluates(k)] == [10, 20]
    assert [k for k in steps if table.saves(k)] == [4, 8, 12, 16, 20, 24]
    assert [k for k in steps if table.due(k)] == [4, 8, 10, 12, 16, 20, 24, 25]


def test_zero_is_never_before_the_end():
    table = timetable(max_steps=5, eval={"eval_steps": 0}, checkpoint={"save_steps": 0})
    assert [k for k in range(1, 6) if table.due(k)] == [5]


@pytest.mark.parametrize(("value", "steps"), ((True, 1), (3, 3)))
def test_a_fast_dev_run_has_its_own_length(value, steps):
    assert timetable(max_steps=100, fast_dev_run=value).max_steps == steps


def test_epochs_without_data_are_refused():
    with pytest.raises(ConfigError, match=r"2 epochs.*the size of an epoch"):
        timetable(max_steps="2 epochs", rows=None)


@pytest.mark.parametrize("fields", ({"max_steps": "1e15 tokens"}, {"num_train_epochs": 1e12}))
def test_a_run_has_no_more_steps_than_a_counter_holds(fields):
    with pytest.raises(ConfigError, match="more than a counter holds"):
        timetable(**fields)


def test_minutes_become_seconds():
    assert timetable(checkpoint={"save_minutes": 2.5}).save_seconds == 150.0
    assert timetable().save_seconds is None
