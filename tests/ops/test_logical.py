import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from jtrain.ops.logical import activation_spec, constrain, current_mesh, logical_spec, mesh_axis_size

from .meshes import RULES, on_mesh


def test_outside_a_mesh_nothing_is_constrained():
    x = jnp.ones((4, 2))
    assert constrain(x, "batch", "vocab") is x
    assert current_mesh() is None and mesh_axis_size("vocab") == 1
    assert logical_spec((4, 2), "batch", "vocab") == PartitionSpec(None, None)


def test_an_axis_lies_where_the_table_says_if_it_divides():
    with on_mesh(2, 4) as mesh:
        assert current_mesh() is mesh and mesh_axis_size("vocab") == 4
        assert logical_spec((4, 7, 8), "batch", None, "vocab") == PartitionSpec(("data",), None, ("tensor",))
        assert logical_spec((4, 6), "batch", "vocab") == PartitionSpec(("data",), None)
        assert logical_spec((8, 8), "heads", "vocab") == PartitionSpec(("tensor",), None)


def test_constrain_places_an_array():
    def double(x):
        with on_mesh(2, 4):
            return constrain(x * 2, "batch", "vocab")

    out = jax.jit(double)(jnp.ones((4, 8)))
    assert out.sharding.shard_shape(out.shape) == (2, 2)


def test_the_number_of_names_must_be_the_number_of_dimensions():
    with on_mesh(2, 1) as mesh, pytest.raises(ValueError, match="2 logical names"):
        activation_spec((4,), ("batch", None), mesh, RULES)
