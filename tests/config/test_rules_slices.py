"""What `dcn` asks of the mesh and of the sharding, before a device is used."""

import jax
import pytest

from jtrain.config import load_config
from jtrain.config.rules import check_slices
from jtrain.errors import ConfigError
from jtrain.train.program import mesh_and_batch

INT8 = {"dcn": {"compression": "int8"}}


def load(**fields):
    return load_config({"max_steps": 10, **fields}, (), {})


@pytest.mark.parametrize(
    ("fields", "message", "remedy"),
    [
        (INT8, ["dcn.compression: int8", "mesh.slices: 1"], "mesh.slices"),
        ({"dcn": {"local_steps": 50}}, ["dcn.local_steps: 50", "mesh.slices: 1"], "leave the dcn section out"),
        (
            INT8 | {"mesh": "data=4,fsdp=2,slices=2", "devices": 8},
            ["mesh.data=4 is not mesh.slices=2"],
            "data=2,fsdp=4,slices=2",
        ),
        (
            INT8 | {"mesh": "data=1,fsdp=4,tensor=2,slices=2", "devices": 8},
            ["mesh.data=1 is not mesh.slices=2"],
            "data=2,fsdp=2,tensor=2,slices=2",
        ),
        (
            INT8 | {"strategy": "fsdp", "mesh": {"slices": 2}, "devices": 8},
            ["mesh.data=1 is not mesh.slices=2"],
            "data=2,fsdp=4,slices=2 and leave strategy out",
        ),
        (
            INT8 | {"mesh": "data=2,pipeline=4,slices=2", "devices": 8},
            ["mesh.pipeline: 4: the pipeline adds the gradients of all slices itself"],
            "mesh.pipeline: 1",
        ),
        (
            INT8 | {"strategy": "zero1", "mesh": {"slices": 8}, "devices": 8},
            ["data in sharding.optimizer_axes", "cross the slow network"],
            "fsdp in place of data",
        ),
        (
            INT8 | {"mesh": {"slices": 2}, "sharding": {"rules": {"embed": ["fsdp", "data"]}}},
            ["data in sharding.rules.embed"],
            "fsdp in place of data",
        ),
        (
            INT8 | {"mesh": {"slices": 2}, "sharding": {"rules": {"batch": ["fsdp"]}}},
            ["sharding.rules.batch: ['fsdp']"],
            "Begin sharding.rules.batch with data",
        ),
    ],
)
def test_what_the_slow_network_can_not_be_is_refused_with_what_it_can(fields, message, remedy):
    with pytest.raises(ConfigError) as caught:
        load(**fields)
    assert all(part in caught.value.message for part in message), caught.value.message
    assert remedy in caught.value.remedy


def test_devices_that_are_counted_later_are_checked_then():
    config = load(**INT8, mesh={"slices": 2})
    with pytest.raises(ConfigError, match=r"mesh.data=8 is not mesh.slices=2"):
        mesh_and_batch(config, jax.devices()[:8])
    assert mesh_and_batch(config, jax.devices()[:2])[1].shape["data"] == 2


def test_an_ordinary_mesh_is_left_alone():
    check_slices(load(mesh="data=4,slices=2", devices=4), {"data": 4, "fsdp": 1, "pipeline": 1})
