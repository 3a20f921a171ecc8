"""`jtrain launch tpu`: all hosts of a TPU slice, each by a gcloud ssh that ends in a leash there.

With `--create` the slice is a queued resource: it is asked for, waited for, and asked for again when it was preempted.
Its disks go with it, so the run directory has to be a URL.
"""

from __future__ import annotations

import datetime
import secrets
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jtrain.errors import ConfigError, Exit, PeerLostError
from jtrain.launch.attempt import Outcome
from jtrain.launch.gang import Worker
from jtrain.launch.gcloud import Failed, Slice, answer, insist, read_answer
from jtrain.launch.job import Job
from jtrain.launch.local import LEASH
from jtrain.launch.restarts import Kind, kind_of
from jtrain.launch.supervisor import Stopped, say

POLL_SECONDS = 15.0
LOOK_SECONDS = 60.0
TRIES = 8
MAINTENANCE_SECONDS = 600.0
"""So long before a maintenance begins the run saves and leaves the machines alone."""
_GONE = ("PREEMPTED", "TERMINATED", "STOPPED", "DELETING", "HIDDEN", "UNHIDING", "HIDING")
_WAITING = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "SUSPENDING", "DELETING", "ACTIVE")
FOLDER = "jtrain-run"
"""Where the run's files lie on a host, below its home; commands run there."""
PYTHON = "../jtrain-env/bin/python"
"""The interpreter that `install_command` makes: the one of the machines may be older than jtrain allows."""


@dataclass(frozen=True)
class Setup:
    """What a host needs before it can run.

    Attributes:
      folder: a folder of this machine that is copied there; empty: only CONFIG, where it is a file.
      install: the command that installs jtrain there; empty: it is there.
      python: the interpreter there.
    """

    folder: str = ""
    install: str = ""
    python: str = PYTHON


def install_command(folder: str, version: str) -> str:
    """How a host gets jtrain: the project in `folder`, if it is one that can be installed, else a release."""
    project = folder and (Path(folder) / "pyproject.toml").is_file()
    wanted = ".[tpu]" if project else f"jtrain[tpu]=={version}"
    return (
        "python3 -m pip install --quiet uv && "
        "python3 -m uv venv --quiet --allow-existing --python 3.12 ../jtrain-env && "
        f"python3 -m uv pip install --quiet --python {PYTHON} {shlex.quote(wanted)}"
    )


