"""The program: verbs, exit codes, one short message a mistake, and how fast help comes."""

import json
import logging
import subprocess
import sys
import time
from types import ModuleType

import pytest

from jtrain.cli.main import VERBS, main
from jtrain.config import load_config
from jtrain.errors import CheckpointError, DataError, NumbersError, Preempted, StorageError


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Runs a command line in an empty folder: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(*argv):
        code = main(argv)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def task(monkeypatch):
    """Replaces the tasks by a function of the config."""

    def install(function):
        module = ModuleType("jtrain.tasks")
        module.run = function
        monkeypatch.setitem(sys.modules, "jtrain.tasks", module)
        import jtrain

        monkeypatch.setattr(jtrain, "tasks", module, raising=False)

    return install


def test_help_lists_the_verbs(run):
    code, out, _ = run("--help")
    assert code == 0 and all(f"  {verb.name} " in out for verb in VERBS)


@pytest.mark.parametrize("debug", [False, True])
def test_tracebacks_of_orbax_threads_are_shown_with_debug_alone(run, monkeypatch, capsys, debug):
    monkeypatch.setattr(logging.root, "handlers", [])
    run("--version", *["--debug"] * debug)
    for name in ("absl", "asyncio"):
        logging.getLogger(name).error("a save failed", exc_info=OSError("no space left"))
    logging.getLogger("absl").warning("a warning")
    err = capsys.readouterr().err
    assert ("no space left" in err) == debug and "a warning" in err


def test_every_verb_has_a_help_page(run):
    for verb in ("train", "pretrain", "config", "data"):
        code, out, err = run(verb, "--help")
        assert code == 0 and f"usage: jtrain {verb}" in out and not err


def test_the_help_of_train_shows_the_values_of_a_recipe(run):
    assert "(default: 1024)" in run("train", "--help")[1]
    assert "(default: 128)" in run("train", "demo", "--help")[1]


def test_train_runs_the_task_of_the_config_and_returns_its_code(run, task):
    seen = []
    task(lambda config: seen.append(config) or 10)
    assert run("train", "demo", "--max-steps", "3")[0] == 10
    assert run("pretrain", "--data.train", "a.txt", "--max-steps=3")[0] == 10
    assert [(config.task, config.max_steps) for config in seen] == [("pretrain", 3)] * 2
    assert seen[0].data.train == load_config("demo", (), {}).data.train


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("a.txt is empty", "Give another."), 65),
        (CheckpointError("step 3"), 66),
        (StorageError("full"), 14),
        (NumbersError("nan"), 15),
        (Preempted("stopped", saved=True), 10),
        (Preempted("stopped", saved=False), 11),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_has_its_exit_code_and_no_traceback(run, task, error, code):
    def fail(config):
        raise error

    task(fail)
    found, out, err = run("train", "demo")
    assert found == code and out == "" and "Traceback" not in err and len(err.splitlines()) <= 2
    assert str(error) in err
    assert "Traceback" in run("train", "demo", "--debug")[2]


def test_a_bug_says_so_and_leaves_its_traceback_in_the_run_directory(run, task, tmp_path):
    def fail(config):
        raise RuntimeError("odd\nthing")

    task(fail)
    code, _, err = run("train", "demo", "--run-dir", str(tmp_path))
    assert code == 70 and "bug in jtrain" in err and "RuntimeError: odd thing" in err and "Traceback" not in err
    assert "RuntimeError: odd" in (tmp_path / "error.txt").read_text() and str(tmp_path / "error.txt") in err
    code, _, err = run("train", "demo", "--run-dir", str(tmp_path / "none"))
    assert code == 70 and "--debug" in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian", "demo"], ["'trian' is not a verb", "Did you mean 'train'?"]),
        (["--foo"], ["'--foo' is not a verb"]),
        (["grpo", "demo"], ["'grpo' is not a verb"]),
        (["sft", "demo"], ["task: pretrain, and the verb is sft", "jtrain train demo"]),
        (["train"], ["CONFIG is missing", "demo"]),
        (["train", "dmeo"], ["did you mean 'demo'?"]),
        (["train", "demo", "extra"], ["'extra' is one argument too many"]),
        (["train", "none.yaml"], ["none.yaml does not exist"]),
        (["train", "demo", "--devices", "6"], ["data 2 x fsdp 2 x tensor 2 = 8 is not 6 devices"]),
        (["train", "demo", "--mesh", "fsdp=-1"], ["data=-1 and fsdp=-1"]),
        (["train", "demo", "--global-batch-size", "30"], ["30 / (4 data ranks x 1"]),
        (["train", "demo", "--optimizer.learning-rate", "nan"], ["--optimizer.learning-rate: 'nan'"]),
        (["train", "demo", "--max-steps", "-1"], ["num_train_epochs"]),
        (
            ["train", "demo", "--mesh", "context=8", "--max-length", "1000"],
            ["1000 / 2 x 8 mesh.context", "992 or 1008"],
        ),
        (["config", "shwo"], ["Did you mean show?"]),
        (["config", "docs", "x"], ["'x' is one argument too many"]),
        (["config", "show", "--learning-rte", "1"], ["Did you mean --learning_rate?"]),
    ],
)
def test_a_mistake_gets_one_clear_message_and_64(run, argv, words):
    started = time.perf_counter()
    code, out, err = run(*argv)
    assert code == 64 and out == "" and err.startswith("error: ") and len(err) < 600
    assert all(word in err for word in words), err
    assert time.perf_counter() - started < 5
    assert "Traceback" in run(*argv, "--debug")[2]


def test_nothing_at_all_is_answered_with_the_help(run):
    code, out, _ = run()
    assert code == 64 and "usage: jtrain" in out


def test_config_show_prints_yaml_or_json_that_is_the_resolved_config(run, tmp_path):
    code, out, _ = run("config", "show", "demo", "--mesh", "fsdp=8")
    assert code == 0
    (tmp_path / "c.yaml").write_text(out)
    config = load_config("c.yaml", (), {})
    assert (config.mesh.fsdp, config.mesh.tensor, config.mesh.data) == (8, 1, -1)
    code, out, _ = run("config", "show", "--json", "demo", "--seed", "3")
    assert code == 0 and json.loads(out)["seed"] == 3


def test_config_schema_and_docs_are_printed(run):
    assert json.loads(run("config", "schema")[1])["title"] == "Config"
    assert "| `mesh.fsdp` |" in run("config", "docs")[1]


def test_help_imports_neither_jax_nor_the_schema():
    """Wall time is the check of `jtrain bench`; what is imported decides it and does not depend on the machine."""
    code = (
        "import sys; from jtrain.cli.main import main; main(['--help']);"
        "heavy = {'jax', 'numpy', 'pydantic', 'tyro', 'yaml'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_flags_are_parsed_without_jax():
    code = (
        "import sys; from jtrain.cli.main import main;"
        "assert main(['config', 'show', 'demo', '--seed', '1']) == 0;"
        "heavy = {'jax', 'numpy', 'flax'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
