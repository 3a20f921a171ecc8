"""Faults at random in a run of two processes, one after the other: it recovers from each by itself, with the same bits.

`pytest -m soak -n 0 -s` has a hundred, in some forty minutes; JTRAIN_SOAK_FAULTS and JTRAIN_SOAK_SEED change it, and
JTRAIN_SOAK_REPORT names a file for the figures as JSON.
"""

import json
import os
from pathlib import Path

import pytest

from jtrain.train.row_ledger import read_ledger
from tests.faults.runs import codes, events, said, start
from tests.faults.soak import Soak, small_disk, soak_config
from tests.parity.test_kill import result


def lines_of(found):
    return {(line["step"], line["split"]): line for line in found["lines"]}


def counters(found):
    """Without what a run that was asked to leave owes to its next start."""
    return {name: count for name, count in found["counters"].items() if name != "owes_evaluation"}


def soak(folder, faults, seed):
    """Runs it, compares it with a run that nothing happened to, and returns the figures."""
    run = Soak(folder, seed)
    with small_disk(run.disk):
        kinds = run.kinds(faults)
        run.start()
        try:
            assert run.wait(lambda: run.is_well(0, 0.0)), run.said.read_text()[-4000:]
            for number, kind in enumerate(kinds, 1):
                found = run.fault(kind)
                seconds = "NOT RECOVERED" if found.seconds is None else f"{found.seconds:.1f} s"
                print(f"{number}/{faults} step {run.tail()[2]}: {found.what}: {seconds}", flush=True)
            assert run.end() == 64, run.said.read_text()[-4000:]
        finally:
            run.close()
        assert run.left_behind() == []
        whole = folder / "whole"
        (whole / "ledger").mkdir(parents=True)
        ours = result(run.config)
        config = soak_config(whole, max_steps=ours["step"])
        running = start(config, "whole", SLOW="0", LEDGER=str(whole / "ledger"))
        assert codes(running, 1500) == [0, 0], said(running)
        reference = result(config)
        assert ours["bits"] == reference["bits"] and counters(ours) == counters(reference)
        mine, theirs = lines_of(ours), lines_of(reference)
        assert all(theirs[key] == line for key, line in mine.items())
        read, wrong = read_ledger(run.ledger)
        expected, none_wrong = read_ledger(whole / "ledger")
        assert not wrong and not none_wrong
        assert [row[:3] for row in read] == [row[:3] for row in expected]
        assert [row.step for row in read] == list(range(1, ours["step"] + 1))
        report = run.report() | {"steps": ours["step"], "lines_missing": len(theirs.keys() - mine.keys())}
        report["quarantined"] = len(events(run.config, "corrupt"))
    return report


def check(report, path=None):
    print(json.dumps(report, indent=2))
    if path:
        Path(path).write_text(json.dumps(report, indent=2) + "\n")
    assert report["recovered"] == report["faults"], report["failed"]


@pytest.mark.faults
@pytest.mark.timeout(580)
def test_three_faults_at_random_change_no_bit_and_no_row(tmp_path):
    check(soak(tmp_path, 3, seed=1))


@pytest.mark.faults
def test_t1_a_stop_file_ends_a_supervised_run_for_good(tmp_path):
    run = Soak(tmp_path, seed=0)
    run.start()
    try:
        assert run.wait(lambda: run.is_well(0, 0.0)), run.said.read_text()[-4000:]
        assert run.end() == 64, run.said.read_text()[-4000:]
    finally:
        run.close()
    text = run.said.read_text()
    assert "exit 10: preempted" in text and f"{run.config['run_dir']}/STOP is there: the run was asked to stop" in text
    assert "it would end the same way again: exit 64 after 2 attempts" in text
    assert events(run.config, "preempted")[-1]["step"] == run.newest()
    assert run.left_behind() == []


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_a_hundred_faults_at_random_change_no_bit_and_no_row(tmp_path, monkeypatch):
    asked = {name: os.environ.get(f"JTRAIN_SOAK_{name}") for name in ("FAULTS", "SEED", "REPORT")}
    for name in asked:  # to a run they would be fields of its config
        monkeypatch.delenv(f"JTRAIN_SOAK_{name}", raising=False)
    check(soak(tmp_path, int(asked["FAULTS"] or 100), int(asked["SEED"] or 0)), asked["REPORT"])