class Tpu:
    """The hosts of a slice.

    Args:
      job: what they run.
      tpu: the slice.
      setup: what a host needs.
      sleep, clock: for tests.

    Raises:
      ConfigError: the run would lose its directory or its data.
    """

    def __init__(
        self,
        job: Job,
        tpu: Slice,
        setup: Setup,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ):
        check_places(job, setup)
        self._job, self._tpu, self._setup = job, tpu, setup
        self._sleep, self._clock = sleep, clock
        self._tries = 1  # a mistake in the first command is told at once; later it may be the network
        self._ready: str | None = None  # when the slice that has been set up was made
        self._looking: subprocess.Popen[str] | None = None
        self._answer: Any = None
        self._looked = 0.0
        self._key = secrets.token_hex(8)  # of an attempt
        self._maintenance: set[tuple[str, str]] = set()

    # -- commands

    def setup_commands(self) -> list[list[str]]:
        """What runs once on all hosts of a new slice."""
        commands = []
        if self._setup.folder:
            commands.append(self._tpu.copy(self._setup.folder.rstrip("/"), FOLDER))
        elif self._job.file is not None:
            commands.append(self._tpu.ssh("all", f"mkdir -p {FOLDER}"))
            commands.append(self._tpu.copy(str(self._job.file), f"{FOLDER}/{self._job.file.name}"))
        else:
            commands.append(self._tpu.ssh("all", f"mkdir -p {FOLDER}"))
        if self._setup.install:
            commands.append(self._tpu.ssh("all", f"cd {FOLDER} && {self._setup.install}"))
        return commands

    def worker(self, number: int, environment: dict[str, str]) -> Worker:
        """The process of a host: there it finds the others by itself."""
        python = self._setup.python
        train = self._job.command(python, source=self._source())
        told = [f"{name}={value}" for name, value in environment.items()]
        # gcloud makes a connection that broke again, and would start the command a second time.
        words = ["env", *told, python, *LEASH, "--once", f"{self._key}-{number}", *train]
        command = self._tpu.ssh(number, f"cd {FOLDER} && exec {shlex.join(words)}")
        return Worker(f"{self._tpu.name}/{number}", command)

    def _source(self) -> str:
        file = self._job.file
        if file is None:
            return self._job.source
        if self._setup.folder:
            return str(file.resolve().relative_to(Path(self._setup.folder).resolve()))
        return file.name

    # -- the platform

    def workers(self, environment: dict[str, str], stopping: Callable[[], int]) -> Sequence[Worker]:
        """See `Platform`: waits until the slice is there, and sets it up if it is new."""
        node = self._wait_for_slice(stopping)
        made = str(node.get("createTime"))
        if made != self._ready:
            for command in self.setup_commands():
                self._run(command, stopping)
            self._ready = made
        self._looked = self._clock()
        self._key = secrets.token_hex(8)
        hosts = max(1, len(node.get("networkEndpoints") or []))
        return [self.worker(number, environment) for number in range(hosts)]

    def look(self) -> tuple[str, str] | None:
        """See `Platform`: gcloud is asked once a minute, in the background."""
        if self._looking is None:
            if self._clock() - self._looked < LOOK_SECONDS:
                return None
            self._looked = self._clock()
            self._answer = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed when it is read
            self._looking = subprocess.Popen(
                self._tpu.describe_node(), stdin=subprocess.DEVNULL, stdout=self._answer, stderr=subprocess.PIPE,
                text=True,
            )  # fmt: skip
        code = self._looking.poll()
        if code is None:
            return None
        _, err = self._looking.communicate()
        self._looking = None
        with self._answer as file:
            file.seek(0)
            out = file.read()
        try:
            node = read_answer(code, out, err)
        except Failed:
            return None  # asked again in a minute
        if (gone := self._gone(node)) is not None:
            return "lost", gone
        return self._maintenance_of(node or {})

    def ended(self, outcome: Outcome) -> None:
        """See `Platform`."""
        if self._looking is not None:
            self._looking.kill()
            self._looking.communicate()
            self._answer.close()
            self._looking = None
        if kind_of(outcome.code) is not Kind.INFRA:
            return
        try:
            node = answer(self._tpu.describe_node())
        except Failed:
            return
        if (gone := self._gone(node)) is not None:  # the connections broke before that was noticed
            outcome.code, outcome.left = int(Exit.PREEMPTED_NOT_SAVED), gone

    def _gone(self, node: dict[str, Any] | None) -> str | None:
        """In words, that the slice is no longer there; None: it is."""
        if node is not None and node.get("state") not in _GONE:
            return None
        return f"the slice {self._tpu.name} is {'gone' if node is None else node['state'].lower()}"

    def delete(self) -> None:
        """Gives the slice back."""
        say(f"the slice {self._tpu.name} is given back")
        try:
            insist(lambda: answer(self._tpu.delete(), timeout=900.0), tries=TRIES, sleep=self._sleep)
        except Failed as error:
            say(f"it could not be: {error}")

    def _maintenance_of(self, node: dict[str, Any]) -> tuple[str, str] | None:
        """A word about a maintenance that is announced, once; and, shortly before it begins, that the run has to go."""
        notice = node.get("upcomingMaintenance") or {}
        start = notice.get("windowStartTime")
        if not start:
            return None
        text = f"maintenance of {self._tpu.name} from {start} on ({str(notice.get('type', '')).lower() or 'unknown'})"
        left = (_time(start) - datetime.datetime.now(datetime.UTC)).total_seconds()
        begins = notice.get("maintenanceStatus") == "ONGOING" or left < MAINTENANCE_SECONDS
        key = (start, "begins" if begins else "announced")
        if key in self._maintenance:
            return None
        self._maintenance.add(key)
        return ("leave", f"{text}: the run saves") if begins else ("say", text)

    def _wait_for_slice(self, stopping: Callable[[], int]) -> dict[str, Any]:
        """The node, once it is READY; made if need be."""
        shown = ""
        while True:
            if stopping():
                raise Stopped
            node = self._ask(self._tpu.describe_node())
            state = "missing" if node is None else str(node.get("state"))
            if node is not None and state == "READY":
                return node
            if not self._tpu.accelerator_type:
                _refuse_missing(self._tpu.name, state)
            state = self._make(state)
            if state != shown:
                shown = state
                say(f"the slice {self._tpu.name}: {state.lower().replace('_', ' ')}")
            self._sleep(POLL_SECONDS)

    def _make(self, node_state: str) -> str:
        """A step on the way to a new slice; the state that it is in."""
        request = self._ask(self._tpu.describe_request())
        if request is None:
            self._ask(self._tpu.create())
            return "asked for"
        found = request.get("state") or {}
        state = str(found.get("state"))
        if state == "FAILED":
            detail = str((found.get("failedData") or {}).get("error") or found)[:300]
            raise ConfigError(
                f"the request for {self._tpu.name} has failed: {detail}",
                f"Look at the type, the zone and the quota; then {shlex.join(self._tpu.delete())}",
            )
        if state == "ACTIVE" and node_state == "missing":  # it may have come up between the two questions
            node = self._ask(self._tpu.describe_node())
            node_state = "missing" if node is None else str(node.get("state"))
        if state == "SUSPENDED" or (state == "ACTIVE" and node_state in (*_GONE, "missing")):
            # What was preempted never comes back: the request goes, and another one is made.
            self._ask(self._tpu.delete())
            return f"{node_state if state == 'ACTIVE' else state}: deleted, to be made again"
        if state not in _WAITING:
            raise PeerLostError(f"the request for {self._tpu.name} is in state {state}", "look at it with gcloud")
        return state

    def _ask(self, command: list[str]) -> dict[str, Any] | None:
        try:
            found = insist(lambda: answer(command, timeout=900.0), tries=self._tries, sleep=self._sleep)
        except Failed as error:
            kind = ConfigError if self._tries == 1 else PeerLostError
            raise kind(f"{shlex.join(command[:5])}: {error}", f"Try it: {shlex.join(command)}") from None
        self._tries = TRIES
        return found

    def _run(self, command: list[str], stopping: Callable[[], int]) -> None:
        """Runs a command whose output is shown; a host that is not up yet is tried again."""
        for attempt in range(TRIES):
            say(shlex.join(command))
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
            while process.poll() is None:
                if stopping():
                    process.terminate()
                    process.wait()
                    raise Stopped
                self._sleep(0.1)
            if process.returncode == 0:
                return
            self._sleep(min(60.0, 2.0**attempt))
        raise PeerLostError(
            f"exit code {process.returncode}: {shlex.join(command)}", "see what it said; --install says how to install"
        )


