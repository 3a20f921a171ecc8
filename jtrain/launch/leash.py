"""`python -m jtrain.launch.leash COMMAND...`: runs a worker that can't outlive whoever started it, here or through ssh.

Standard input is the leash. When it ends (the supervisor let go, was killed, or its connection broke) the worker and
everything that it started are killed. A line with a signal's name (`SIGTERM`) is passed on to the worker alone. When
the worker ends, what it left behind is killed, and its exit code becomes that of this process (128 + n for signal n);
it is also told in a line of its own, since not every connection brings it back.

The worker has a session of its own, and asks the kernel to be killed when this process is (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from jtrain.errors import Exit
from jtrain.progress import end_line

_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code; 127 where it can't be started.

    Args:
      arguments: the command; before it `--once KEY`, where a connection that broke may be made again by itself (gcloud
        does so): the second start with a key is refused.
    """
    command = list(arguments)
    if command[:1] == ["--once"]:
        if not _first(command[1]):
            print("error: another process was lost: the connection to this host broke", file=sys.stderr, flush=True)
            return Exit.PEER_LOST
        command = command[2:]
    leash, parent = os.dup(0), os.getpid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def die_with_parent() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before that
            os._exit(127)

    try:  # this process has one thread yet, so code between fork and exec is safe
        worker = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent)
    except OSError as error:
        print(f"error: {command[0]}: can't be started: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: worker.send_signal(number))
    threading.Thread(target=_hold, args=(leash, worker), daemon=True).start()
    code = worker.wait()
    _kill(worker)
    code = code if code >= 0 else 128 - code
    print(end_line(code), end="", file=sys.stderr, flush=True)
    return code


def _hold(leash: int, worker: subprocess.Popen[bytes]) -> None:
    with open(leash, "rb", buffering=0) as lines:
        for line in lines:
            with contextlib.suppress(KeyError):
                worker.send_signal(signal.Signals[line.decode(errors="replace").strip()])
    _kill(worker)


def _first(key: str) -> bool:
    folder = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"jtrain-leashes-{os.getuid()}")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    try:
        os.close(os.open(os.path.join(folder, os.path.basename(key)), os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    return True


def _kill(worker: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
