"""Batch, mesh and length arithmetic, against numbers worked out by hand."""

import pytest

from jtrain.config import load_config
from jtrain.config.mesh_rules import data_ranks, resolve_mesh
from jtrain.config.rules import apply_strategy, resolve_batch, resolve_steps
from jtrain.config.schema import Config, MeshConfig
from jtrain.errors import ConfigError


def config(**fields) -> Config:
    return load_config(fields, (), {})


def refused(**fields) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**fields)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "ranks", "expected"),
    [
        ({}, 8, (32, 4, 1)),
        ({"global_batch_size": 64}, 8, (64, 8, 1)),
        ({"per_device_batch_size": 3}, 8, (24, 3, 1)),
        ({"gradient_accumulation_steps": 2}, 8, (32, 2, 2)),
        ({"global_batch_size": 64, "per_device_batch_size": 2}, 8, (64, 2, 4)),
        ({"global_batch_size": 64, "gradient_accumulation_steps": 4}, 8, (64, 2, 4)),
        ({"per_device_batch_size": 2, "gradient_accumulation_steps": 4}, 8, (64, 2, 4)),
        ({"global_batch_size": 64, "per_device_batch_size": 2, "gradient_accumulation_steps": 4}, 8, (64, 2, 4)),
    ],
)
def test_two_of_the_three_batch_numbers_give_the_third(fields, ranks, expected):
    assert tuple(resolve_batch(config(**fields), ranks)) == expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"global_batch_size": 30}, ["30 / (8 data ranks x 1", "= 3.75", "24 or 32"]),
        ({"global_batch_size": 5}, ["global_batch_size: 8."]),
        ({"global_batch_size": 64, "per_device_batch_size": 3}, ["64 / (8 data ranks x 3", "48 or 72"]),
        (
            {"global_batch_size": 64, "per_device_batch_size": 4, "gradient_accumulation_steps": 4},
            ["64 is not 4", "x 8 data ranks x 4", "= 128"],
        ),
    ],
)
def test_a_batch_that_does_not_divide_shows_the_arithmetic_and_the_nearest(fields, words):
    message = refused(devices=8, **fields)
    assert all(word in message for word in words), message


def test_a_batch_that_divides_nowhere_is_refused_before_the_devices_are_known():
    assert "28 or 32" in refused(global_batch_size=30, gradient_accumulation_steps=4)
    assert "24 or 36" in refused(global_batch_size=30, gradient_accumulation_steps=4, per_device_batch_size=3)


def test_tensor_does_not_divide_rows():
    mesh = resolve_mesh(MeshConfig(fsdp=2, tensor=2), 8)
    assert mesh == {"data": 2, "fsdp": 2, "pipeline": 1, "context": 1, "tensor": 2, "expert": 1}
    assert list(mesh) == ["data", "fsdp", "pipeline", "context", "tensor", "expert"]
    assert data_ranks(mesh) == 4


