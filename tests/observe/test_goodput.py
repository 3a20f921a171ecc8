"""The ledger against wall time: by a clock of our own, and over whole runs that end, break off and start again."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from jtrain import Callback
from jtrain.errors import Preempted
from jtrain.observe.goodput import BUCKETS, Goodput, Past, read_past
from jtrain.observe.metrics import read_events
from tests.train.fits import make


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self, now: float = 0.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clocks():
    return Clock(100.0), Clock(1e9)


def ledger(clocks):
    return Goodput(*clocks)


def passes(clocks, seconds):
    for clock in clocks:
        clock.now += seconds


def nonzero(goodput):
    return {bucket: seconds for bucket, seconds in goodput.seconds.items() if seconds}


def test_every_second_is_in_the_innermost_phase(clocks):
    goodput = ledger(clocks)
    passes(clocks, 3)
    goodput.open(Past())
    with goodput("step"):
        passes(clocks, 1)
        with goodput("eval"):
            passes(clocks, 10)
            with goodput("compile"):
                passes(clocks, 5)
            passes(clocks, 20)
        with goodput("data_wait"):
            passes(clocks, 2)
        passes(clocks, 4)
    assert nonzero(goodput) == {"init": 3, "step": 5, "eval": 30, "compile": 5, "data_wait": 2}
    assert goodput.wall_seconds == 45 and goodput.ratio == pytest.approx(5 / 45)
    assert goodput.line().startswith("goodput 11.1 %: eval 30.0 s, step 5.0 s, compile 5.0 s, init 3.0 s")


def test_a_phase_that_raises_ends_all_the_same(clocks):
    goodput = ledger(clocks)
    with pytest.raises(KeyError), goodput("eval"):
        passes(clocks, 2)
        raise KeyError
    passes(clocks, 3)
    assert nonzero(goodput) == {"eval": 2, "init": 3}


def lines(*records):
    return [{"event": kind, "time": at} | fields for kind, at, fields in records]


def test_a_killed_run_comes_back_with_idle_time_and_the_updates_that_it_repeats(clocks):
    first = ledger(clocks)
    first.open(Past())
    with first("step"):
        for step in range(1, 7):
            passes(clocks, 10)
            first.stepped(step)
            if step == 4:
                saved = clocks[1].now
    account = first.record()
    told = clocks[1].now
    assert account["seconds"]["step"] == 60 and account["furthest"] == 6
    passes(clocks, 7)  # of an update that nobody hears of; killed; a machine is found
    events = lines(("start", 1e9, {}), ("durable", saved, {}), ("goodput", told, account), ("durable", told + 1, {}))

    second = ledger(clocks)
    passes(clocks, 5)
    past = read_past(events)
    assert past.step == 6 and past.ended == told
    second.open(past)
    with second("restore"):
        passes(clocks, 2)
    with second("step"):
        for step in range(5, 9):  # the checkpoint was of step 4
            passes(clocks, 10)
            second.stepped(step)
    assert nonzero(second) == {"step": 80, "idle": 7, "init": 5, "restore": 2, "lost_work": 20}
    assert second.wall_seconds == clocks[1].now - 1e9 == 114


def test_a_run_that_goes_back_by_itself_repeats_updates(clocks):
    goodput = ledger(clocks)
    goodput.open(Past())
    with goodput("step"):
        for step in (1, 2, 3, 2, 3, 4):
            passes(clocks, 1)
            goodput.stepped(step)
    assert nonzero(goodput) == {"step": 4, "lost_work": 2}


@pytest.mark.parametrize(
    ("last", "idle"), [(("end", {"step": 3}), 0), (("end", {"step": 3, "error": "x"}), 50), (("preempted", {}), 50)]
)
def test_after_an_orderly_end_the_clock_stands_still(last, idle, clocks):
    told, (kind, fields) = clocks[1].now, last
    events = lines(("start", told - 9, {}), ("goodput", told, {"seconds": {"step": 9.0}, "furthest": 3}))
    events += lines((kind, told, fields))
    passes(clocks, 50)
    goodput = ledger(clocks)
    goodput.open(read_past(events))
    assert nonzero(goodput) == {"step": 9} | ({"idle": idle} if idle else {})


def test_a_start_without_an_account_is_idle_time_from_its_first_line(clocks):
    events = lines(("end", 1e9 - 500, {}), ("resume", 1e9, {}), ("durable", 1e9 + 3, {}))
    passes(clocks, 20)
    goodput = ledger(clocks)
    goodput.open(read_past(events))
    assert nonzero(goodput) == {"idle": 20}


def test_a_wall_clock_that_was_set_back_makes_no_negative_time(clocks):
    clocks[1].now -= 3600
    goodput = ledger(clocks)
    goodput.open(Past({"step": 10.0}, 5, 1e9))
    assert nonzero(goodput) == {"step": 10}


def test_a_second_start_in_one_process_has_an_account_of_its_own(clocks):
    goodput = ledger(clocks)
    goodput.open(Past())
    passes(clocks, 5)
    goodput.open(Past({"step": 2.0}, 1, None))
    passes(clocks, 1)
    assert nonzero(goodput) == {"step": 2, "init": 1}


def test_lines_are_at_most_one_a_second(clocks):
    goodput = ledger(clocks)
    assert goodput.due()
    goodput.record()
    passes(clocks, 0.5)
    assert not goodput.due()
    passes(clocks, 0.5)
    assert goodput.due()


def check(account):
    assert set(account["seconds"]) == set(BUCKETS)
    assert sum(account["seconds"].values()) == pytest.approx(account["wall_seconds"], rel=1e-3, abs=0.01)


class Broken(RuntimeError):
    pass


def test_the_account_of_a_run_sums_to_its_wall_time_through_a_crash(tmp_path, capsys):
    class Break(Callback):
        def on_step_end(self, trainer, step, metrics):
            time.sleep(0.06)
            if step == 7:
                raise Broken

    begun = time.time()
    with pytest.raises(Broken):
        make(tmp_path, [Break()], max_steps=12, checkpoint={"save_steps": 4}).fit()
    broken = read_events(tmp_path, "goodput")[-1]
    time.sleep(0.3)
    again = make(
        tmp_path, [Break()], max_steps=6, checkpoint={"save_steps": 4}, held_out={"x": [[0.0] * 3], "y": [0.0]}
    )
    again.fit()
    passed = time.time() - begun
    account = read_events(tmp_path, "goodput")[-1]
    check(account)
    assert account["wall_seconds"] == pytest.approx(passed, rel=0.01, abs=0.05)
    seconds = account["seconds"]
    assert seconds["idle"] >= 0.3 and broken["furthest"] == account["furthest"] == 7
    # Step 4 was durable: 5 and 6 are made again with the callback of 5 between them.
    assert seconds["lost_work"] > 0.06 and broken["seconds"]["lost_work"] == 0
    assert all(seconds[bucket] > 0 for bucket in ("init", "compile", "restore", "save_stall", "eval"))
    printed = capsys.readouterr().out
    assert f"goodput {100 * account['goodput']:.1f} %: " in printed and "lost work" in printed
    kinds = [event["event"] for event in read_events(tmp_path)]
    assert kinds[-1] == "end" and "goodput" in kinds[-3:]


def test_a_preempted_run_leaves_its_account(tmp_path):
    class Signal(Callback):
        def on_step_end(self, trainer, step, metrics):
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted):
        make(tmp_path, [Signal()], max_steps=8).fit()
    *_, account, preempted = read_events(tmp_path)
    assert (account["event"], preempted["event"]) == ("goodput", "preempted")
    check(account)


def test_the_time_before_a_program_was_imported_counts_as_its_start():
    code = (
        "import time; time.sleep(0.4)\n"
        "from jtrain.observe import goodput\n"
        "goodput.program_begins(); first = goodput.Goodput(); second = goodput.Goodput()\n"
        "import json; print(json.dumps([first.wall_seconds, second.wall_seconds]))"
    )
    begun = time.monotonic()
    first, second = json.loads(subprocess.check_output([sys.executable, "-c", code]))
    assert 0.4 <= first <= time.monotonic() - begun + 0.02 and second < 0.1
