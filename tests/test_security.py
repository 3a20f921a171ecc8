"""Nothing that is read runs, and no secret leaves: canaries in files, names and variables of the environment.

The ids are those of the fault matrix: S1 hostile files, S2 secrets, S3 listening sockets.
"""

import json
import logging
import marshal
import os
import pickle
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest

from jtrain import Callback
from jtrain.checkpoint import manifest
from jtrain.cli.failure import RunFailed
from jtrain.cli.main import main
from jtrain.config import load_config
from jtrain.config.yaml_file import dump_yaml
from jtrain.data.build import build_data
from jtrain.data.chat import load_chat_template
from jtrain.data.tokenizers import load_tokenizer
from jtrain.errors import ConfigError, JtrainError
from jtrain.observe.metrics import read_events
from tests.checkpoint.hf.folders import write_folder
from tests.train.fits import checkpoints, make, settings


class Canary:
    """What runs code when it is unpickled."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return open, (str(self._path), "w")


@pytest.fixture
def canary(tmp_path):
    """A file that must not come to exist."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "something that was read has run"


@pytest.fixture
def no_pickle(monkeypatch):
    """Every door to pickle and marshal, in whatever module it is known by, is guarded; returns who came."""
    came = []

    def guard(name, call, allowed):
        def guarded(*arguments, **options):
            if not allowed(sys._getframe(1), options):
                came.append(f"{name} from\n{''.join(traceback.format_stack(limit=8))}")
            return call(*arguments, **options)

        return guarded

    never = lambda frame, options: False
    by_import = lambda frame, options: "importlib" in frame.f_code.co_filename  # compiled modules
    doors = {
        pickle.load: never,
        pickle.loads: never,
        pickle.Unpickler: never,
        pickle._Unpickler: never,
        marshal.load: never,
        marshal.loads: by_import,
        np.load: lambda frame, options: not options.get("allow_pickle"),
    }
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            for door, allowed in doors.items():
                if value is door:
                    monkeypatch.setattr(module, name, guard(f"{door.__module__}.{door.__name__}", door, allowed))
    return came


def folder_of_a_stranger(path, canary):
    """A Hugging Face folder with everything that somebody's code could be run by."""
    write_folder(
        path,
        template=True,
        auto_map={"AutoConfig": "modeling_x.Config", "AutoModelForCausalLM": "modeling_x.Model"},
        _attn_implementation_internal="stranger/kernel",
    )
    (path / "modeling_x.py").write_text(f"open({str(canary)!r}, 'w')")
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "tokenizer.pkl"):
        (path / name).write_bytes(pickle.dumps(Canary(canary)))
    return path


def test_nothing_is_unpickled_by_saves_restores_caches_and_imports(no_pickle, canary, tmp_path):
    run = tmp_path / "run"
    logs = {"logging": {"trackers": ["tensorboard"]}}
    make(run, max_steps=2, **logs).fit()
    make(run, max_steps=4, checkpoint={"save_steps": 2}, **logs).fit()
    assert checkpoints(run) == [2, 4]

    folder = folder_of_a_stranger(tmp_path / "hf", canary)
    assert main(["import", str(folder), str(tmp_path / "imported")]) == 0

    (tmp_path / "a.txt").write_text("some text, " * 40)
    data = {"train": str(tmp_path / "a.txt"), "cache_dir": str(tmp_path / "cache")}
    config = load_config({"max_length": 32, "data": data}, env={})
    for _ in range(2):  # made, then opened
        rows, _ = build_data(config, load_tokenizer("bytes"))
        assert rows.rows(np.arange(2))["input_ids"].shape == (2, 32)
    template = load_chat_template(load_tokenizer(str(folder)))
    assert template.render([{"role": "user", "content": "hi"}]) == "hi"
    assert not no_pickle, "\n".join(no_pickle)


def test_the_guard_of_the_test_above_sees_a_pickle(no_pickle, tmp_path):
    pickle.loads(pickle.dumps([1]))
    np.save(tmp_path / "x.npy", np.array([None]), allow_pickle=True)
    np.load(tmp_path / "x.npy", allow_pickle=True)
    assert {line.split()[0] for line in no_pickle} >= {"_pickle.loads", "numpy.load"}


