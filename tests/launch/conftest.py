"""Programs on PATH that stand for those of a cluster, and a python that runs a script in place of a training."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from jtrain.cli.main import main

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Runs a command line in an empty folder: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)

    def call(*argv):
        code = main(argv)
        out, err = capsys.readouterr()
        return code, out, err

    return call


class Fake:
    """$FAKE: what the programs were asked, and what they know."""

    def __init__(self, folder, python):
        self.folder, self.python = folder, python

    def calls(self, *words):
        """The commands with these words, in order."""
        lines = (self.folder / "calls").read_text().splitlines() if (self.folder / "calls").exists() else []
        return [call for call in map(json.loads, lines) if set(words) <= set(call)]

    def runs(self, script):
        """What a worker does in place of `jtrain train`."""
        (self.folder / "script.py").write_text(script)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Fakes of gcloud, sbatch and kubectl; `python` runs the script in place of a training."""
    folder = tmp_path / "fake"
    folder.mkdir()
    python = folder / "python"
    python.write_text(
        "#!/bin/bash\n"
        f'if [ "$2" = jtrain ]; then echo "$@" >> {folder}/trained; '
        f'exec {sys.executable} {HERE}/workers.py "$(cat {folder}/script.py)"; fi\n'
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setenv("FAKE", str(folder))
    monkeypatch.setenv("MEET", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{HERE / 'fakes'}:/usr/bin:/bin")
    return Fake(folder, str(python))
