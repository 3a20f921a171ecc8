"""Whom a run waits for that hangs."""

import pytest

from jtrain.parallel.places import Places
from tests.parallel.test_agreement import Shared


class Kept(Shared):
    def put(self, key, value, *, replace=False):
        self.values[key] = value
        return True


@pytest.fixture
def run():
    """Three processes, all in update 12; process 0 has just looked."""
    shared, clock = Kept(), [0.0]
    places = [Places(shared, number, 3, 40.0, lambda: clock[0]) for number in range(3)]
    places[0].clock = clock
    for number in range(3):
        write(places, number)
    places[0].read()
    return places


def write(places, number, *, phase="step", step=12, passed=13, seconds=5.0):
    places[number].write(phase, step, passed, seconds, {})


def test_who_is_silent_is_named_first(run):
    run[0].clock[0] += 50
    write(run, 0), write(run, 2, passed=12)
    assert "silent (stopped, or gone): process 1 (" in run[0].blame() and "process 2" not in run[0].blame()


def test_who_was_never_heard_of_is_silent(run):
    del run[0]._store.values["jtrain/place/2"]
    assert "silent (stopped, or gone): process 2" in run[0].blame()


def test_who_has_passed_fewer_places_is_behind(run):
    run[0].clock[0] += 10
    write(run, 0), write(run, 2), write(run, 1, phase="restore", step=None, passed=0, seconds=900)
    said = run[0].blame()
    assert "behind the others: process 1" in said and "in phase restore, for 900 s" in said


def test_all_in_one_place_says_so(run):
    assert run[0].blame() == "all 3 processes wait alike"


def test_many_are_counted():
    shared = Kept()
    places = Places(shared, 0, 100, 40.0, lambda: 0.0)
    places.write("step", 1, 1, 0.0, {})
    assert places.blame().endswith("process 8; and 91 more")
