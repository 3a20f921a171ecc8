import pytest
from checkpoint_states import abstract, make_mesh, make_state, numpy_params, same_bits

from jtrain.checkpoint import Checkpoints, load_parameters
from jtrain.checkpoint.parameters import load_variables
from jtrain.errors import CheckpointError


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step, make_mesh(1, 4, 2)), {})
    return folder


@pytest.mark.parametrize(("below", "step"), [("", 2), ("checkpoints", 2), ("checkpoints/1", 1)])
def test_a_run_its_checkpoints_or_one_step_give_parameters_on_another_mesh(source, mesh, below, step):
    wanted = abstract(make_state(0, mesh)["params"])
    params = load_parameters(source / below, wanted)
    assert same_bits(params, numpy_params(step))
    assert params["w"].sharding == wanted["w"].sharding


def test_another_shape_is_refused_by_name(source, mesh):
    wanted = abstract(make_state(0, mesh)["params"])
    with pytest.raises(CheckpointError, match="params/w: in the checkpoint only") as caught:
        load_parameters(source, {"b": wanted["b"]})
    assert "config.yaml" in caught.value.remedy and "init_from" not in caught.value.remedy


@pytest.mark.parametrize("path", ["run", "run/checkpoints/1", "~/run"])
def test_a_path_may_be_relative_or_start_at_home(source, mesh, path, tmp_path, monkeypatch):
    (tmp_path / "run").symlink_to(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    params = load_parameters(path, abstract(make_state(0, mesh)["params"]))
    assert same_bits(params, numpy_params(1 if path.endswith("1") else 2))


def test_a_damaged_newest_step_is_passed_over_and_left_where_it_is(source, mesh):
    meta = source / "checkpoints" / "2" / "meta" / "metadata"
    whole = meta.read_bytes()
    meta.write_bytes(whole + b" ")
    try:
        params = load_parameters(source, abstract(make_state(0, mesh)["params"]))
    finally:
        meta.write_bytes(whole)
    assert same_bits(params, numpy_params(1))


def test_a_folder_without_checkpoints_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="holds no finished checkpoint"):
        load_parameters(tmp_path, {})


def test_what_a_model_keeps_beside_parameters_is_taken_where_both_have_it(source, mesh):
    fresh = make_state(0, mesh)["params"]
    # The helper's parameters stand for variables here: one that fits, one of another shape, one that is new.
    asked = {"w": fresh["w"], "b": fresh["b"][:2], "new": fresh["b"]}
    found = load_variables(source, asked, prefix="params")
    assert same_bits(found["w"], numpy_params(2)["w"]) and found["w"].sharding == fresh["w"].sharding
    assert found["b"] is asked["b"] and found["new"] is asked["new"]
    assert load_variables(source / "nowhere", {}) == {}
