"""Programs on PATH that stand for those of a cluster, and a python that runs a script in place of a training."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from jtrain.cli.main import main

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(autouse=True)
def quick_flags(monkeypatch):
    """Flags without tyro, which checks each of them once more and takes most of the time of these tests."""
    from jtrain.config import flags, load

    monkeypatch.setattr(flags, "parse", lambda given, weaker: load.build(flags.to_layer(given).over(weaker)))


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
        """What a worker does in place of `jtrain train`: Python, with the words of workers.py."""
        (self.folder / "script.py").write_text(script)

    def runs_shell(self, script):
        """The same as a shell script, which starts in no time; it knows $attempt and $rank, and `meet`."""
        (self.folder / "script.sh").write_text(
            "attempt=$JTRAIN_ATTEMPT rank=${JTRAIN_DISTRIBUTED__PROCESS_ID:-0}\n"
            'meet() { touch "$MEET/$attempt.$rank"; until [ "$(ls "$MEET" | grep -c "^$attempt[.]")" = 2 ]; '
            "do sleep 0.01; done; }\n" + script
        )


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Fakes of gcloud, sbatch and kubectl; `python` runs the script in place of a training."""
    folder = tmp_path / "fake"
    folder.mkdir()
    python = folder / "python"
    python.write_text(
        "#!/bin/bash\n"
        f'if [ "$2" = jtrain ]; then echo "$@" >> {folder}/trained; '
        f"[ -f {folder}/script.sh ] && exec bash {folder}/script.sh; "
        f'exec {sys.executable} {HERE}/workers.py "$(cat {folder}/script.py)"; fi\n'
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setenv("FAKE", str(folder))
    monkeypatch.setenv("MEET", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (folder / "bin").mkdir()
    python3 = folder / "bin" / "python3"  # what the fakes run with
    python3.write_text(f'#!/bin/bash\nexec {shlex.quote(sys.executable)} "$@"\n')
    python3.chmod(0o755)
    monkeypatch.setenv("PATH", f"{HERE / 'fakes'}:{folder / 'bin'}:/usr/bin:/bin")
    return Fake(folder, str(python))
