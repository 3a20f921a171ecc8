"""The supervisor: start, watch, judge, wait, start again. It holds no state of the run: that is in the checkpoints.

The same command is started each time; `checkpoint.resume: auto` makes it go on from the newest durable step. What is
new is where the processes meet, and what they are told of the attempt (JTRAIN_ATTEMPT, JTRAIN_LAST_END).
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, Protocol

from jtrain.errors import INTERRUPTED, Exit
from jtrain.launch.attempt import Attempt, Limits, Outcome, Watch
from jtrain.launch.gang import Worker
from jtrain.launch.restarts import Restarts
from jtrain.progress import ATTEMPT, LAST_END, SUPERVISED
from jtrain.redaction import redact_text

WORKER_ENVIRONMENT = {SUPERVISED: "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
"""What every worker gets: it tells of its progress, its lines come as they are written, SIGABRT shows its stacks."""


class Stopped(Exception):
    """This program was asked to leave while nothing was running."""


class Platform(Protocol):
    """Where the processes of a run live."""

    def workers(self, environment: dict[str, str], stopping: Callable[[], int]) -> Sequence[Worker]:
        """What to start for the next attempt, once the machines are there.

        Args:
          environment: what each worker is told.
          stopping: looked at while it waits.

        Raises:
          Stopped: `stopping` said so.
          JtrainError: it can't be.
        """
        ...

    def look(self) -> tuple[str, str] | None:
        """A word about the machines while the run runs, at once; see `Watch.platform`."""
        ...

    def ended(self, outcome: Outcome) -> None:
        """Takes note of how an attempt ended; what it knows better of the machines it writes into the outcome."""
        ...


def say(text: str) -> None:
    """A word of the supervisor, on standard error; a command in it may hold a URL with a password."""
    print(f"launch: {redact_text(text)}", file=sys.stderr, flush=True)


class Supervisor:
    """Keeps a run going until it is done, or a restart would not help.

    Args:
      platform: where its processes live.
      restarts: the budgets.
      limits: how long to wait for what.
      say: for its own words.
      sleep: waits so many seconds.
    """

    def __init__(
        self,
        platform: Platform,
        restarts: Restarts,
        limits: Limits,
        *,
        say: Callable[[str], None] = say,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._platform, self._restarts, self._limits = platform, restarts, limits
        self._say, self._sleep = say, sleep
        self._signals: list[int] = []
        self._firsts: list[str] = []
        self._repeated = 0

    def run(self) -> int:
        """Runs to the end; the exit code is that of the run's last attempt (70 for a crash loop)."""
        began, number, durable = time.monotonic(), 0, None
        told: dict[str, Any] = {}
        with self._catching():
            while True:
                number += 1
                try:
                    outcome = self._attempt(number, durable, told)
                except Stopped:
                    return self._left_while_waiting(told)
                durable = outcome.durable
                self._repeated += outcome.lost_steps
                self._platform.ended(outcome)
                self._summary(number, outcome)
                decision = self._restarts.decide(outcome.end())
                if self._signals and outcome.code != Exit.DONE:
                    return self._asked(outcome)
                if not decision.again:
                    self._total(number, time.monotonic() - began, decision.code, decision.why)
                    return decision.code
                told = {"attempt": number, "code": outcome.end().exit_code, "reason": outcome.end().reason}
                told |= {"seconds": round(outcome.seconds, 3), "step": outcome.steps[1], "durable": durable}
                start = "the beginning" if durable is None else f"step {durable}"
                self._say(f"again in {decision.delay:.1f} s from {start} ({decision.why})")
                if not self._wait(decision.delay):
                    return self._left_while_waiting(told)

    def _attempt(self, number: int, durable: int | None, told: dict[str, Any]) -> Outcome:
        environment = WORKER_ENVIRONMENT | {ATTEMPT: str(number)} | ({LAST_END: json.dumps(told)} if told else {})
        workers = self._platform.workers(environment, lambda: len(self._signals))
        hosts = list(dict.fromkeys(worker.host for worker in workers))
        plural = "" if len(workers) == 1 else "es"
        self._say(f"attempt {number}: {len(workers)} process{plural} on {', '.join(hosts)}")
        watch = Watch(lambda: len(self._signals), self._platform.look)
        return Attempt(workers, self._limits, watch, durable=durable, say=self._say).run()

    def _summary(self, number: int, outcome: Outcome) -> None:
        first, last = outcome.steps
        steps = "no step" if last is None else f"steps {first} to {last}"
        durable = "nothing durable" if outcome.durable is None else f"durable {outcome.durable}"
        lost = f", {outcome.lost_steps} to make again" if outcome.lost_steps else ""
        code = outcome.end().exit_code
        reason = outcome.left or str(outcome.first or ("done" if code == Exit.DONE else "preempted"))
        self._say(f"attempt {number} ran {outcome.seconds:.1f} s, {steps}, {durable}{lost}; exit {code}: {reason}")
        if outcome.first is not None:
            self._firsts.append(f"  attempt {number}: {outcome.first}")

    def _total(self, attempts: int, seconds: float, code: int, why: str) -> None:
        plural = "" if attempts == 1 else "s"
        again = f", {self._repeated} steps made again" if self._repeated else ""
        self._say(f"{why}: exit {code} after {attempts} attempt{plural} and {seconds:.1f} s{again}")
        if code != Exit.DONE and len(self._firsts) > 1:
            self._say("first errors:\n" + "\n".join(self._firsts[-10:]))

    def _asked(self, outcome: Outcome) -> int:
        """The exit code after a signal to this program: that of the run, which saved or did not."""
        if outcome.code in (Exit.PREEMPTED_SAVED, Exit.PREEMPTED_NOT_SAVED):
            return outcome.code
        if outcome.code < 0:
            return INTERRUPTED if self._signals[0] == signal.SIGINT else int(Exit.PREEMPTED_NOT_SAVED)
        return outcome.end().exit_code

    def _left_while_waiting(self, told: dict[str, Any]) -> int:
        """The exit code after a signal while nothing ran: nothing is lost that was not lost before."""
        self._say("asked to leave while no process runs")
        saved = told.get("code") == Exit.PREEMPTED_SAVED
        return int(Exit.PREEMPTED_SAVED if saved else Exit.PREEMPTED_NOT_SAVED)

    def _wait(self, seconds: float) -> bool:
        """Whether nobody asked to leave meanwhile."""
        deadline = time.monotonic() + seconds
        while not self._signals and (left := deadline - time.monotonic()) > 0:
            self._sleep(min(left, 0.2))
        return not self._signals

    @contextlib.contextmanager
    def _catching(self) -> Iterator[None]:
        """While this holds, SIGTERM, SIGINT and SIGHUP are passed on to the run as a preemption."""

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        previous = {}
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                previous[number] = signal.signal(number, note)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
