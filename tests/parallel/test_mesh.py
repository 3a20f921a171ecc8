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


def test_fsdp_spans_the_slices_where_data_does_not():
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2, slices=2))
    ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(4, 2)
    assert set(ids[:2].ravel().tolist()) == {0, 1, 2, 3}


def test_a_product_that_is_not_the_number_of_devices_shows_the_arithmetic():
    with pytest.raises(ConfigError, match=r"3.*8 devices"):
        make_mesh("data=1,fsdp=3", devices=jax.devices())
    with pytest.raises(ConfigError, match="not built yet"):
        make_mesh("pipeline=2")
