"""The notebook's cells, run in a kernel of their own as a reader would, with a few steps in place of many."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import jtrain
from jtrain.observe.metrics import read_events, read_metrics

NOTEBOOK = Path(__file__).parents[1] / "colab" / "quickstart.ipynb"


def run(folder, **form):
    """Executes the notebook in `folder` with these values of its form fields; returns what it printed."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for name, value in form.items():
        pattern, changed = rf"^{name} = \S+(?=  # ?@param)", 0
        for cell in notebook.cells:
            cell.source, count = re.subn(pattern, f"{name} = {value!r}", cell.source, flags=re.MULTILINE)
            changed += count
        assert changed == 1, f"{name} is not a form field"
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.get("text", "") for output in outputs)


@pytest.fixture
def plain_environment(monkeypatch, tmp_path):
    """As in a fresh kernel: nobody has made CPU devices beforehand."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("JTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    packages = str(Path(jtrain.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([packages, os.environ.get("PYTHONPATH", "")]))


def test_the_notebook_trains_stops_and_resumes(tmp_path, plain_environment, monkeypatch):
    smaller = {"MODEL__NUM_HIDDEN_LAYERS": "1", "EVAL__MAX_BATCHES": "2", "EVAL__SAMPLE_TOKENS": "2"}
    for name, value in smaller.items():
        monkeypatch.setenv(f"JTRAIN_{name}", value)
    printed = run(tmp_path, DATA=1, FSDP=2, TENSOR=1, STEPS=4)
    assert "went on at step" in printed and "bits per byte" in printed
    folder = tmp_path / "runs" / "quickstart"
    (resumed,) = read_events(folder, "resume")
    # Asked to stop at step 2, it finishes the update in flight.
    assert 2 <= resumed["step"] < 4
    assert [line["step"] for line in read_metrics(folder, "eval")] == [resumed["step"], 4]


@pytest.mark.notebooks
def test_the_notebook_in_full_learns(tmp_path, plain_environment):
    run(tmp_path)
    folder = tmp_path / "runs" / "quickstart"
    # 4.75 bits per byte is what the frequencies of single bytes give.
    assert read_metrics(folder, "eval")[-1]["bits_per_byte"] < 3.5
