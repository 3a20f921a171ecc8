"""The first error over all processes: the one to read. What the others say after it is its consequence.

When a process dies, its peers say that they lost it, seconds later and at more length ("Connection closed by peer",
"Shutdown barrier has failed"); the last line of a log is the least useful. So lines that only tell of a lost peer count
when nothing else was said.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from jtrain.errors import LOST_PEER_SIGNS, Exit

_ERROR = re.compile(
    r"^(error: |fatal|F\d{4} |Fatal Python error|terminate called|Segmentation fault|Killed\b|ERROR: \(gcloud|"
    r"srun: error|\S*bash: |Permission denied|Host key verification|Connection (refused|timed out|reset))"
    r"|RESOURCE_EXHAUSTED|CUDA_ERROR|Out of memory|No space left on device"
)
_RAISED = re.compile(r"^([\w.]*(Error|Exception|Interrupt|Exit|Timeout|Lost|Full|Empty))(:|$)")
_LOGGED = re.compile(r"E\d{4} ")
"""An error line of XLA; most of them are none, those of a lost peer are."""
_TRACEBACK = "Traceback (most recent call last):"
_CONSEQUENCE = re.compile(
    r"process \d+ has ended|another process was lost|could not join|shutdown barrier|terminating process|"
    r"fatal python error: aborted|"  # jax aborts a process whose coordinator is gone
    + "|".join(map(re.escape, LOST_PEER_SIGNS)),
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Report:
    """What went wrong first.

    Attributes:
      rank: of the process; None: it is not one process's.
      host: where it ran.
      text: what it said, or how it ended.
      cause: whether it is an error of its own, and not of a peer that was lost.
    """

    rank: int | None
    host: str
    text: str
    cause: bool = True

    def __str__(self) -> str:
        return self.text if self.rank is None else f"rank {self.rank} ({self.host}): {self.text}"


class FirstError:
    """Listens to the lines and ends of all processes, in the order in which they come."""

    def __init__(self) -> None:
        self._seen: list[Report] = []
        self._in_traceback: set[int] = set()
        self._oom_kills = oom_kills()

    def line(self, rank: int, host: str, text: str) -> None:
        """A line of standard error."""
        if text.startswith(_TRACEBACK):
            self._in_traceback.add(rank)
            return
        raised = rank in self._in_traceback and _RAISED.search(text)
        if raised:
            self._in_traceback.discard(rank)
        if raised or _ERROR.search(text) or (_LOGGED.match(text) and _CONSEQUENCE.search(text)):
            self.note(Report(rank, host, text.removeprefix("error: ").strip(), not _CONSEQUENCE.search(text)))

    def ended(self, rank: int, host: str, code: int) -> None:
        """A process has ended by itself, with this exit code or (negative) by this signal."""
        if code in (Exit.DONE, Exit.PREEMPTED_SAVED, Exit.PREEMPTED_NOT_SAVED):
            return
        if any(report.rank == rank and report.cause for report in self._seen):
            return  # it has said why
        if code < 0:
            text = f"killed by {_name(-code)}"
            if code == -signal.SIGKILL:
                ran_out = oom_kills() > self._oom_kills
                text += (
                    " (likely out of memory: the kernel has ended a process for it)"
                    if ran_out
                    else (" (out of memory, or by somebody)")
                )
            # jax aborts a process whose peer is gone: after other words an abort is a consequence.
            self.note(Report(rank, host, text, code != -signal.SIGABRT or not self._seen))
        else:
            self.note(Report(rank, host, f"ended with exit code {code}", code != Exit.PEER_LOST))

    def note(self, report: Report) -> None:
        """What was seen, in order; from outside too: a process that is silent, or hangs."""
        self._seen.append(report)

    def first(self) -> Report | None:
        """What went wrong first; None: nothing did."""
        return next((report for report in self._seen if report.cause), next(iter(self._seen), None))


def oom_kills() -> int:
    """Processes of this machine that the kernel has ended because memory ran out, in a container's limit too."""
    try:
        with open("/proc/vmstat") as lines:
            return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    except OSError:
        return 0


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
