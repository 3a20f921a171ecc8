"""The watchdog by a clock of its own."""

import pytest

from jtrain.progress import Progress
from jtrain.train.watchdog import Watchdog, may_end


class Run:
    """A run that stands still unless it is told otherwise; its process computes."""

    def __init__(self, limits):
        self.now, self.worked, self.place, self.moved, self.said = 1000.0, 0.0, Progress("init"), 1000.0, []
        self.dog = Watchdog(limits, self.said.append, current=self.current, clock=lambda: self.now, busy=self.busy)
        self.dog._arm = lambda now, left: None

    def current(self):
        return Progress(self.place.phase, self.place.step, None, self.now - self.moved)

    def busy(self):
        return self.worked

    def gets_on(self, phase, step=None):
        self.place, self.moved = Progress(phase, step), self.now

    def waits(self, seconds, tick=0.5):
        """The hangs that are told meanwhile."""
        found = []
        for _ in range(int(seconds / tick)):
            self.now += tick
            self.worked += tick / 2
            found.append(self.dog.tick())
        return [hang for hang in found if hang]


@pytest.fixture
def run():
    return Run({"init": 20.0, "compile": 100.0, "step": 10.0, "data_wait": 200.0})


@pytest.mark.parametrize("phase", ["init", "compile", "step"])
def test_a_phase_that_lasts_longer_than_its_limit_hangs(phase, run):
    limit = run.dog._limits[phase]
    run.gets_on(phase, 7)
    assert run.waits(limit) == []
    (hang,) = run.waits(1)
    assert (hang.phase, hang.step, hang.limit) == (phase, 7, limit)
    assert f"in phase {phase}, after step 7" in str(hang)


def test_whoever_gets_on_never_hangs_and_each_phase_has_its_own_limit(run):
    for step in range(20):
        run.gets_on("step", step)
        assert run.waits(9) == []
    run.gets_on("compile")
    assert run.waits(90) == []


def test_the_time_in_which_the_whole_process_was_stopped_is_no_hang(run):
    run.gets_on("step", 3)
    run.waits(5)
    run.now += 3600.0  # SIGSTOP, or a laptop that sleeps
    assert run.waits(4) == []
    assert len(run.waits(3)) == 1


def test_a_process_that_computes_while_its_threads_are_locked_out_hangs(run):
    run.gets_on("step", 3)
    run.waits(5)
    run.now, run.worked = run.now + 30.0, run.worked + 30.0
    assert len(run.waits(0.5)) == 1


def test_a3_a_wait_for_data_is_warned_of_before_it_is_a_hang_and_its_end_is_told(run):
    run.gets_on("data_wait", 4)
    assert run.waits(60) == []
    assert run.said == ["update 5 has waited 30 s for its batch; the limit is 200 s"]
    run.gets_on("step", 4)
    run.waits(1)
    assert run.said[1:] == ["the data is there again, after 60 s"]


def test_a_wait_that_is_long_is_suspicious_before_it_is_a_hang(run):
    run.gets_on("step")
    run.waits(4)
    assert not run.dog.suspicious
    run.waits(2)
    assert run.dog.suspicious


def test_nobody_is_thrown_out_of_a_debugger():
    assert may_end()
    scope = {"__name__": "pdb", "may_end": may_end}
    exec("def stands_still():\n    return may_end()", scope)
    assert not scope["stands_still"]()