def test_s1_pickles_in_a_run_are_ignored_or_refused(canary, tmp_path, no_pickle):
    run = tmp_path / "run"
    make(run, max_steps=3, checkpoint={"save_steps": 1}).fit()
    for file in ("1/state.pkl", "1/state/params.bin", "2/manifest.json", "3/meta/metadata", "latest.pkl"):
        (run / "checkpoints" / file).write_bytes(pickle.dumps(Canary(canary)))
    (run / "model").mkdir()
    (run / "model" / "jtrain.json").write_bytes(pickle.dumps(Canary(canary)))
    trainer = make(run, max_steps=4)
    trainer.fit()
    assert trainer.counters.step == 4 and not no_pickle
    assert [event["step"] for event in read_events(run, "resume")] == [1]


def test_s1_a_manifest_that_is_right_about_a_pickle_does_not_make_it_one_that_is_read(canary, tmp_path, no_pickle):
    """Whoever can write a checkpoint can write its manifest, too: the hashes guard against faults alone."""
    from etils import epath

    make(tmp_path, max_steps=2, checkpoint={"save_steps": 1}).fit()
    step = epath.Path(tmp_path / "checkpoints" / "2")
    (step / "meta" / "metadata").write_bytes(pickle.dumps(Canary(canary)))
    old = manifest.read_manifest(step)
    files = manifest.hash_files(step, list(old.files))
    manifest.write_manifest(step, manifest.new_manifest(2, files, old.arrays, {}))
    with pytest.raises((JtrainError, ValueError)):
        make(tmp_path, max_steps=3).fit()
    assert not no_pickle


def test_s1_an_object_array_in_a_cache_of_tokens_is_made_again(canary, tmp_path):
    (tmp_path / "a.txt").write_text("some text, " * 40)
    data = {"train": str(tmp_path / "a.txt"), "cache_dir": str(tmp_path / "cache")}
    config = load_config({"max_length": 32, "data": data}, env={})
    build_data(config, load_tokenizer("bytes"))
    (edges,) = (tmp_path / "cache").rglob("edges.npy")
    np.save(edges, np.array([Canary(canary)], dtype=object), allow_pickle=True)
    rows, _ = build_data(config, load_tokenizer("bytes"))
    assert len(rows) > 1


