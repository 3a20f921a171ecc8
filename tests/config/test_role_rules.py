"""The section `roles`: forms, and what is refused before a device is touched."""

import pytest

from jtrain.config.load import load_config
from jtrain.config.role_rules import mesh_of, meshes, policy_sizes, role_sizes
from jtrain.config.task_sections import RoleConfig
from jtrain.errors import ConfigError

EIGHT = {"task": "dpo", "devices": 8, "global_batch_size": 8}


def load(changes=None, flags=()):
    return load_config(EIGHT | (changes or {}), flags, env={})


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ({"roles": {"reference": {"fsdp": 2, "tensor": 4}}}, []),
        ({"roles": {"reference": "fsdp=2,tensor=4"}}, []),
        ({"roles.reference": "fsdp=2,tensor=4"}, []),
        ({}, ["--roles.reference", "fsdp=2,tensor=4"]),
        ({}, ["--roles.reference.fsdp", "2", "roles.reference.tensor=4"]),
        ({"roles": {"reference": {"devices": 4, "data": 4}}}, ["--roles.reference", "fsdp=2,tensor=4"]),
    ],
)
def test_the_mesh_of_a_role_is_written_as_mesh_is(given, flags):
    config = load(given, flags)
    assert config.roles.reference == RoleConfig(fsdp=2, tensor=4)
    sizes = role_sizes(config, "reference", 8)
    assert {axis: size for axis, size in sizes.items() if size > 1} == {"fsdp": 2, "tensor": 4}


def test_a_section_that_says_nothing_is_the_policys_mesh_and_one_axis_makes_another():
    assert meshes(load()) == meshes(load({"roles": {"reference": None}})) == []
    assert meshes(load({"roles": {"reference": {"data": -1}}})) == ["reference"]
    assert role_sizes(load({"roles": {"reference": {"fsdp": 1}}}), "reference", 8)["data"] == 8
    assert mesh_of(load({"roles": {"reference": {"expert": 2}}}), "reference").data == -1


def test_devices_of_a_roles_own_are_not_the_policys():
    config = load({"mesh": "fsdp=2,tensor=2", "roles": {"reference": {"devices": 4, "tensor": 2}}})
    assert policy_sizes(config, 8) == dict.fromkeys(("data", "pipeline", "context", "expert"), 1) | {
        "fsdp": 2,
        "tensor": 2,
    }
    sizes = role_sizes(config, "reference", 8)
    assert (sizes["data"], sizes["tensor"]) == (2, 2)


@pytest.mark.parametrize(
    ("given", "message", "remedy"),
    [
        ({"roles": {"reference": {"tensor": 3}}}, "tensor 3 = 3 does not divide 8 devices", "Write roles.reference: "),
        ({"roles": {"reference": {"fsdp": 0}}}, "roles.reference.fsdp: 0 is not a size", "above 0"),
        ({"roles": {"reference": {"data": -1, "fsdp": -1}}}, "data=-1 and fsdp=-1", "Only one axis"),
        ({"roles": {"reference": {"pipeline": 2}}}, "there is no such field", "devices, data, fsdp, tensor, expert"),
        ({"roles": {"actor": {"fsdp": 2}}}, "roles.actor: there is no such field", "roles has: reference"),
        ({"roles": {"reference": "x"}}, "'x' is not a list", "Write roles.reference: fsdp=4,tensor=2"),
        ({"roles": {"reference": {"devices": 8}}}, "8 of 8 devices leaves the policy none", "below 8"),
        (
            {"mesh": "fsdp=8", "roles": {"reference": {"devices": 4}}},
            "fsdp 8 = 8 does not divide 4 devices .8 less the 4 of roles.reference.devices",
            "devices: 12",
        ),
        (
            {"mesh": "tensor=8", "global_batch_size": 4, "roles": {"reference": {"fsdp": 8}}},
            "fsdp=8 divides rows 8 ways, and a micro-batch has 4",
            "Write roles.reference: tensor=8",
        ),
        (
            {"distributed": {"num_processes": 2}, "roles": {"reference": {"devices": 4}}},
            "roles.reference.devices: 4 with distributed.num_processes: 2",
            "shared",
        ),
        (
            {"mesh": "slices=2", "roles": {"reference": {"devices": 2}}},
            "roles.reference.devices: 2 with mesh.slices: 2",
            "shared",
        ),
        ({"task": "sft", "roles": {"reference": {"fsdp": 2}}}, "roles.reference with task: sft", "write task: dpo"),
        ({"dpo": {"loss_type": "orpo"}, "roles": {"reference": {"fsdp": 2}}}, "which has no reference", "Leave it out"),
        (
            {"model": {"lora": {"rank": 4}}, "roles": {"reference": {"fsdp": 2}}},
            "the policy without its adapters, on its mesh",
            "dpo.ref_model",
        ),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:30],
)  # fmt: skip
def test_what_can_not_be_is_refused_with_what_to_write(given, message, remedy):
    with pytest.raises(ConfigError, match=message) as error:
        load(given)
    assert remedy in error.value.remedy


def test_a_reference_of_its_own_may_have_a_mesh_under_adapters():
    other = {"model": {"lora": {"rank": 4}}, "dpo": {"ref_model": "/other"}, "roles": {"reference": {"fsdp": 2}}}
    assert meshes(load(other)) == ["reference"]
