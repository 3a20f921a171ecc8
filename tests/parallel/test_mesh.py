import dataclasses

import jax
import numpy as np
import pytest

from jtrain.config.schema import MeshConfig
from jtrain.errors import ConfigError
from jtrain.parallel.mesh import data_ranks, describe, make_mesh


def test_the_short_form_gives_the_rest_to_data():
    mesh = make_mesh("fsdp=2,tensor=2")
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "pipeline": 1, "context": 1, "tensor": 2, "expert": 1}
    assert data_ranks(mesh) == 4
    assert describe(mesh) == "data=2 fsdp=2 tensor=2"


def test_neighbours_in_the_device_order_share_the_tensor_axis():
    ids = np.vectorize(lambda device: device.id)(make_mesh("fsdp=2,tensor=2").devices).reshape(2, 2, 2)
    np.testing.assert_array_equal(ids, np.arange(8).reshape(2, 2, 2))


def test_slices_keep_every_axis_but_data_inside_a_slice():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2, slices=2))
    ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(2, 4)
    assert [set(row) for row in ids.tolist()] == [{0, 1, 2, 3}, {4, 5, 6, 7}]


@dataclasses.dataclass(frozen=True)
class Device:
    """What a mesh looks at."""

    id: int
    slice_index: int
    platform: str
    process_index: int = 0
    device_kind: str = "any"


def ids(mesh):
    return [device.id for device in mesh.devices.flat]


def test_slices_are_those_of_the_hardware_whatever_the_order_of_its_devices():
    devices = [Device(number, number % 2, "cpu") for number in range(4)]
    assert ids(make_mesh(MeshConfig(data=2, fsdp=2, slices=2), devices=devices)) == [0, 2, 1, 3]


def test_gpu_islands_may_be_of_several_hosts_and_need_not_be_named():
    devices = [Device(number, number // 2, "gpu") for number in range(8)]
    for slices in (1, 2, 4):
        assert ids(make_mesh(MeshConfig(data=4, fsdp=2, slices=slices), devices=devices)) == list(range(8))


@pytest.mark.parametrize("slices", (1, 4))
def test_another_number_of_slices_than_the_tpus_lie_in_is_refused(slices):
    devices = [Device(number, number // 2, "tpu") for number in range(4)]
    with pytest.raises(ConfigError, match=r"2 slices \(slice 0: 2, slice 1: 2\)") as caught:
        make_mesh(MeshConfig(data=4, slices=slices), devices=devices)
    assert caught.value.remedy == "write mesh.slices: 2"


def test_fsdp_spans_the_slices_where_data_does_not():
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2, slices=2))
    ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(4, 2)
    assert set(ids[:2].ravel().tolist()) == {0, 1, 2, 3}


def test_a_product_that_is_not_the_number_of_devices_shows_the_arithmetic():
    with pytest.raises(ConfigError, match=r"3.*8 devices"):
        make_mesh("data=1,fsdp=3", devices=jax.devices())
