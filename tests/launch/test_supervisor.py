"""The supervisor, with workers that are small programs: who dies how, and what becomes of the run."""

import io
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from jtrain.launch.attempt import Attempt, Limits, Watch
from jtrain.launch.gang import Worker
from jtrain.launch.restarts import Restarts
from jtrain.launch.supervisor import WORKER_ENVIRONMENT, Supervisor

ROOT = Path(__file__).parents[2]
WORKERS = str(Path(__file__).with_name("workers.py"))
LIMITS = Limits({"init": 30.0, "step": 30.0}, silence=30.0, last_words=0.5, preemption=5.0, stacks=0.5)


def worker(script, rank=0, environment=None, host=None):
    leash = [sys.executable, "-m", "jtrain.launch.leash", sys.executable, WORKERS, script]
    told = WORKER_ENVIRONMENT | {"PYTHONPATH": str(ROOT), "JTRAIN_DISTRIBUTED__PROCESS_ID": str(rank)}
    return Worker(host or f"host{rank}", leash, told | (environment or {}))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MEET", str(tmp_path))
    return tmp_path


class Scripts:
    """A platform: one script for each rank; `once_met` is called, once, when the first attempt's workers have met."""

    def __init__(self, *scripts, once_met=lambda: None):
        self.scripts, self.outcomes, self._once_met = scripts, [], once_met

    def workers(self, environment, stopping):
        return [worker(script, rank, environment) for rank, script in enumerate(self.scripts)]

    def look(self):
        if self._once_met is None or len(list(Path(os.environ["MEET"]).glob("1.*"))) < len(self.scripts):
            return None
        once_met, self._once_met = self._once_met, None
        return once_met()

    def ended(self, outcome):
        self.outcomes.append(outcome)


def supervise(*scripts, limits=LIMITS, own=5, infra=5):
    """Exit code, outcomes, and what the supervisor said."""
    platform, said = Scripts(*scripts), []
    restarts = Restarts(own, infra, first_delay=0.01, last_delay=0.01)
    code = Supervisor(platform, restarts, limits, say=said.append).run()
    return code, platform.outcomes, "\n".join(said)


def attempt(*scripts, limits=LIMITS, watch=None, **options):
    workers = [worker(script, rank) for rank, script in enumerate(scripts)]
    out, err = io.StringIO(), io.StringIO()
    outcome = Attempt(workers, limits, watch or Watch(), out=out, err=err, **options).run()
    return outcome, out.getvalue(), err.getvalue()


def gone(pid):
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_lines_come_with_their_rank_and_progress_is_taken_out():
    script = "print('to out'); sys.stderr.write('half '); sys.stderr.flush(); at(3, durable=2); say('a line')"
    outcome, out, err = attempt(script, script)
    assert outcome.code == 0 and (outcome.steps, outcome.durable) == ((3, 3), 2)
    assert sorted(out.splitlines()) == ["[0] to out", "[1] to out"]
    assert sorted(err.splitlines()) == ["[0] half a line", "[1] half a line"]


def test_a_killed_process_takes_the_gang_with_it_and_the_run_goes_on_from_the_durable_step(folder):
    pids = folder / "pids"
    survivor = f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}} '); at(7 if attempt == 1 else 8, durable=6); meet(2);"
    survivor += "time.sleep(60 if attempt == 1 else 0)"
    code, outcomes, said = supervise(survivor, "at(7); meet(2); attempt == 1 and die()")
    assert code == 0 and [outcome.code for outcome in outcomes] == [-signal.SIGKILL, 0]
    assert (outcomes[0].durable, outcomes[0].lost_steps, outcomes[0].lost_host) == (6, 1, "host1")
    assert all(gone(int(pid)) for pid in pids.read_text().split())
    assert "rank 1 (host1): killed by SIGKILL" in said and "1 to make again" in said
    assert "from step 6 (restart 1 of 5" in said and "done: exit 0 after 2 attempts" in said


def test_the_first_error_is_that_of_the_process_that_failed_and_its_code_ends_the_run():
    failed = "say('error: data.train: a.txt is not there'); sys.exit(65)"
    peer = "time.sleep(0.2); say('error: [process 0] process 1 has ended: DataError'); sys.exit(12)"
    code, outcomes, said = supervise(peer, failed)
    assert code == 65 and len(outcomes) == 1
    assert str(outcomes[0].first) == "rank 1 (host1): data.train: a.txt is not there"
    assert "it would end the same way again: exit 65" in said


@pytest.mark.faults
def test_a_crash_loop_ends_with_70_and_the_first_errors():
    code, outcomes, said = supervise("at(4, durable=4); say(f'error: a bug at {time.time()}'); sys.exit(70)")
    assert code == 70 and len(outcomes) == 3
    assert "crash loop: 3 times the same error from step 4 on" in said and said.count("attempt 3: rank 0") == 1


