"""What stands beside a run, from the first second of the program to its last: preemption, watchdog, slow processes.

Three threads. One is never late: it reads signals from a pipe (the C handler writes them, also while the main thread is
in a compiler or a collective), looks at the deadlines, and does nothing that could block before it ends the process.
One may be late: it talks to the other processes, to files and to the console. One asks the platform.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from jtrain import progress
from jtrain.config import ladder
from jtrain.config.schema import Config
from jtrain.errors import Exit, Preempted
from jtrain.parallel import lost
from jtrain.parallel.agreement import Agreement
from jtrain.parallel.places import Places
from jtrain.parallel.store import store
from jtrain.redaction import redact_text
from jtrain.train.beside import Beside
from jtrain.train.notices import LOOK_SECONDS, Notices, metadata_host
from jtrain.train.preemption import Preemption, Stage
from jtrain.train.watchdog import Hang, Watchdog, may_end, write_stacks

TICK_SECONDS = 0.05
LATE_SECONDS = 0.02
"""The least that counts as time in which this process could not run."""
LAST_SECONDS = 2.0
"""What a run that has to leave at once may take to say so."""
LEAVING_SECONDS = 5.0
"""What is left of the grace when a run stops waiting for copies of its checkpoints."""
_stops = 0
_here = threading.local()


@contextlib.contextmanager
def guarded(config: Config) -> Iterator[Guard]:
    """The guard of the program that this is part of, or one for this while."""
    if getattr(_here, "guard", None) is not None:
        yield _here.guard
        return
    with Guard(config) as guard:
        _here.guard = guard
        try:
            yield guard
        finally:
            _here.guard = None


class Guard:
    """Context manager. See `guarded`.

    Args:
      config: the run's.

    Attributes:
      preemption: asked to leave, and by when.
    """

    def __init__(self, config: Config):
        self._config = config
        self._limits = ladder.limits(config.faults)
        self.words: deque[tuple[str, str]] = deque()
        self.preemption = Preemption(
            config.faults, leave=self._leave, unwind=self._unwind, durable=lambda: progress.current().durable
        )
        self.watchdog = Watchdog(self._limits, lambda text: self.words.append(("warning", text)))
        self._beside = Beside(config, self)
        self._main = threading.current_thread() is threading.main_thread()
        self._handlers: dict[int, Any] = {}
        self._unwinding = False
        self._own_signals = 0
        self._previous_fd = -1
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._late = self._late_told = 0.0
        self._computed = 0

    # For the loop

    def begin(self) -> None:
        """The training begins. Every process of the run calls it, before it opens the run directory."""
        global _stops
        _stops += 1
        kept = store()
        agreement = Agreement()
        if kept is not None:
            state = lost.distributed.global_state
            agreement = Agreement(kept, state.process_id, state.num_processes, f"stop/{_stops}")
            self._beside.places = Places(kept, state.process_id, state.num_processes, 4 * self._beside.pause)
        self._catch()  # a library may have taken them over meanwhile
        progress.report()
        self.preemption.begin(agreement)

    def open(self, emit: Callable[[str, dict[str, Any]], None], max_steps: int) -> None:
        """The run directory is open: events may be written."""
        self._beside.open(emit, max_steps)

    def close(self) -> None:
        """The run directory is closed."""
        self._beside.emit = None

    def saved(self) -> None:
        """The step at which the run was asked to stop is durable."""
        self.preemption.stage = Stage.SAVED

    def seconds_left(self) -> float | None:
        """Until the run has to be gone, less what leaving takes; None: nobody has asked it to leave."""
        return self.preemption.seconds_left(LEAVING_SECONDS)

    def done(self) -> None:
        """The run is complete: from here on there is nothing to save."""
        self.preemption.stage = Stage.OVER

    def poll(self) -> bool:
        """Whether to stop here. For the loop, at every place; on all processes alike."""
        return self.preemption.agreement.poll()

    def is_next(self) -> bool:
        """Whether the next `poll` will say so."""
        return self.preemption.agreement.is_next()

    def computes(self) -> None:
        """The loop hands an update to the device, where the processes meet: who does not come so far is behind."""
        self._computed += 1

    @property
    def passed(self) -> int:
        """How far the loop is, to compare it with those of other processes."""
        return self.preemption.agreement.passed + self._computed

    def logged(self, step: int, seconds: float, busy: float, updates: int) -> None:
        """Takes note of the figures of a log line: seconds of an update, and those without the device."""
        late, self._late_told = self._late - self._late_told, self._late
        self._beside.logged(step, seconds, busy, late / max(updates, 1))

    # The threads

    def __enter__(self) -> Guard:
        progress.report()
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        if self._main:
            self._previous_fd = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
            self._catch()
        lost.hears.append(self._heard)
        self.watchdog.tick()  # its timer runs from now on
        self._start("jtrain-guard", self._watch)
        self._start("jtrain-beside", self._beside.run)
        if (host := metadata_host(self._config.faults.maintenance_notices)) is not None:
            self._start("jtrain-notices", lambda: self._ask_platform(host))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._beside.stop()
        os.write(self._writes, b"\0")
        for thread in self._threads:
            thread.join(5.0)
        self.watchdog.close()
        lost.hears.remove(self._heard)
        if self._main:
            signal.set_wakeup_fd(self._previous_fd)
            for number, handler in self._handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        os.close(self._writes)
        os.close(self._reads)

    def _start(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _catch(self) -> None:
        """Takes the signals of the config. Only the main thread may: a Trainer in a notebook's thread goes without."""
        if not self._main or threading.current_thread() is not threading.main_thread():
            return
        for name in self._config.faults.preemption_signals:
            number = getattr(signal, name)
            before = signal.getsignal(number)
            if before is signal.SIG_IGN or before == self._handle:  # nohup
                continue
            self._handlers.setdefault(number, before)
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread between two of its operations; the thread that reads the pipe does the rest."""
        if self.preemption.stage is Stage.SETUP and not self._unwinding:
            self._unwinding = True
            raise Preempted("preempted before the first step, nothing to save", saved=False)

    def _unwind(self) -> None:
        """Makes the main thread raise `Preempted`, while nothing has been trained."""
        main = threading.main_thread().ident
        if self._handlers and main is not None:
            self._own_signals += 1
            signal.pthread_kill(main, next(iter(self._handlers)))

    def _watch(self) -> None:
        """The thread that is never late."""
        while not self._over.is_set():
            before = time.monotonic()
            ready, _, _ = select.select([self._reads], [], [], TICK_SECONDS)
            late = time.monotonic() - before - TICK_SECONDS
            if not ready and late > LATE_SECONDS and progress.current().phase in ("step", "data_wait"):
                self._late += late
            for number in os.read(self._reads, 64) if ready else b"":
                if number not in self._handlers:
                    continue
                if self._own_signals:
                    self._own_signals -= 1
                    continue
                self.preemption.signal(signal.Signals(number).name)
                self._beside.wake()
            self.preemption.tick()
            if (hang := self.watchdog.tick()) is not None:
                self._hangs(hang)

    def _ask_platform(self, host: str) -> None:
        notices = Notices(host, lambda text: self.words.append(("warning", text)))
        while not self._over.wait(LOOK_SECONDS):
            if (reason := notices.look()) is not None:
                self.preemption.ask(reason)
                self._beside.wake()

    # The end

    def _hangs(self, hang: Hang) -> None:
        """Says what hangs and whom it waits for, and ends the program."""
        ends = may_end()
        if ends:
            lost.leave_within(lost.LEAVE_SECONDS, int(Exit.HUNG))
        blame = self._beside.blame()
        text = f"hung: {hang}" + (f"; {blame}" if blame else "")
        print(redact_text(f"error: {lost.prefix()}{text}"), file=sys.stderr, flush=True)
        stacks = write_stacks(self._config.run_dir, lost.process_id(), text)
        if stacks is not None:
            print(f"{lost.prefix()}stacks of all threads: {stacks}", file=sys.stderr, flush=True)
        fields = {"phase": hang.phase, "step": hang.step, "seconds": round(hang.seconds, 1), "waits_for": blame or None}
        self._beside.tell("hang", fields | {"stacks": stacks})
        if ends:
            lost.leave(int(Exit.HUNG), text)

    def _heard(self, code: int) -> None:
        """Another process has ended: of a hang this one's stacks are wanted, too."""
        if code == Exit.HUNG:
            write_stacks(self._config.run_dir, lost.process_id(), "another process hangs")
            place = progress.current()
            self._beside.tell("hang", {"phase": place.phase, "step": place.step, "seconds": place.seconds})

    def _leave(self, code: Exit, text: str) -> None:
        """Leaves at once; what is being written stays unfinished, and what is durable stays."""
        lost.leave_within(LAST_SECONDS, int(code))
        print(redact_text(f"{lost.prefix()}{text}"), file=sys.stderr, flush=True)
        if code is Exit.PREEMPTED_NOT_SAVED:
            place = progress.current()
            fields = {"step": place.step, "saved": False, "reason": self.preemption.reason, "durable": place.durable}
            self._beside.tell("preempted", fields)
        lost.leave(int(code), text)