def check_places(job: Job, setup: Setup) -> None:
    """Sees that the run finds its data there, and that nothing it writes is lost with the machines."""
    config = job.config
    if not job.is_url:
        raise ConfigError(
            f"run_dir: {config.run_dir} would lie on the disks of the slice, which go with it",
            "Write --run_dir gs://BUCKET/NAME.",
        )
    folder = Path(setup.folder).resolve() if setup.folder else None
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--copy: {setup.folder} is no folder", "Write the folder that holds CONFIG and its data.")
    file = None if job.file is None else job.file.resolve()
    if folder is not None and file is not None and not file.is_relative_to(folder):
        raise ConfigError(f"CONFIG: {job.source} is not in --copy {setup.folder}", "Copy the folder that it is in.")

    def kept(value: str) -> bool:
        if "://" in value:
            return True
        if folder is None:
            return False
        # Relative paths begin in the folder that is copied.
        return Path(value).is_relative_to(folder) if Path(value).is_absolute() else any(folder.glob(value))

    job.check_data(kept, "Write gs://…, or --copy the folder that holds it.")


def _refuse_missing(name: str, state: str) -> None:
    if state == "missing":
        raise ConfigError(
            f"--name {name}: there is no such slice", "Write --create --accelerator-type v5p-64 (or else)."
        )
    if state in _GONE:
        raise PeerLostError(f"the slice {name} is {state.lower()}", "with --create it would be made again")


def _time(text: str) -> datetime.datetime:
    """A time as Google's interfaces write it; at once where it can't be read."""
    try:
        return datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return datetime.datetime.now(datetime.UTC)
