"""Slow processes, by figures whose judgement is plain."""

import pytest

from jtrain.observe.stragglers import ROUNDS, Pace, Stragglers, slow


def paces(step=10, seconds=1.0, busy=(0.1, 0.1, 0.1, 0.1), stolen=(0.0, 0.0, 0.0, 0.0)):
    return {n: Pace(step, seconds, b, s) for n, (b, s) in enumerate(zip(busy, stolen, strict=True))}


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ({}, []),
        ({"stolen": (0.0, 0.5, 0.0, 0.0)}, [(1, "stolen")]),
        ({"stolen": (0.5, 0.5, 0.5, 0.5)}, []),  # too few cores for all of them
        ({"busy": (0.1, 0.1, 0.95, 0.1)}, [(2, "busy")]),
        ({"busy": (0.1, 0.1, 0.6, 0.1)}, []),  # beside the device, for which it costs nothing
        ({"busy": (0.9, 0.95, 0.9, 0.9)}, []),  # all of them: no process is slow, the run is
        ({"stolen": (0.0, 0.2, 0.0, 0.0)}, []),
        (
            {"seconds": 0.01, "stolen": (0.0, 0.009, 0.0, 0.0), "busy": (0.001,) * 4},
            [],
        ),  # too short
    ],
)
def test_who_costs_a_quarter_of_an_update_more_than_the_others_is_slow(figures, found):
    assert [(one.process, one.kind) for one in slow(paces(**figures))] == found


def test_of_two_the_slow_one_is_named():
    (one,) = slow({0: Pace(10, 1.0, 0.1, 0.0), 1: Pace(10, 1.0, 0.1, 0.5)})
    assert "process 1 is slow: for 500 of the 1000 ms of an update it can't run, the others for 0 ms" in str(one)


def test_it_takes_several_rounds_in_a_row_and_is_told_once():
    stragglers, told = Stragglers(), []
    for step in range(10, 20):
        told += stragglers.judge(paces(step, stolen=(0.0, 0.5 * (step != 11), 0.0, 0.0)))
        assert stragglers.judge(paces(step)) == []  # nothing new
    assert [one.step for one in told] == [11 + ROUNDS]


def test_one_process_is_never_slow():
    assert slow({0: Pace(10, 1.0, 1.0, 0.9)}) == []
