"""Two worker processes that meet at a free port, and what each of them printed."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def answers_of_two(worker: str, *arguments: object) -> list[Any]:
    """The last line (JSON) of `worker INDEX PORT ARGUMENTS...` for both processes; both have to end with 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [
        subprocess.Popen(
            [sys.executable, str(HERE / worker), str(index), str(port), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(HERE.parents[1])},
        )
        for index in range(2)
    ]
    answers = []
    try:
        for process in workers:
            output, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors[-4000:]
            answers.append(json.loads(output.splitlines()[-1]))
    finally:
        for process in workers:
            process.kill()
    return answers