def test_one_axis_takes_what_is_left():
    assert resolve_mesh(MeshConfig(data=1, fsdp=-1, tensor=2), 8)["fsdp"] == 4
    assert resolve_mesh(config(mesh="tensor=4").mesh, 4)["data"] == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mesh": "fsdp=-1"}, ["data=-1 and fsdp=-1", "give data or fsdp a number"]),
        ({"mesh": "fsdp=0"}, ["mesh.fsdp: 0"]),
        ({"mesh": "fsdp=-2"}, ["mesh.fsdp: -2"]),
        ({"mesh": "data=1,fsdp=3", "devices": 8}, ["data 1 x fsdp 3 = 3 is not 8 devices", "fsdp=4", "devices: 3"]),
        ({"mesh": "tensor=3", "devices": 8}, ["tensor 3 = 3 does not divide 8 devices", "data=2,tensor=4"]),
        ({"mesh": "data=1,fsdp=8,slices=3", "devices": 8}, ["mesh.slices: 3"]),
    ],
)
def test_a_mesh_that_can_not_be_is_refused(fields, words):
    message = refused(**fields)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"mesh": "context=8", "max_length": 1000},
            ["max_length: 1000 / 2 x 8 mesh.context = 16 chunks = 62.5", "992 or 1008, or context.layout: contiguous."],
        ),
        ({"mesh": "context=8", "max_length": 12}, ["12 / 2 x 8 mesh.context = 16 chunks = 0.75", "max_length: 16."]),
        (
            {"mesh": "context=8", "max_length": 1001, "context": {"layout": "contiguous"}},
            ["max_length: 1001 / 8 mesh.context = 125.1", "1000 or 1008."],
        ),
        (
            {"mesh": "context=4", "max_length": 30, "context": {"method": "ulysses"}},
            ["30 / 4 mesh.context = 7.5", "28 or 32"],
        ),
        ({"mesh": "data=1,context=-1", "devices": 8, "max_length": 24}, ["24 / 2 x 8 mesh.context", "16 or 32"]),
        (
            {"mesh": "context=2", "context": {"method": "ring"}, "model": {"attention": "splash"}},
            ["model.attention: splash with context.method: ring", "whole rows", "context.method: ulysses"],
        ),
    ],
)
def test_rows_that_a_context_can_not_divide_are_refused_with_the_nearest_that_it_can(fields, words):
    message = refused(**fields)
    assert all(word in message for word in words), message


def test_a_context_divides_rows_and_leaves_the_batch_whole():
    assert config(mesh="context=8", max_length=1008).mesh.context == 8
    assert config(mesh="context=8", max_length=1000, context={"layout": "contiguous"}).max_length == 1000
    assert config(mesh="context=4", max_length=28, context={"method": "ulysses"}).max_length == 28
    assert data_ranks(resolve_mesh(MeshConfig(context=4), 8)) == 2


def test_the_nearest_meshes_are_legal():
    message = refused(mesh="data=3,fsdp=3,tensor=3", devices=24)
    suggested = message.split("mesh: ")[-1].split("; or devices")[0].split(", or ")
    assert len(suggested) == 3
    for mesh in suggested:
        assert resolve_mesh(config(mesh=mesh).mesh, 24)


def test_the_nearest_meshes_keep_the_axes_that_were_asked_for():
    assert "mesh: context=8, or " in refused(mesh="data=1,context=6", devices=8)
    assert "pipeline=4,tensor=2" in refused(mesh="data=1,pipeline=3,tensor=2", devices=8)


def test_slices_are_spanned_by_data_or_fsdp():
    assert resolve_mesh(config(mesh="fsdp=4,slices=2").mesh, 8)["data"] == 2
    assert resolve_mesh(config(mesh="data=1,fsdp=8,slices=2").mesh, 8)["fsdp"] == 8


@pytest.mark.parametrize(
    ("strategy", "data", "fsdp", "optimizer_axes", "gradient_axes"),
    [
        ("ddp", -1, 1, (), ()),
        ("zero1", -1, 1, ("data",), ()),
        ("zero2", -1, 1, ("data",), ("data",)),
        ("zero3", 1, -1, (), ()),
        ("fsdp", 1, -1, (), ()),
    ],
)
def test_a_strategy_stands_for_a_mesh_and_sharding(strategy, data, fsdp, optimizer_axes, gradient_axes):
    made = config(strategy=strategy)
    assert (made.mesh.data, made.mesh.fsdp) == (data, fsdp)
    assert (made.sharding.optimizer_axes, made.sharding.gradient_axes) == (optimizer_axes, gradient_axes)
    assert apply_strategy(made) == made


def test_a_strategy_beside_another_mesh_or_sharding_is_refused():
    assert "mesh is data=-1,tensor=2" in refused(strategy="zero3", mesh="tensor=2")
    assert "sharding.optimizer_axes" in refused(strategy="zero1", sharding={"optimizer_axes": ["fsdp"]})
    assert config(strategy="zero3", mesh={"data": 1, "fsdp": -1}).mesh.fsdp == -1
    assert config(strategy="ddp", mesh={"slices": 2}).mesh.slices == 2


