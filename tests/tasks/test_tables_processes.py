"""Tables of a reference or a teacher in a run of two processes whose cache folders differ."""

import json
import shutil
import socket

import pytest

from jtrain.observe.metrics import read_metrics
from tests.parity.launch import start, wait_all

from .preferences import GOLDENS, RUNS, settings, trained, word_model

ROWS = {"dpo": RUNS["pairs"], "distill": json.loads((GOLDENS / "distillation.json").read_text())["rows"]}


@pytest.mark.grid
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("task", "section", "name"),
    [
        ("dpo", {"precompute_ref_log_probs": True, "ref_model": "other"}, "reference"),
        ("distill", {"precompute_teacher": True, "top_k": 5, "teacher": "other"}, "teacher"),
    ],
)
def test_a_table_that_only_process_0_has_is_no_reason_to_wait_for_ever(tmp_path, task, section, name):
    word_model(tmp_path / "model")
    word_model(tmp_path / "other", "llama" if task == "dpo" else "qwen2")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[task]))
    section = {key: str(tmp_path / "other") if value == "other" else value for key, value in section.items()}
    config = settings(tmp_path, task, max_steps=2, **{task: section}, data={"train": str(file)})
    alone = trained(config)
    shutil.copytree(tmp_path / "cache", tmp_path / "second", ignore=shutil.ignore_patterns(name))
    assert (tmp_path / "cache" / name).is_dir() and not (tmp_path / "second" / name).exists()
    together = config | {"run_dir": str(tmp_path / "together"), "devices": 2}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    runs = []
    for number, folder in enumerate(("cache", "second")):
        own = together | {"data": config["data"] | {"cache_dir": str(tmp_path / folder)}}
        joins = {"coordinator_address": address, "num_processes": 2, "process_id": number}
        runs.append(start(own | {"distributed": joins}, f"process{number}"))
    assert wait_all(runs) == [0, 0], "".join(one.err for one in runs)
    losses = [line["loss"] for line in read_metrics(together["run_dir"], "train")]
    assert losses == pytest.approx([line["loss"] for line in alone.history.train], rel=1e-4)
