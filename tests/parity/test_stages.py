"""Whole runs over stages: what is stored knows nothing of them, and a run goes on over any other number."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jtrain import PretrainTrainer
from tests.parity.runs import STEPS, figures, settings, train, write_corpus

LAYERS = 5  # no number of stages here divides it

MESHES = [
    {"devices": 2, "mesh": {"data": 1, "pipeline": 2}, "pipeline": {"virtual_stages": 2, "microbatches": 4}},
    {"devices": 4, "mesh": {"data": 1, "pipeline": 4}, "pipeline": {"microbatches": 2}},
    {"devices": 4, "mesh": {"data": 2, "tensor": 2}},
    {"devices": 4, "mesh": {"data": 1, "pipeline": 2, "fsdp": 2}, "pipeline": {"residuals": "save"}},
]
STOPS = [3, 6, 9, None]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def run(corpus, folder, **changes):
    model = {"num_hidden_layers": LAYERS} | changes.pop("model", {})
    return settings(corpus, folder / "run", model=model, data={"eval": 0.2}, **changes)


@pytest.mark.parametrize("legs", ["out of a pipeline", pytest.param("all", marks=pytest.mark.grid)])
def test_a_run_goes_on_over_other_stages_and_without_them(corpus, legs, tmp_path):
    alone, ledger = train(run(corpus, tmp_path / "alone"))
    lines, rows = {}, {}
    chosen = list(zip(MESHES, STOPS, strict=True)) if legs == "all" else [(MESHES[0], 6), ({}, None)]
    for mesh, stop in chosen:
        trainer, used = train(run(corpus, tmp_path, **mesh), stop)
        lines |= figures(trainer)
        rows |= {step: row for step, row in used.rows.items() if step <= trainer.counters.step}
        stored = trainer.state.params["layers"]["mlp"]["up_proj"]["kernel"]
        assert stored.shape[0] == LAYERS  # never padded
    assert rows == {step: ledger.rows[step] for step in range(1, STEPS + 1)}
    expected = figures(alone)
    np.testing.assert_allclose([lines[k][0] for k in expected], [expected[k][0] for k in expected], rtol=1e-5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(alone.evaluate()["eval_loss"], rel=1e-5)


def test_a_stage_stores_its_own_layers_only(corpus, tmp_path):
    mesh = {"devices": 4, "mesh": {"data": 1, "pipeline": 4}, "pipeline": {"microbatches": 2}}
    trainer = PretrainTrainer(run(corpus, tmp_path, model={"num_hidden_layers": 4}, **mesh))
    for path, array in jax.tree_util.tree_leaves_with_path((trainer.state.params, trainer.state.opt_state)):
        if "['layers']" in jax.tree_util.keystr(path):
            assert array.sharding.shard_shape(array.shape)[0] == 1
