"""`jtrain launch slurm`: the script as bash and Slurm read it, and its life between runs, requeues and the end."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from jtrain.errors import ConfigError
from jtrain.launch.job import make_job
from jtrain.launch.slurm import Batch, script

OPTIONS = set((Path(__file__).parent / "fixtures" / "sbatch_options.txt").read_text().partition("\n")[2].split())
WIDE = ["--accelerator", "gpu", "--devices", "auto", "--mesh", "data=-1"]


def written(tmp_path, *flags, **changes):
    job = make_job("demo", ["--run_dir", str(tmp_path / "run"), *WIDE, *flags])
    return script(job, Batch("demo", **changes))


def directives(text):
    """Option -> value, as sbatch reads them: up to the first line that is neither empty nor a comment."""
    found = {}
    for line in text.splitlines()[1:]:
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#SBATCH"):
            (word,) = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            name, _, value = word.removeprefix("--").partition("=")
            assert name not in found, f"{name} comes twice"
            found[name] = value
    return found


BATCHES = [
    {},
    {"hosts": (2, 4), "gpus": 8},
    {"hosts": (2, 2), "gpus": 4, "per": "gpu", "options": ("partition=gpu", "exclusive", "time=24:00:00")},
    {"array": "0-3%2", "vary": "seed", "setup": ("module load cuda", "source /opt/env/bin/activate")},
    {"container": "nvcr.io#nvidia/jax:25.01", "mounts": "/data:/data,/home", "python": "python3"},
]


def test_a_run_directory_with_a_space_stays_one_word(tmp_path):
    job = make_job("demo", ["--run_dir", str(tmp_path / "my run"), *WIDE])
    text = script(job, Batch("demo"))
    assert directives(text)["output"] == str(tmp_path / "my run" / "slurm-%j.out")
    assert f"run='{tmp_path}/my run'" in text


@pytest.mark.parametrize("changes", BATCHES)
def test_scripts_are_bash_and_their_directives_are_options_of_sbatch(changes, tmp_path):
    text = written(tmp_path, **changes)
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    found = directives(text)
    assert found.keys() <= OPTIONS
    assert found["open-mode"] == "append" and found["signal"] == "B:USR1@300" and found["requeue"] == ""
    assert re.fullmatch(r"\d+(-\d+)?", found["nodes"]) and len(text.splitlines()[0]) == len("#!/bin/bash")


def test_nodes_tasks_and_gpus_are_what_was_asked(tmp_path):
    found = directives(written(tmp_path, hosts=(2, 4), gpus=8))
    assert (found["nodes"], found["ntasks-per-node"], found["gpus-per-node"]) == ("2-4", "1", "8")
    found = directives(written(tmp_path, hosts=(2, 2), gpus=8, per="gpu"))
    assert (found["nodes"], found["ntasks-per-node"], found["gpus-per-node"]) == ("2", "8", "8")


def test_a_process_of_a_node_is_told_of_all_its_gpus_and_one_of_a_gpu_is_not(tmp_path):
    assert "JAX_LOCAL_DEVICE_IDS=0,1,2,3\n" in written(tmp_path, gpus=4)
    assert "JAX_LOCAL_DEVICE_IDS" not in written(tmp_path, gpus=4, per="gpu")


# -- life -------------------------------------------------------------------------------------------------------------


class Controller:
    """Runs a submitted job as Slurm does: again when it was requeued, its log appended to."""

    def __init__(self, fake, tmp_path, **environment):
        self.fake, self.log = fake, tmp_path / "log"
        self.environment = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2",
                            "SLURM_NTASKS": "2"} | environment  # fmt: skip

    def start(self, restarts):
        environment = os.environ | self.environment | ({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {})
        with self.log.open("ab") as log:
            return subprocess.Popen(["bash", self.fake.folder / "job"], env=environment, stdout=log, stderr=log)

    def requeued(self):
        path = self.fake.folder / "requeued"
        return path.read_text().split() if path.exists() else []

    def run(self, limit=12):
        """The exit codes of all attempts."""
        codes = []
        while len(codes) < limit:
            before = len(self.requeued())
            codes.append(self.start(len(codes)).wait(60))
            if len(self.requeued()) == before:
                return codes
        return codes


def submit(run, tmp_path, fake, *words):
    code, out, err = run(
        "launch", "slurm", "demo", "--hosts", "2", "--python", fake.python, "--run_dir", str(tmp_path / "run"), *words
    )
    assert code == 0, err
    return out


@pytest.fixture
def durable(tmp_path):
    """A command by which a worker makes a step durable."""
    return lambda step: f'mkdir -p "{tmp_path}/run/checkpoints/{step}"; touch "$_/manifest.json"\n'


def test_a_job_is_requeued_by_its_exit_code_until_it_is_done(run, fake, tmp_path, durable):
    out = submit(run, tmp_path, fake)
    assert "job 4242 is submitted" in out and str(tmp_path / "run" / "slurm-4242.out") in out
    fake.runs_shell(f"""
