"""`python workers.py SCRIPT`: a worker without jax. SCRIPT is Python, with the words of a run at hand.

`attempt` and `rank` are numbers; `at(step, durable, phase)` says where the run is; `die(n)` sends itself a signal;
`meet(n)` waits for n workers of the attempt, which $MEET then holds a file of each.
"""

import os
import signal
import sys
import time
from pathlib import Path

from jtrain.progress import report

attempt = int(os.environ.get("JTRAIN_ATTEMPT", "1"))
rank = int(os.environ.get("JTRAIN_DISTRIBUTED__PROCESS_ID") or os.environ.get("TPU_WORKER_ID", "0"))


def at(step=None, durable=None, phase="step"):
    report(phase, step=step, durable=durable)


def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)
    time.sleep(60)


def say(text):
    print(text, file=sys.stderr, flush=True)


def meet(count):
    """Waits until so many workers are here."""
    folder = Path(os.environ["MEET"])
    (folder / f"{attempt}.{rank}").touch()
    while len(list(folder.glob(f"{attempt}.*"))) < count:
        time.sleep(0.01)


def saves_on_sigterm(code=10):
    def leave(number, frame):
        say("preempted at step 5, saved")
        os._exit(code)

    signal.signal(signal.SIGTERM, leave)


if __name__ == "__main__":
    exec(sys.argv[1])