@pytest.mark.parametrize(
    ("duration", "known", "steps"),
    [
        (100, {}, 100),
        (0.1, {"total": 30}, 3),  # in floats 0.1 * 30 = 3.0000000000000004, whose ceiling is 4
        (0.05, {"total": 300}, 15),
        (0.05, {"total": 301}, 16),
        ("5%", {"total": 30}, 2),
        ("12.5%", {"total": 8}, 1),
        ("2 epochs", {"steps_per_epoch": 7.5}, 15),
        ("1.5 epochs", {"steps_per_epoch": 5}, 8),
        ("1e9 tokens", {"tokens_per_step": 2**20}, 954),  # 953.67...
        ("4096 tokens", {"tokens_per_step": 2048}, 2),
        (0, {}, 0),
    ],
)
def test_a_length_in_steps_is_rounded_up(duration, known, steps):
    assert resolve_steps(duration, **known) == steps


@pytest.mark.parametrize("duration", [0.5, "5%", "2 epochs", "5 tokens"])
def test_a_length_needs_what_it_counts_in(duration):
    with pytest.raises(ConfigError, match="not known here"):
        resolve_steps(duration)


def test_the_length_of_a_run_is_given_once():
    assert "num_train_epochs: 2" in refused(max_steps=5, num_train_epochs=2)
    assert config().num_train_epochs == 1
    assert config(max_steps=5).num_train_epochs is None
    for useless in (0, 0.5, "50%", "0 epochs"):
        assert f"max_steps: {useless}" in refused(max_steps=useless)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"data": {"train": ["a", "b"], "weights": [1]}}, "data.weights: 1 weights for 2"),
        ({"data": {"train": ["a"]}, "eval": {"early_stopping_patience": 2}}, "without evaluation data"),
        ({"checkpoint": {"best": None}, "eval": {"early_stopping_patience": 2}}, "without checkpoint.best"),
        ({"precision": "64-true", "accelerator": "gpu"}, "64-true on gpu"),
        ({"sharding": {"offload_optimizer": True}, "accelerator": "cpu"}, "sharding.offload_optimizer"),
        ({"sharding": {"offload_parameters": True}, "accelerator": "cpu"}, "sharding.offload_parameters"),
        ({"model": {"attention": "cudnn"}, "accelerator": "tpu"}, "it runs on gpu"),
        ({"model": {"attention": "splash"}, "accelerator": "gpu"}, "it runs on tpu"),
        ({"optimizer": {"freeze": ["("]}}, "optimizer.freeze: '('"),
        ({"optimizer": {"decay_rules": [["[", 1.0]]}}, "optimizer.decay_rules: '['"),
        ({"sharding": {"optimizer_axes": ["data", "data"]}}, "twice"),
        ({"sharding": {"rules": {"embed": ["fsdq"]}}}, "sharding.rules.embed: 'fsdq'"),
        ({"distributed": {"num_processes": 2, "process_id": 2}}, "from 0 to 1"),
        ({"distributed": {"num_processes": 3}, "devices": 8}, "devices: 9"),
        ({"distributed": {"coordinator_address": "host"}}, "host:port"),
        ({"distributed": {"bind_address": "host:99999"}}, "host:port"),
        ({"distributed": {"bind_address": "host"}}, "host:port"),
        ({"checkpoint": {"init_from": "a", "resume": 5}}, "init_from starts a new run"),
        (
            {"schedule": {"name": "wsd", "warmup_steps": 60, "decay_steps": 50}, "max_steps": 100},
            "60 warmup_steps + 50",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields, words):
    assert words in refused(**fields)


def test_what_only_looks_like_a_contradiction_is_taken():
    config(precision="64-true", accelerator="cpu")
    config(model={"attention": "splash"}, accelerator="tpu")
    config(schedule={"name": "wsd", "warmup_steps": 0.5, "decay_steps": 0.5}, max_steps=100)
    config(schedule={"name": "wsd", "warmup_steps": "1e9 tokens"}, max_steps=100)
    config(eval={"early_stopping_patience": 2})  # the data comes from Python
    config(data={"train": ["a"], "eval": 0.1}, eval={"early_stopping_patience": 2})
