"""One attempt at a run: the gang is started, watched, and ended; what is known of it afterwards."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from jtrain.config.ladder import PREEMPTION_SECONDS, SILENCE_SECONDS
from jtrain.errors import Exit
from jtrain.launch.first_error import FirstError, Report
from jtrain.launch.gang import Gang, Member, Worker
from jtrain.launch.restarts import UNREACHABLE, End, Kind, kind_of
from jtrain.progress import PULSE_SECONDS

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Limits:
    """How long to wait for what, in seconds.

    Attributes:
      phases: phase -> without getting on.
      silence: without a word of a process that spoke before.
      last_words: from the first end in the gang to the kill of the others, so that their errors arrive; a third of it
        after a signal, which leaves little to tell.
      speechless: when all others have been silent for so long, nobody waits for their last words: they are stopped.
      preemption: from SIGTERM to the kill.
      stacks: from the request for stacks to the kill of a gang that hangs.
    """

    phases: Mapping[str, float]
    silence: float = SILENCE_SECONDS
    last_words: float = 30.0
    speechless: float = 3 * PULSE_SECONDS
    preemption: float = PREEMPTION_SECONDS
    stacks: float = 2.0


@dataclass
class Watch:
    """What comes from outside the gang while it runs; the supervisor and the platform answer.

    Attributes:
      stopping: how many times this program was asked to leave.
      platform: a word about the machines: None; or (kind, text) with kind `say` (told), `leave` (save and start again),
        `lost` (the machines were taken away: kill, and start again).
    """

    stopping: Callable[[], int] = lambda: 0
    platform: Callable[[], tuple[str, str] | None] = lambda: None


@dataclass
class Outcome:
    """What is known of an attempt that has ended.

    Attributes:
      code: of the attempt; negative: the signal that its first process died of.
      first: its first error.
      seconds: that it ran.
      steps: the first and the last step that a process told of.
      durable: the newest step that survives.
      lost_host: the host whose process was the first to go, where a machine may be the reason.
      left: it ended since the platform, or a host that came back, asked for it.
    """

    code: int = 0
    first: Report | None = None
    seconds: float = 0.0
    steps: tuple[int | None, int | None] = (None, None)
    durable: int | None = None
    lost_host: str | None = None
    left: str = ""
    unreachable: bool = False
    codes: list[int | None] = field(default_factory=list)

    @property
    def lost_steps(self) -> int:
        """Updates that have to be made again."""
        last = self.steps[1]
        return 0 if last is None or self.code == Exit.DONE else max(0, last - (self.durable or 0))

    def end(self) -> End:
        """As the budgets want it."""
        reason = self.left or ("" if self.first is None else self.first.text)
        return End(self.code, reason, self.durable, self.unreachable)


class Attempt:
    """Runs a gang to its end.

    Args:
      workers: one for each rank.
      limits: how long to wait for what.
      watch: what comes from outside.
      durable: the newest durable step that is known before it starts.
      out, err: where output goes, each line with its rank.
      say: for words of the supervisor itself.
      clock: seconds that only rise.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        limits: Limits,
        watch: Watch,
        *,
        durable: int | None = None,
        out: TextIO | None = None,
        err: TextIO | None = None,
        say: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._workers, self._limits, self._watch = workers, limits, watch
        self._out, self._err, self._say, self._clock = out or sys.stdout, err or sys.stderr, say, clock
        self._errors = FirstError()
        self._began = clock()
        self._outcome = Outcome(durable=durable)
        self._kill_at: float | None = None
        self._told_to_leave: float | None = None
        self._told = 0
        self._ended: list[Member] = []

    def run(self) -> Outcome:
        """Starts the gang, and returns when no process of it is left."""
        outcome = self._outcome
        try:
            with Gang(self._workers, self._line, self._clock) as gang:
                while gang.alive:
                    self._take(gang, gang.poll(POLL_SECONDS))
                    if self._is_over(gang):
                        break
                gang.kill()
                self._steps(gang)
                outcome.codes = [member.code for member in gang.members]
                self._judge(gang)
        except OSError as error:  # one could not be started
            host = str(error.filename2)
            outcome.first = Report(None, host, f"{host}: {error.filename}: can't be started: {error.strerror}")
            outcome.code, outcome.lost_host, outcome.unreachable = int(Exit.PEER_LOST), host, True
        outcome.seconds = self._clock() - self._began
        return outcome

    def _line(self, member: Member, text: str, error: bool) -> None:
        if error:
            self._errors.line(member.rank, member.host, text)
        prefix = f"[{member.rank}] " if len(self._workers) > 1 else ""
        print(f"{prefix}{text}", file=self._err if error else self._out, flush=True)

    def _take(self, gang: Gang, ended: list[Member]) -> None:
        """Takes note of what happened in the gang."""
        self._steps(gang)
        for member in ended:
            assert member.code is not None
            if member.code == -signal.SIGTERM and self._told_to_leave is not None:  # before it could install a handler
                member.code = int(Exit.PREEMPTED_NOT_SAVED)
            self._ended.append(member)
            self._errors.ended(member.rank, member.host, member.code)
            if member.code != Exit.DONE and self._kill_at is None:
                seconds = self._limits.last_words
                self._kill_at = self._clock() + (seconds if member.code > 0 else seconds / 3)

    def _steps(self, gang: Gang) -> None:
        outcome = self._outcome
        for member in gang.members:
            progress = member.progress
            first, last = outcome.steps
            if progress.step is not None:
                outcome.steps = (
                    progress.step if first is None else min(first, progress.step),
                    progress.step if last is None else max(last, progress.step),
                )
            if progress.durable is not None:
                outcome.durable = max(progress.durable, outcome.durable or 0)

    def _is_over(self, gang: Gang) -> bool:
        """Whether what is left of the gang has to be killed now."""
        now, limits = self._clock(), self._limits
        if self._kill_at is not None:
            silent = all(member.spoke and member.silent_for(now) > limits.speechless for member in gang.alive)
            if now > self._kill_at or silent:
                return True
        if self._told_to_leave is not None and now - self._told_to_leave > limits.preemption:
            self._say(f"not gone {limits.preemption:g} s after SIGTERM: killed")
            self._errors.note(Report(None, "", f"still there {limits.preemption:g} s after SIGTERM"))
            self._outcome.code = int(Exit.PREEMPTED_NOT_SAVED)
            return True
        asked = self._watch.stopping()
        if asked > self._told:
            self._told = asked
            self._leave(gang)
        word = self._watch.platform() if self._told_to_leave is None else None
        if word is not None:
            kind, text = word
            self._say(text)
            if kind == "lost":
                self._outcome.code, self._outcome.left = int(Exit.PREEMPTED_NOT_SAVED), text
                return True
            if kind == "leave":
                self._outcome.left = text
                self._leave(gang)
        return self._hangs(gang, now)

    def _leave(self, gang: Gang) -> None:
        """Passes SIGTERM on: the run saves and ends."""
        if self._told_to_leave is None:
            self._told_to_leave = self._clock()
        gang.send(signal.SIGTERM)

    def _hangs(self, gang: Gang, now: float) -> bool:
        """Whether a process is silent, or has not got on for too long; it is named, and asked for its stacks."""
        for member in gang.alive:
            # Before its first word a process imports, or its machine is being reached: the phase `init`.
            if member.spoke and member.silent_for(now) > self._limits.silence:
                said = f"silent for {member.silent_for(now):.0f} s: stopped, or its machine is gone"
                self._outcome.lost_host = member.host
                return self._hung(gang, member, said)
        slow = [m for m in gang.alive if m.stuck_for(now) > self._limits.phases.get(m.progress.phase, float("inf"))]
        if not slow:
            return False
        # Who waits for another is ahead of it: the one behind is to blame.
        member = min(slow, key=lambda m: (-1 if m.progress.step is None else m.progress.step, m.rank))
        step = "" if member.progress.step is None else f" (step {member.progress.step})"
        limit = self._limits.phases[member.progress.phase]
        return self._hung(gang, member, f"no progress for {limit:g} s in phase {member.progress.phase}{step}")

    def _hung(self, gang: Gang, member: Member, said: str) -> bool:
        self._say(f"rank {member.rank} ({member.host}): {said}; the gang is killed")
        self._errors.note(Report(member.rank, member.host, said))
        self._outcome.code = int(Exit.HUNG)
        member.send(signal.SIGABRT)  # PYTHONFAULTHANDLER writes the stacks of all its threads
        deadline = self._clock() + self._limits.stacks
        while self._clock() < deadline and member.code is None:
            gang.poll(POLL_SECONDS)
        return True

    def _judge(self, gang: Gang) -> None:
        """Sets code, first error and lost host of the outcome."""
        outcome, first = self._outcome, self._errors.first()
        outcome.first = first
        if outcome.code == Exit.DONE:
            outcome.code = self._code(first)
        if kind_of(outcome.code) is not Kind.INFRA:
            return
        if outcome.lost_host is not None:  # silent
            outcome.unreachable = True
        elif first is not None and first.cause and first.rank is not None and outcome.code != Exit.HUNG:
            member = gang.members[first.rank]
            if member.code is not None and (member.code < 0 or member.code == UNREACHABLE):
                outcome.lost_host = member.host
            outcome.unreachable = member.code == UNREACHABLE

    def _code(self, first: Report | None) -> int:
        """The exit code of the attempt: that of the process whose error came first."""
        codes = [member.code for member in self._ended if member.code is not None]
        bad = [code for code in codes if code != Exit.DONE]
        if not bad:
            return int(Exit.DONE)
        if all(kind_of(code) is Kind.PREEMPTED for code in bad):
            return max(bad)  # 11 when one of them did not save
        if first is not None and first.cause and first.rank is not None:
            code = next((member.code for member in self._ended if member.rank == first.rank), None)
            if code not in (None, Exit.DONE):
                return code
        own = (code for code in bad if kind_of(code) is not Kind.PREEMPTED and code != Exit.PEER_LOST)
        return next(own, int(Exit.PEER_LOST))