echo "rank $rank $attempt ${{JTRAIN_LAST_END:--}} $JTRAIN_DISTRIBUTED__COORDINATOR_ADDRESS \
$JTRAIN_DISTRIBUTED__NUM_PROCESSES"
{durable(8)} meet
case $attempt in 1) exit $((rank * 12));; 2) exit 10;; 3) exit 13;; esac
""")
    controller = Controller(fake, tmp_path)
    assert controller.run() == [12, 10, 13, 0] and controller.requeued() == ["4242"] * 3
    log = controller.log.read_text()
    for rank in (0, 1):
        assert f"rank {rank} 1 - node1:24242 2" in log
        assert f'rank {rank} 2 {{"attempt": 1, "code": 12}} node1:24339 2' in log  # another port
    assert "attempt 1 ended with exit 12, durable step 8" in log and "attempt 4 ended with exit 0" in log
    assert not (tmp_path / "run" / ".slurm-restarts").exists()


@pytest.mark.parametrize("code", [14, 15, 64, 65, 66, 70])
def test_other_codes_end_the_job(code, run, fake, tmp_path):
    submit(run, tmp_path, fake)
    fake.runs_shell(f"exit {code}")
    controller = Controller(fake, tmp_path, SLURM_NTASKS="1")
    assert controller.run() == [code] and not controller.requeued()
    assert "COORDINATOR" not in controller.log.read_text()


@pytest.mark.faults
def test_a_killed_process_is_a_lost_one_and_three_times_at_one_step_a_crash_loop(run, fake, tmp_path, durable):
    submit(run, tmp_path, fake)
    fake.runs_shell(durable(8) + "meet; [ $rank = 0 ] || kill -9 $$")
    controller = Controller(fake, tmp_path)
    assert controller.run() == [137, 137, 70]
    assert "crash loop: 3 times exit 137 from step 8 on" in controller.log.read_text()


@pytest.mark.faults
def test_restarts_without_progress_are_counted_and_progress_begins_anew(run, fake, tmp_path, durable):
    submit(run, tmp_path, fake, "--max-infra-restarts", "2")
    fake.runs_shell("step=$((attempt < 3 ? attempt : 3))\n" + durable("$step") + "meet; exit $((12 + attempt % 2))")
    controller = Controller(fake, tmp_path)
    assert controller.run() == [13, 12, 13, 12, 13]  # steps 1, 2, 3; then twice more from step 3
    assert "faults.max_infra_restarts: 2 is used up" in controller.log.read_text()


def test_the_time_limit_saves_and_requeues(run, fake, tmp_path):
    submit(run, tmp_path, fake)
    fake.runs_shell("trap 'exit 10' TERM; meet; [ $attempt = 2 ] || while :; do sleep 0.05; done")
    controller = Controller(fake, tmp_path)
    batch = controller.start(0)
    while len(list(tmp_path.glob("1.*"))) < 2:
        assert batch.poll() is None
        time.sleep(0.01)
    batch.send_signal(signal.SIGUSR1)  # as five minutes before the limit
    assert batch.wait(60) == 10 and controller.requeued() == ["4242"]
    assert (fake.folder / "cancelled").read_text() == "--signal=TERM 4242\n"
    assert controller.start(1).wait(60) == 0
    assert "asked to leave: the run saves" in controller.log.read_text()


def test_a_job_that_slurm_ends_is_not_requeued(run, fake, tmp_path):
    submit(run, tmp_path, fake)
    fake.runs_shell("trap 'exit 10' TERM; meet; while :; do sleep 0.05; done")
    controller = Controller(fake, tmp_path)
    batch = controller.start(0)
    while len(list(tmp_path.glob("1.*"))) < 2:
        assert batch.poll() is None
        time.sleep(0.01)
    batch.send_signal(signal.SIGTERM)  # scancel tells the batch shell and the tasks
    for task in (fake.folder / "tasks").read_text().split():
        os.kill(int(task), signal.SIGTERM)
    assert batch.wait(60) == 10 and not controller.requeued() and not (fake.folder / "cancelled").exists()


def test_a_task_of_an_array_requeues_itself_alone_in_its_own_folder(run, fake, tmp_path):
    submit(run, tmp_path, fake, "--array", "0-3", "--vary", "seed")
    fake.runs_shell("[ $attempt = 2 ] || exit 10")
    # The task whose own id is that of the array.
    controller = Controller(fake, tmp_path, SLURM_NTASKS="1", SLURM_ARRAY_JOB_ID="4242", SLURM_ARRAY_TASK_ID="3")
    assert controller.run() == [10, 0] and controller.requeued() == ["4242_3"]
    trained = (fake.folder / "trained").read_text().splitlines()
    assert trained[0].endswith(f"--run_dir {tmp_path}/run/3 --seed 3")


def test_follow_shows_the_log_and_returns_the_code_of_the_job(run, fake, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "slurm-4242.out").write_text("step 1/3 | loss 2\n")
    words = ("launch", "slurm", "demo", "--run_dir", str(tmp_path / "run"), "--follow")
    code, out, _ = run(*words)
    assert code == 65 and out.count("step 1/3 | loss 2\n") == 1


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, expected",
    [
        ("--hosts 0", "a run needs a host"),
        ("--hosts 4:2", "Write --hosts 2:4"),
        ("--hosts 2:4", "Write devices: auto"),
        ("--per core", "Write one of node, gpu"),
        ("--per gpu", "--gpus-per-node 8"),
        ("--gpus-per-node -1", "at least 0"),
        ("--gpus-per-node many", "not a whole number"),
        ("--signal-seconds 0", "at least 1"),
        ("--sbatch nodes=3", "the launcher sets --nodes"),
        ("--sbatch Qos", "is no option of sbatch"),
        ("--array a-b", "are no indices"),
        ("--vary seed", "Write --array"),
        ("--array 0-3 --vary sed", "Did you mean --seed"),
        ("--array 0-3 --follow", "several logs"),
        ("--container-mounts /a:/b", "Write --container-image"),
        ("--hosts 3", "Write devices: 9"),
        ("--time", "no value"),
    ],
)
def test_mistakes_are_answered_before_anything_is_submitted(words, expected, run, fake):
    code, _, err = run("launch", "slurm", "demo", *words.split())
    assert code == 64 and expected in err and not (fake.folder / "job").exists()


def test_without_slurm_the_remedy_is_said_and_a_refusal_is_passed_on(run, fake, monkeypatch):
    monkeypatch.setenv("FAKE_REFUSES", "error: invalid account")
    code, _, err = run("launch", "slurm", "demo")
    assert code == 64 and "invalid account" in err and "--sbatch account=" in err
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, err = run("launch", "slurm", "demo")
    assert code == 64 and "sbatch is not on PATH" in err and "login node" in err


def test_an_elastic_job_needs_a_global_batch(tmp_path):
    (tmp_path / "c.yaml").write_text("accelerator: gpu\nmax_steps: 3\nper_device_batch_size: 4\n")
    with pytest.raises(ConfigError, match="2 hosts would train with 2/4"):
        script(make_job(str(tmp_path / "c.yaml"), []), Batch("c", hosts=(2, 4)))
