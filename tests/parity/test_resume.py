"""Resume equals never having stopped: parameters, optimizer, figures and rows, in every bit."""

import numpy as np
import pytest

from tests.parity.runs import STEPS, bits, figures, settings, train, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.fixture(scope="module")
def uninterrupted(corpus, whole):
    trainer, ledger = train(settings(corpus, whole))
    assert trainer.epoch > 1.0  # an epoch ends inside the run
    return bits(trainer.state), figures(trainer), ledger.rows


def check_resume(k, corpus, uninterrupted, folder):
    state, lines, rows = uninterrupted
    config = settings(corpus, folder / "run")
    first, before = train(config, stop_at=k)
    assert first.counters.step == k
    second, after = train(config)
    assert second.counters.step == STEPS
    assert bits(second.state) == state
    assert figures(first) | figures(second) == lines
    assert min(figures(second)) == k + 1
    used = {step: before.rows[step] for step in range(1, k + 1)} | {s: after.rows[s] for s in range(k + 1, STEPS + 1)}
    assert used == {step: rows[step] for step in range(1, STEPS + 1)}


@pytest.mark.parametrize("k", (1, 6, 11))
def test_stopping_at_k_and_resuming_equals_the_uninterrupted_run(k, corpus, uninterrupted, tmp_path):
    check_resume(k, corpus, uninterrupted, tmp_path)


@pytest.mark.grid
@pytest.mark.parametrize("k", (2, 3, 4, 5, 7, 8, 9, 10, *range(12, STEPS)))
def test_so_does_every_other_k(k, corpus, uninterrupted, tmp_path):
    check_resume(k, corpus, uninterrupted, tmp_path)


def test_eight_then_four_then_one_device_use_the_same_rows_and_reach_the_same_loss(corpus, uninterrupted, tmp_path):
    _, lines, rows = uninterrupted
    run_dir = tmp_path / "run"
    used, losses = {}, {}
    for devices, mesh, stop in (
        (8, {"data": 2, "fsdp": 2, "tensor": 2}, 4),
        (4, {"fsdp": 4, "data": 1}, 8),
        (1, {}, None),
    ):
        accumulation = 1 if devices == 4 else 2
        config = settings(corpus, run_dir, devices=devices, mesh=mesh, gradient_accumulation_steps=accumulation)
        trainer, ledger = train(config, stop_at=stop)
        losses |= {line["step"]: line["loss"] for line in trainer.history.train}
        used |= {step: row for step, row in ledger.rows.items() if step <= trainer.counters.step}
    assert used == {step: rows[step] for step in range(1, STEPS + 1)}
    np.testing.assert_allclose([losses[k] for k in lines], [lines[k][0] for k in lines], rtol=1e-5)


def test_a_finished_run_is_left_alone(corpus, whole, uninterrupted):
    again, ledger = train(settings(corpus, whole))
    assert again.history.train == [] and again.counters.step == STEPS and ledger.rows == {}
    assert bits(again.state) == uninterrupted[0]