@pytest.mark.parametrize(
    "text",
    [
        "model: !!python/object/apply:os.system ['touch {canary}']",
        "model: !!python/object/new:subprocess.Popen [['touch', '{canary}']]",
        "seed: !!python/object/apply:builtins.open ['{canary}', 'w']",
        "a: &a !!python/name:os.system\nb: *a",
    ],
)
def test_s1_yaml_holds_plain_values(text, canary, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(text.replace("{canary}", str(canary)))
    assert main(["config", "show", str(tmp_path / "c.yaml")]) == 64
    assert "plain values" in capsys.readouterr().err


def test_s1_a_template_can_not_leave_its_sandbox(canary, tmp_path):
    write_folder(tmp_path / "hf")
    attack = (
        "{% for c in ''.__class__.__base__.__subclasses__() %}{% if c.__name__ == '_wrap_close' %}"
        f"{{{{ c.__init__.__globals__['open']('{canary}', 'w') }}}}{{% endif %}}{{% endfor %}}"
    )
    for source in (attack, f"{{{{ cycler.__init__.__globals__.os.system('touch {canary}') }}}}"):
        (tmp_path / "hf" / "chat_template.jinja").write_text(source)
        template = load_chat_template(load_tokenizer(str(tmp_path / "hf")))
        with pytest.raises(JtrainError, match="may not touch"):
            template.render([{"role": "user", "content": "hi"}])


def test_s1_no_name_in_a_config_is_a_place_in_code(canary, tmp_path):
    module = tmp_path / "evil.py"
    module.write_text(f"open({str(canary)!r}, 'w')")
    sys.path.insert(0, str(tmp_path))
    try:
        for fields in ({"task": "evil:run"}, {"optimizer": {"name": "evil.Adam"}}, {"logging": {"trackers": ["evil"]}}):
            with pytest.raises(ConfigError):
                load_config(fields, env={})
    finally:
        sys.path.remove(str(tmp_path))


SECRETS = {
    "HF_TOKEN": "hf_CANARYcanaryCANARYcanaryCANARYca",
    "WANDB_API_KEY": "CANARY" + "0123456789abcdef" * 2,
    "AWS_SECRET_ACCESS_KEY": "CANARY/aws+secret",
    "MY_SERVICE_PASSWORD": "CANARY-pass-word",
}


def test_s2_a_secret_is_in_no_artefact(tmp_path, monkeypatch, capsys):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    url = "https://me:CANARYurl@host.invalid/a.jsonl?X-Amz-Signature=CANARYsig"
    said = f"401 from {url} for {' '.join(SECRETS.values())}"

    class Says(Callback):
        def on_step_end(self, trainer, step, metrics):
            logging.getLogger("jtrain.train").warning(said)
            trainer._session.emit("save_failed", {"reason": said, "token": "CANARYfield"})
            if step == 3:
                raise OSError(said)

    run = tmp_path / "run"
    fields = {"data": {"train": url}, "logging": {"trackers": ["tensorboard"]}, "checkpoint": {"save_steps": 1}}
    trainer = make(run, [Says()], max_steps=5, **fields)
    with pytest.raises(OSError) as caught:
        trainer.fit()

    def crash(args):
        raise RunFailed(str(run)) from caught.value

    import jtrain.cli.config as verb

    (tmp_path / "c.yaml").write_text(dump_yaml({"task": "pretrain"} | settings(run, **fields)))
    assert main(["config", "show", str(tmp_path / "c.yaml")]) == 0
    assert main(["pretrain", str(tmp_path / "c.yaml"), "--data.tokenizer", f"hf_{'CANARY' * 5}"]) == 64
    monkeypatch.setattr(verb, "run", crash)
    assert main(["config", "show"]) == 70 == main(["config", "show", "--debug"])
    monkeypatch.undo()
    printed = "".join(capsys.readouterr())
    assert "401 from https://***@host.invalid" in printed and "Traceback" in printed
    written = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {"config.yaml", "events.jsonl", "error.txt", "metadata"} <= {path.name for path in written}
    assert b"401 from https://***@host.invalid" in (run / "error.txt").read_bytes()
    for path, data in {Path("console"): printed.encode(), **written}.items():
        assert b"CANARY" not in data, (path, [line for line in data.splitlines() if b"CANARY" in line][:3])


def test_an_export_names_no_place_on_this_machine(tmp_path):
    from jtrain.tasks.companion_files import config_json
    from jtrain.tasks.exporting import _companions
    from jtrain.tasks.opened import open_model

    folder = tmp_path / "home" / "me" / "hf"
    write_folder(folder, template=True, _name_or_path=str(folder), text_config={"_name_or_path": str(folder)})
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"name_or_path": str(folder)}))
    opened = open_model(str(folder))
    assert config_json(opened.decoder, opened.companions, None)["text_config"] == {"_name_or_path": str(folder)}

    class Model:
        source, decoder, tokenizer = opened.companions, opened.decoder, opened.tokenizer()

    files = _companions(Model, "float32")
    assert {"config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json"} <= set(files)
    assert not [name for name, data in files.items() if str(tmp_path).encode() in data]


@pytest.mark.faults
def test_s3_the_processes_of_a_run_listen_where_they_are_told_alone():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    worker = Path(__file__).parent / "parallel" / "listening_worker.py"
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(Path(__file__).parents[1])}
    running = [
        subprocess.Popen([sys.executable, worker, address, str(index)], stdout=subprocess.PIPE, env=environment)
        for index in range(2)
    ]
    try:
        found = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert address in {f"{host}:{port}" for host, port in found[0]}
    # gloo (collectives of CPU devices) listens at the address that the host's name stands for.
    assert {host for each in found for host, _ in each} <= {"127.0.0.1", socket.gethostbyname(socket.gethostname())}
