"""`jtrain launch slurm`: a batch script that runs the job, and puts it back into the queue by its exit code.

Slurm starts, kills and requeues the processes itself: the script is the supervisor here. It runs outside of any
container (where `scontrol` often is not), holds no state but a line in the run directory, and is written so that a task
of an array concerns itself alone.

sbatch: https://slurm.schedmd.com/sbatch.html. `--signal=B:USR1@300` reaches the batch shell alone, five minutes before
the time limit; it asks the tasks to save (SIGTERM) and waits for their exit code.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jtrain.errors import ConfigError, Exit
from jtrain.launch.job import Job
from jtrain.launch.restarts import CRASH_LOOP

REQUEUED = (Exit.PREEMPTED_SAVED, Exit.PREEMPTED_NOT_SAVED, Exit.PEER_LOST, Exit.HUNG)
"""Exit codes with which the job goes back into the queue; others end it."""
_SIGNALLED = (134, 137, 139)
"""SIGABRT, SIGKILL, SIGSEGV: how srun tells of a process that was lost."""
_SUBMITTED = re.compile(r"^(\d+)(;.*)?$")


@dataclass(frozen=True)
class Batch:
    """What is asked of Slurm.

    Attributes:
      name: of the job.
      hosts: least and most nodes.
      per: `node` or `gpu`: what has a process.
      gpus: GPUs of a node; 0: none.
      options: further options of sbatch, without dashes (`partition=h100`).
      setup: shell commands before the run (`module load cuda`).
      python: the interpreter on the nodes.
      container: an image for pyxis' `--container-image`; empty: none.
      mounts: for its `--container-mounts`.
      signal_seconds: so long before the time limit the run saves.
      array: indices of an array of runs; empty: one run. Each has its own folder below the run directory.
      vary: the field that is the index of the array (`seed`).
    """

    name: str
    hosts: tuple[int, int] = (1, 1)
    per: str = "node"
    gpus: int = 0
    options: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    python: str = sys.executable
    container: str = ""
    mounts: str = ""
    signal_seconds: int = 300
    array: str = ""
    vary: str = ""


def script(job: Job, batch: Batch) -> str:
    """The batch script.

    Raises:
      ConfigError: parts that don't fit.
    """
    check(job, batch)
    return "\n".join([
        "#!/bin/bash",
        *(f"#SBATCH --{_quoted(option)}" for option in directives(job, batch)),
        "",
        *_head(job, batch),
        "",
        *_run(job, batch),
        "",
        *_end(job),
        "",
    ])  # fmt: skip


def _quoted(option: str) -> str:
    name, equals, value = option.partition("=")
    return f'{name}{equals}"{value}"' if " " in value else option


def directives(job: Job, batch: Batch) -> list[str]:
    """Options of sbatch, without dashes."""
    least, most = batch.hosts
    tasks = batch.gpus if batch.per == "gpu" else 1
    output = "%A_%a" if batch.array else "%j"
    return [
        f"job-name={batch.name}",
        f"nodes={least}" if least == most else f"nodes={least}-{most}",
        f"ntasks-per-node={tasks}",
        *([f"gpus-per-node={batch.gpus}"] if batch.gpus else []),
        *([f"array={batch.array}"] if batch.array else []),
        f"output={logs(job) / f'slurm-{output}.out'}",
        "open-mode=append",  # a job that is started again goes on with its log
        "requeue",
        f"signal=B:USR1@{batch.signal_seconds}",
        *batch.options,
    ]


def logs(job: Job) -> Path:
    """Where the log lies: in the run directory, or here where that is a URL."""
    return Path.cwd() if job.is_url else Path(job.config.run_dir)


def _head(job: Job, batch: Batch) -> list[str]:
    run = f"run={shlex.quote(job.config.run_dir)}"
    return [
        "set -u",
        run + ('/"$SLURM_ARRAY_TASK_ID"' if batch.array else ""),
        "# By its own id a task of an array may mean the whole array.",
        'job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}}',
        'job=${job:-$SLURM_JOB_ID}',
        "restarts=${SLURM_RESTART_COUNT:-0}",
        "export JTRAIN_ATTEMPT=$((restarts + 1)) PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1",
        "",
        "# How the last attempt ended. In a row: restarts without a new durable step; same: with the same exit code.",
        f"state={'$PWD/.jtrain-restarts-$job' if job.is_url else '$run/.slurm-restarts'}",
        "last_durable= last_code= in_a_row=0 same=0",
        '[ "$restarts" -gt 0 ] && [ -r "$state" ] && IFS=";" read -r last_durable last_code in_a_row same < "$state"',
        'export JTRAIN_LAST_END="{\\"attempt\\": $restarts, \\"code\\": ${last_code:-null}}"',
        '[ "$restarts" -gt 0 ] || unset JTRAIN_LAST_END',
        *batch.setup,
        "",
        "# Process 0 runs on the first node; another port each time, since the last one may still be held.",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "export JTRAIN_DISTRIBUTED__COORDINATOR_ADDRESS=$first:$((20000 + (SLURM_JOB_ID + 97 * restarts) % 20000))",
        *_devices(batch),
    ]  # fmt: skip


def _devices(batch: Batch) -> list[str]:
    if batch.per == "gpu" or batch.gpus < 2:
        return []
    ids = ",".join(map(str, range(batch.gpus)))
    return [
        "# Under Slurm jax gives a process one GPU, by its local number, unless it is told.",
        f"export JAX_LOCAL_DEVICE_IDS={ids}",
    ]


def _run(job: Job, batch: Batch) -> list[str]:
    train = shlex.join(job.command(batch.python))
    if batch.array:
        train += ' --run_dir "$run"' + (f' --{batch.vary} "$SLURM_ARRAY_TASK_ID"' if batch.vary else "")
    # A task's own number is known to it alone; a run of one process joins no others.
    inside = (
        'if [ "$SLURM_NTASKS" -gt 1 ]; then export JTRAIN_DISTRIBUTED__NUM_PROCESSES=$SLURM_NTASKS '
        "JTRAIN_DISTRIBUTED__PROCESS_ID=$SLURM_PROCID; else unset JTRAIN_DISTRIBUTED__COORDINATOR_ADDRESS; fi; "
        'exec "$@"'
    )
    container = [f"--container-image={shlex.quote(batch.container)}"] if batch.container else []
    container += [f"--container-mounts={shlex.quote(batch.mounts)}"] if batch.mounts else []
    srun = " ".join(["srun", "--kill-on-bad-exit=0", "--wait=60", *container])
    return [
        "# The time is nearly over: the wish to leave is passed on to all tasks, which save and end with 10.",
        "signalled= cancelled=",
        'trap \'signalled=1; echo "asked to leave: the run saves"; scancel --signal=TERM "$job"\' USR1',
        "# Slurm itself ends the job (scancel, preemption): it tells the tasks, and knows what comes next.",
        "trap 'signalled=1 cancelled=1' TERM",
        'echo "attempt $JTRAIN_ATTEMPT of job $job: $SLURM_JOB_NUM_NODES node(s), first $first"',
        f"{srun} bash -c '{inside}' jtrain {train} &",
        "srun=$!",
        'wait "$srun"; code=$?',
        'while [ -n "$signalled" ]; do signalled=; wait "$srun"; code=$?; done  # a signal ends a wait, not the run',
    ]


def _end(job: Job) -> list[str]:
    faults = job.config.faults
    preempted = "|".join(str(int(code)) for code in REQUEUED[:2])
    lost = "|".join(str(int(code)) for code in (*REQUEUED[2:], *_SIGNALLED))
    find = (
        'durable=$(cd "$run/checkpoints" 2>/dev/null && ls -d [0-9]*/manifest.json 2>/dev/null'
        " | sort -n | tail -n 1 | cut -d/ -f1)"
    )
    if job.is_url:
        find = "durable=  # checkpoints behind a URL are not listed here: no restart counts as progress"
    return [
        find,
        '[ "$durable" = "$last_durable" ] || in_a_row=0 same=0 last_code=',
        '[ "$code" = "$last_code" ] || same=0',
        "in_a_row=$((in_a_row + 1)) same=$((same + 1))",
        "again=",
        "case $code in",
        f"  {preempted}) again=1; in_a_row=0 same=0 ;;  # preempted: counts for nothing",
        f"  {lost})",
        f'    if [ "$same" -ge {CRASH_LOOP} ]; then echo "crash loop: {CRASH_LOOP} times exit $code from step '
        f'${{durable:-0}} on"; code={int(Exit.BUG)}',
        f'    elif [ "$in_a_row" -gt {faults.max_infra_restarts} ]; then echo "faults.max_infra_restarts: '
        f'{faults.max_infra_restarts} is used up"',
        "    else again=1; fi ;;",
        "esac",
        '[ -z "$cancelled" ] || again=',
        'echo "attempt $JTRAIN_ATTEMPT ended with exit $code, durable step ${durable:-none}"',
        'if [ -n "$again" ]; then',
        '  mkdir -p "$(dirname "$state")"',
        '  printf "%s;%s;%s;%s\\n" "$durable" "$code" "$in_a_row" "$same" > "$state"',
        '  echo "job $job goes back into the queue"',
        '  scontrol requeue "$job" && exit "$code"',
        '  echo "it could not be requeued"',
        "else",
        '  rm -f "$state"',
        "fi",
        'exit "$code"',
    ]


def check(job: Job, batch: Batch) -> None:
    """Sees that the parts fit.

    Raises:
      ConfigError: they don't.
    """
    if batch.per == "gpu" and not batch.gpus:
        raise ConfigError("--per gpu without --gpus-per-node", "Write --gpus-per-node 8, or --per node.")
    if batch.vary and not batch.array:
        raise ConfigError(f"--vary {batch.vary} without --array", "Write --array 0-3.")
    if batch.array:
        indices = re.fullmatch(r"(\d+)(-\d+)?(,\d+(-\d+)?)*(%\d+)?", batch.array)
        if indices is None:
            raise ConfigError(f"--array: {batch.array!r} are no indices", "Write --array 0-3, or 0,2,4-6%2.")
        if batch.vary:
            job.changed(f"--{batch.vary}", indices[1])
    if batch.mounts and not batch.container:
        raise ConfigError("--container-mounts without --container-image", "Write --container-image.")
    for option in batch.options:
        name = option.partition("=")[0]
        if name in {own.partition("=")[0] for own in directives(job, Batch(batch.name, gpus=1, array="0"))}:
            raise ConfigError(f"--sbatch {option}: the launcher sets --{name}", "Leave it out.")
    least, most = batch.hosts
    if least < most:
        job.check_elastic(least, most)
    if least < most and job.config.devices != "auto":
        raise ConfigError(
            f"--hosts {least}:{most} with devices: {job.config.devices}: their number follows from the nodes",
            "Write devices: auto.",
        )
    count = most * (batch.gpus if batch.per == "gpu" else 1)
    if count > 1:
        job.changed("--distributed.num_processes", str(count))


def submit(text: str, job: Job) -> str:
    """Submits the script and returns the job's number.

    Raises:
      ConfigError: sbatch refuses it.
    """
    logs(job).mkdir(parents=True, exist_ok=True)  # without its folder a job's log, and the job, are lost
    found = subprocess.run(["sbatch", "--parsable"], input=text, capture_output=True, text=True, check=False)
    match = _SUBMITTED.match(found.stdout.strip())
    if found.returncode or match is None:
        said = " ".join((found.stderr or found.stdout).split())[-400:]
        raise ConfigError(
            f"sbatch refuses the job: {said}", "Give what it asks for: --sbatch account=..., for example."
        )
    return match[1]


def follow(number: str, job: Job, print_text: Callable[[str], None], sleep: Callable[[float], None]) -> int:
    """Shows the log of a job until it has left the queue for good, and returns its exit code."""
    path, shown = logs(job) / f"slurm-{number}.out", 0
    while True:
        state, code = _state(number)
        if path.exists():
            with path.open("rb") as file:
                file.seek(shown)
                said = file.read()
            shown += len(said)
            print_text(said.decode(errors="replace"))
        if state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED"):
            return code
        sleep(5.0)


def _state(number: str) -> tuple[str, int]:
    """State and exit code of a job, as `scontrol show job` has them."""
    found = subprocess.run(
        ["scontrol", "--oneliner", "show", "job", number], capture_output=True, text=True, check=False
    )
    state = re.search(r"\bJobState=(\w+)", found.stdout)
    code = re.search(r"\bExitCode=(\d+):(\d+)", found.stdout)
    if found.returncode or state is None:
        return "GONE", int(Exit.PEER_LOST)
    return state[1], (int(code[1]) or (128 + int(code[2]) if int(code[2]) else 0)) if code else 0
