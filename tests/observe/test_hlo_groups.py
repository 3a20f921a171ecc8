import pytest

from jtrain.observe.hlo_groups import device_groups, mesh_axes

MESH = {"data": 2, "fsdp": 4}


@pytest.mark.parametrize(
    ("text", "groups", "axes"),
    [
        # Device = 4·data + fsdp.
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", [[0, 1, 2, 3], [4, 5, 6, 7]], ("fsdp",)),
        ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]], ("fsdp",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]], ("data",)),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'data'}", [[0, 4], [1, 5], [2, 6], [3, 7]], ("data",)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_2'}", [[0, 1, 2, 3], [4, 5, 6, 7]], ("fsdp",)),
        ("replica_groups=mesh['a'=8] {'a'}", [[*range(8)]], ("data", "fsdp")),
        # A part of an axis: the outer half of eight is data, the inner quarter fsdp.
        ("replica_groups=mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]], ("data",)),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", [[0, 1, 2, 3], [4, 5, 6, 7]], ("fsdp",)),
        # Axes in another order than the devices'.
        (
            "replica_groups=mesh['f'=4,'d'=2], device_ids=([2,4]T(1,0)) {'d'}",
            [[0, 4], [1, 5], [2, 6], [3, 7]],
            ("data",),
        ),
        (
            "replica_groups=mesh['a'=8], device_ids=([2,2,2]T(1,2,0)) {'a':(4)2}",
            [[0, 4], [1, 5], [2, 6], [3, 7]],
            ("data",),
        ),
        ("replica_groups=mesh['x'=2,'y'=2], device_ids=(0,2,1,3) {'y'}", [[0, 2], [1, 3]], ("fsdp",)),
        ("source_target_pairs={{0,4},{4,0}}", [[0, 4], [4, 0]], ("data",)),
        ("replica_groups={}", [[*range(8)]], ("data", "fsdp")),
        ("dimensions={0}", [[*range(8)]], ("data", "fsdp")),
    ],
)
def test_every_form_of_groups_gives_devices_and_axes(text, groups, axes):
    found = device_groups(f"channel_id=1, {text}, use_global_device_ids=true", 8)
    assert found == groups
    assert mesh_axes(found, MESH) == axes


def test_the_order_of_two_axes_in_a_group_follows_the_text():
    text = "replica_groups=mesh['a'=2,'b'=2,'c'=2] {'c','a'}"
    # Device = 4a + 2b + c: c is the slower of the two in a row.
    assert device_groups(text, 8) == [[0, 4, 1, 5], [2, 6, 3, 7]]


def test_without_a_mesh_there_are_no_axes():
    assert mesh_axes([[0, 1]], {}) == ()
