"""Models on a mesh of their own: where they lie, and that a run's numbers do not mind."""

import jax
import pytest

from jtrain.config.load import load_config
from jtrain.parallel.mesh import make_mesh
from jtrain.tasks.roles import described, role_mesh, row_multiple

from .preferences import RUNS, word_model

PAIRS = RUNS["pairs"]
grid = pytest.mark.grid


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    word_model(folder / "model")
    word_model(folder / "other", "llama31-ropescaled")
    return folder


@pytest.fixture
def place(models, tmp_path):
    """A folder for a run, with the models in it."""
    for name in ("model", "other"):
        (tmp_path / name).symlink_to(models / name)
    return tmp_path


@pytest.mark.parametrize(
    ("section", "shape", "ids", "line"),
    [
        ({}, {"fsdp": 8}, range(8), []),
        ({"fsdp": 2, "tensor": 4}, {"fsdp": 2, "tensor": 4}, range(8), ["reference on fsdp=2 tensor=4"]),
        ({"data": 4, "expert": 2}, {"data": 4, "expert": 2}, range(8), ["reference on data=4 expert=2"]),
        (
            {"devices": 4, "tensor": 2},
            {"data": 2, "tensor": 2},
            range(4, 8),
            ["reference on data=2 tensor=2 of its own (devices 4 to 7)"],
        ),
    ],
)
def test_a_role_lies_where_its_section_says(section, shape, ids, line):
    config = load_config({"task": "dpo", "mesh": "fsdp=-1,data=1", "roles": {"reference": section}}, env={})
    policy = make_mesh(config.mesh, devices=jax.devices()[: min(8, ids[0] or 8)])
    mesh = role_mesh(config, "reference", policy)
    assert {axis: size for axis, size in mesh.shape.items() if size > 1} == shape
    assert [device.id for device in mesh.devices.flat] == list(ids)
    assert described(config, policy) == line
    assert (mesh is policy) == (not section)
    assert row_multiple(config, policy) == 8 // (1 if ids[0] == 0 else 2)
