"""One answer on every mesh: dropout on, uneven masks, a mixture, float32."""

import numpy as np
import pytest

from jtrain import PretrainTrainer
from tests.parity.runs import bits, settings, write_corpus

MESHES = {
    "fsdp8": {"devices": 8, "mesh": {"data": 1, "fsdp": 8}, "gradient_accumulation_steps": 1},
    "data2.fsdp2.tensor2": {"devices": 8, "mesh": {"data": 2, "fsdp": 2, "tensor": 2}},
    "two slices": {"devices": 8, "mesh": {"data": 4, "tensor": 2, "slices": 2}},
    "accumulation4": {"gradient_accumulation_steps": 4},
}
MORE = {
    "data8": {"devices": 8, "gradient_accumulation_steps": 1},
    "tensor4": {"devices": 4, "mesh": {"data": 1, "tensor": 4}, "gradient_accumulation_steps": 1},
    "accumulation1": {"gradient_accumulation_steps": 1},
    "fsdp4.tensor2": {"devices": 8, "mesh": {"data": 1, "fsdp": 4, "tensor": 2}},
    "zero1": {"devices": 4, "strategy": "zero1", "mesh": {}},
    "zero2": {"devices": 4, "strategy": "zero2", "mesh": {}},
    "odd vocabulary, fsdp2.tensor4": {"devices": 8, "mesh": {"data": 1, "fsdp": 2, "tensor": 4}},
    "remat full": {"model": {"remat": "full"}},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory):
    """One device, two micro-batches: initial parameters and the lines of 20 steps."""
    return run(corpus, tmp_path_factory.mktemp("reference"))


def run(corpus, folder, **changes):
    config = settings(corpus, folder / "run", checkpoint={"save_steps": 0}, **changes)
    trainer = PretrainTrainer(config)
    initial = bits(trainer.state.params)
    trainer.fit()
    return initial, trainer.history.train


def check(found, expected):
    (initial, lines), (expected_initial, expected_lines) = found, expected
    assert initial == expected_initial  # the same bits, whatever the mesh
    for name, tolerance in (("loss", 1e-6), ("grad_norm", 1e-6)):
        np.testing.assert_allclose(lines[0][name], expected_lines[0][name], rtol=tolerance)
    np.testing.assert_allclose(lines[-1]["loss"], expected_lines[-1]["loss"], rtol=1e-5)
    assert [line["tokens"] for line in lines] == [line["tokens"] for line in expected_lines]


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_changes_nothing(name, corpus, reference, tmp_path):
    check(run(corpus, tmp_path, **MESHES[name]), reference)


@pytest.mark.grid
@pytest.mark.parametrize("name", MORE)
def test_further_meshes_change_nothing(name, corpus, reference, tmp_path):
    check(run(corpus, tmp_path, **MORE[name]), reference)


def test_the_reference_learns(reference):
    lines = reference[1]
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]
