"""Models on a mesh of their own: where they lie, and that a run's numbers do not mind."""

import json
import shutil

import jax
import numpy as np
import pytest

from jtrain import Callback
from jtrain.config.load import load_config
from jtrain.errors import ConfigError
from jtrain.observe.metrics import read_metrics
from jtrain.parallel.mesh import make_mesh
from jtrain.tasks.dpo import DPOTrainer
from jtrain.tasks.prepared import sequence_logps
from jtrain.tasks.roles import described, load_role, role_mesh, row_multiple
from tests.parity.launch import start_several, wait_all
from tests.parity.runs import bits

from .preferences import FIGURES, RUNS, settings, trained, word_model

PAIRS = RUNS["pairs"]
MOVING = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.25}
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


def test_a_model_on_a_mesh_of_its_own_has_its_shards_there_and_the_numbers_that_it_has_anywhere(place):
    found = {}
    for role in ("", "fsdp=2,tensor=2", "devices=4,fsdp=2,tensor=2"):
        own = "devices" in role
        mesh = "fsdp=4" if own else "fsdp=4,data=2"
        config = settings(place, "dpo", devices=8, mesh=mesh, global_batch_size=8, roles={"reference": role or None})
        trainer = DPOTrainer(config, train_dataset=[*PAIRS, *PAIRS])
        model = load_role(
            trainer.config,
            "reference",
            str(place / "other"),
            trainer.program,
            shape=trainer.decoder,
            tokenizer=trainer.tokenizer,
        )
        kernel = model.params["layers"]["mlp"]["gate_proj"]["kernel"]
        ways = {axis: size for axis, size in kernel.sharding.mesh.shape.items() if size > 1}
        if role:
            assert (ways["fsdp"], ways["tensor"]) == (2, 2)
            assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 16, kernel.shape[2] // 2)}
        ids = {shard.device.id for leaf in jax.tree.leaves(model.params) for shard in leaf.addressable_shards}
        assert ids == set(range(4, 8) if own else range(8))
        with trainer.train_loader() as loader:
            scores = model.jit(sequence_logps(trainer.preference))(loader[0])
        for x in scores.values():
            assert x.sharding.mesh == trainer.mesh and x.shape == (1, 8)
        found[role] = [np.asarray(x) for x in scores.values()]
    for other in list(found.values())[1:]:
        np.testing.assert_allclose(other, found[""], rtol=1e-6)


def test_a_batch_that_a_role_can_not_divide_is_refused_before_anything_is_compiled(place):
    config = settings(place, "dpo", devices=8, mesh="tensor=2,pipeline=2,data=2", roles={"reference": "fsdp=8"})
    with pytest.raises(ConfigError, match="fsdp=8 divides rows 8 ways, and a micro-batch has 4"):
        DPOTrainer(config, train_dataset=PAIRS)
    with pytest.raises(ConfigError, match="fsdp=8 divides rows 8 ways, and a micro-batch has 4"):
        DPOTrainer(config | {"devices": "auto"}, train_dataset=PAIRS)


ONE = {"devices": 4, "mesh": "fsdp=2,tensor=2"}
OWN = {"devices": 8, "mesh": "fsdp=2,tensor=2", "roles": {"reference": "devices=4,tensor=4"}}
LAYOUTS = {
    "another layout": ONE | {"roles": {"reference": "fsdp=4"}},
    "devices of its own": OWN,
    "a pipeline beside": {
        "devices": 8,
        "mesh": "fsdp=2,tensor=2,pipeline=2",
        "roles": {"reference": "fsdp=4,tensor=2"},
    },
}


@grid
@pytest.mark.parametrize("other", [False, True], ids=["copy", "other model"])
def test_a_run_does_not_mind_where_its_reference_lies(place, other):
    section, lines = {"ref_model": str(place / "other")} if other else {}, {}
    # A policy that is its reference has rewards of 0, which are larger or smaller by rounding.
    figures = ["loss", *(name for name in FIGURES if other or name != "rewards/accuracies")]
    for name, layout in {"one mesh": ONE, **LAYOUTS}.items():
        config = settings(place, "dpo", dpo=section, max_steps=3, **layout) | {"run_dir": str(place / name)}
        trainer = trained(config, PAIRS, eval_dataset=PAIRS[:3])  # three rows: filled up for both meshes
        lines[name] = [line[figure] for line in trainer.history.train for figure in figures]
        lines[name].append(trainer.history.eval[-1]["eval_loss"])
    for name in LAYOUTS:
        # A pipeline adds in another order.
        tolerance = 2e-5 if "pipeline" in name else 1e-6
        np.testing.assert_allclose(lines[name], lines["one mesh"], rtol=tolerance, atol=2e-6)


@grid
def test_a_table_is_made_on_the_mesh_of_the_role(place):
    tables = []
    for layout in (ONE, OWN):
        section = {"precompute_ref_log_probs": True}
        config = settings(place, "dpo", dpo=section, **layout) | {"run_dir": str(place / str(len(tables)))}
        trainer = trained(config, PAIRS)
        tables.append(trainer.train_rows.table["ref_chosen_logps"])
        shutil.rmtree(place / "cache/reference")
    np.testing.assert_allclose(tables[0], tables[1], rtol=1e-6)


class _Stop(Callback):
    def on_step_end(self, trainer, step, values):
        if step == 2:
            trainer.request_stop("the test says so")


@grid
def test_a_run_with_a_role_resumes_with_the_same_bits_and_may_change_its_mesh(place):
    config = settings(place, "dpo", max_steps=4, **OWN)
    whole = trained(config, PAIRS)
    first = config | {"run_dir": str(place / "b")}
    trained(first, PAIRS, callbacks=[_Stop()])
    shutil.copytree(place / "b", place / "c")
    resumed = trained(first, PAIRS)
    losses = {line["step"]: line["loss"] for line in whole.history.train}
    assert resumed.history.train and all(line["loss"] == losses[line["step"]] for line in resumed.history.train)
    assert bits(resumed.state) == bits(whole.state)
    moved = trained(config | {"run_dir": str(place / "c"), "roles": {"reference": "devices=4,fsdp=2"}}, PAIRS)
    assert all(line["loss"] == pytest.approx(losses[line["step"]], rel=1e-6) for line in moved.history.train)


@grid
def test_a_role_has_another_layout_over_several_processes_as_well_and_devices_of_its_own_only_in_one(place):
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    config = settings(place, "dpo", max_steps=3, devices=4, mesh="fsdp=4", roles={"reference": "fsdp=2,tensor=2"})
    config["data"] |= {"train": [str(place / "pairs.jsonl")]}
    config["dpo"] = MOVING
    whole = {line["step"]: line["loss"] for line in trained(config | {"run_dir": str(place / "one")}).history.train}
    running = start_several(config, "process", [("none", 0)] * 2)
    assert wait_all(running) == [0, 0], "".join(one.err for one in running)
    losses = {line["step"]: line["loss"] for line in read_metrics(config["run_dir"], "train")}
    assert losses == pytest.approx(whole, rel=1e-6) and len(losses) == 3
    running = start_several(config | {"roles": {"reference": "devices=2"}, "mesh": "fsdp=2"}, "own", [("none", 0)] * 2)
    assert wait_all(running) == [64, 64]
    assert "roles.reference.devices: 2 with distributed.num_processes: 2" in running[0].err