@pytest.mark.parametrize(
    "phase, limits",
    [
        ("step", {"step": 0.4}),
        pytest.param("restore", {"restore": 0.4, "step": 0.0001}, marks=pytest.mark.faults),
    ],
)
def test_a_process_that_does_not_get_on_is_named_with_its_stacks_and_killed_with_the_others(phase, limits):
    code, outcomes, said = supervise(f"meet(2); at(9, phase={phase!r}); attempt == 1 and time.sleep(60)",
                                     f"meet(2); at(8, phase={phase!r}); attempt == 1 and time.sleep(60)",
                                     limits=Limits(limits, last_words=0.5, stacks=1.0))  # fmt: skip
    assert code == 0 and outcomes[0].code == 13
    assert f"rank 1 (host1): no progress for 0.4 s in phase {phase} (step 8)" in said


def test_stacks_of_a_hang_are_shown():
    limits = Limits({"step": 0.3}, stacks=2.0)
    outcome, _, err = attempt("def waits_for_ever(): time.sleep(60)\nat(1)\nwaits_for_ever()", limits=limits)
    assert outcome.code == 13 and "in waits_for_ever" in err


def test_a_stopped_process_falls_silent_and_is_killed(tmp_path):
    limits = Limits({}, silence=0.5, last_words=0.5, stacks=0.2)
    outcome, _, _ = attempt("at(1); os.kill(os.getpid(), signal.SIGSTOP)", limits=limits)
    assert (outcome.code, outcome.lost_host, outcome.unreachable) == (13, "host0", True)
    assert "silent for" in outcome.first.text


def test_h1_the_last_words_of_a_stopped_process_are_not_waited_for():
    limits = Limits({}, silence=60.0, last_words=60.0, speechless=0.5)
    stopped, other = (
        "at(1); meet(2); os.kill(os.getpid(), signal.SIGSTOP)",
        "at(1); meet(2); say('error: hung'); exit(13)",
    )
    outcome, _, _ = attempt(stopped, other, limits=limits)
    assert outcome.code == 13 and outcome.first.rank == 1 and outcome.seconds < 30


@pytest.mark.parametrize("codes, expected", [((10, 10), 10), pytest.param((10, 11), 11, marks=pytest.mark.faults)])
def test_sigterm_is_passed_on_and_the_code_is_that_of_the_run(codes, expected):
    scripts = [f"saves_on_sigterm({code}); at(5, durable=5); meet(2); time.sleep(60)" for code in codes]
    platform = Scripts(*scripts, once_met=lambda: os.kill(os.getpid(), signal.SIGTERM))
    supervisor = Supervisor(platform, Restarts(5, 5), LIMITS, say=lambda text: None)
    assert supervisor.run() == expected
    assert len(platform.outcomes) == 1 and platform.outcomes[0].codes == list(codes)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.faults
def test_a_run_that_ignores_sigterm_is_killed_after_its_time():
    script = "signal.signal(signal.SIGTERM, lambda *_: say('not now')); at(1); meet(1)\nwhile True: time.sleep(1)"
    watch = Watch(lambda: len(list(Path(os.environ["MEET"]).iterdir())))
    outcome, _, err = attempt(script, limits=Limits({}, preemption=0.5), watch=watch)
    assert outcome.code == 11 and "not now" in err and "still there 0.5 s after SIGTERM" in outcome.first.text


@pytest.mark.faults
def test_a_preemption_from_outside_starts_the_run_again():
    code, outcomes, said = supervise("at(5, durable=5); sys.exit(10 if attempt < 3 else 0)", infra=0, own=0)
    assert code == 0 and [outcome.code for outcome in outcomes] == [10, 10, 0]
    assert "preempted, which counts for nothing" in said


@pytest.mark.faults
def test_the_platform_can_ask_to_leave_or_say_that_the_machines_are_gone():
    for kind, codes in (("leave", [10, 0]), ("lost", [11, 0])):
        for file in Path(os.environ["MEET"]).iterdir():
            file.unlink()
        script = "saves_on_sigterm(); at(5, durable=5); meet(1); time.sleep(60 if attempt == 1 else 0)"
        platform = Scripts(script, once_met=lambda kind=kind: (kind, "maintenance at noon"))
        restarts = Restarts(0, 0, first_delay=0.01)  # either counts for nothing
        assert Supervisor(platform, restarts, LIMITS, say=lambda text: None).run() == 0
        assert [outcome.code for outcome in platform.outcomes] == codes
        assert platform.outcomes[0].left == "maintenance at noon"


def test_a_program_that_cannot_be_started_is_named():
    outcome = Attempt([Worker("far", ["/no/such/program"])], LIMITS, Watch()).run()
    assert (outcome.code, outcome.lost_host, outcome.unreachable) == (12, "far", True)
    assert "/no/such/program: can't be started: No such file" in outcome.first.text


@pytest.mark.faults
def test_each_attempt_is_told_of_the_one_before():
    script = "say(os.environ.get('JTRAIN_LAST_END', 'none')); at(3, durable=2); sys.exit(0 if attempt == 2 else 12)"
    platform = Scripts(script)
    heard = []
    original = platform.workers
    platform.workers = lambda environment, stopping: heard.append(environment) or original(environment, stopping)
    assert Supervisor(platform, Restarts(1, 1, first_delay=0.01), LIMITS, say=lambda text: None).run() == 0
    assert [told["JTRAIN_ATTEMPT"] for told in heard] == ["1", "2"] and "JTRAIN_LAST_END" not in heard[0]
    assert '"code": 12' in heard[1]["JTRAIN_LAST_END"] and '"durable": 2' in heard[1]["JTRAIN_LAST_END"]
