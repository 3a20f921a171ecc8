import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jtrain.errors import ConfigError
from jtrain.parallel.mesh import make_mesh
from jtrain.parallel.sharding import (
    bytes_per_device,
    extend_spec,
    make_rules,
    parameter_spec,
    shard_like_parameters,
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh("data=2,fsdp=2,tensor=2")


def test_parameters_lie_where_the_table_says(mesh):
    rules = make_rules()
    assert parameter_spec((4, 16, 8, 6), ("layers", "embed", "heads", "head_dim"), mesh, rules) == P(
        None, ("fsdp",), ("tensor",), None
    )
    assert parameter_spec((4, 16), ("layers", "norm"), mesh, rules) == P(None, None)


def test_an_axis_that_does_not_divide_its_dimension_moves_to_one_that_it_does(mesh):
    assert parameter_spec((101, 16), ("vocab", "embed"), mesh, make_rules()) == P(None, ("fsdp", "tensor"))
    assert parameter_spec((101, 6), ("vocab", "embed"), mesh, make_rules()) == P(None, ("fsdp",))  # 6 / 4: nowhere


def test_a_model_without_names_is_divided_along_its_largest_dimension(mesh):
    assert parameter_spec((3, 8), None, mesh, make_rules()) == P(None, ("fsdp",))
    assert parameter_spec((3, 5), None, mesh, make_rules()) == P(None, None)


def test_a_users_rule_moves_a_dimension(mesh):
    rules = make_rules({"mlp": ["fsdp"], "embed": []})
    assert parameter_spec((16, 32), ("embed", "mlp"), mesh, rules) == P(None, ("fsdp",))


def test_rules_with_unknown_or_repeated_axes_are_refused():
    with pytest.raises(ConfigError, match="'model'"):
        make_rules({"mlp": ["model"]})
    with pytest.raises(ConfigError, match="twice"):
        make_rules({"mlp": ["tensor", "tensor"]})


def test_zero_puts_a_further_axis_on_the_largest_shard_that_it_divides(mesh):
    assert extend_spec(P(("fsdp",), None), (64, 16), ("data",), mesh) == P(("fsdp", "data"), None)
    assert extend_spec(P(("fsdp",), None), (6, 16), ("data",), mesh) == P(("fsdp",), ("data",))
    assert extend_spec(P(("data",), None), (6, 16), ("data",), mesh) == P(("data",), None)


CHAINS = {
    "adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "muon": optax.contrib.muon(1e-3),
    "masked": optax.masked(optax.adamw(1e-3), {"a": True, "b": False}),
    "partition": optax.partition({"x": optax.adamw(1e-3), "y": optax.sgd(0.1, momentum=0.9)}, {"a": "x", "b": "y"}),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-3),
    "ema": optax.chain(optax.adamw(1e-3), optax.ema(0.99)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_what_mirrors_a_parameter_in_any_optax_state_lies_like_it(mesh, name):
    shapes = {"a": jax.ShapeDtypeStruct((16, 32), jnp.float32), "b": jax.ShapeDtypeStruct((64,), jnp.float32)}
    places = {"a": NamedSharding(mesh, P("fsdp", "tensor")), "b": NamedSharding(mesh, P())}
    state, found = shard_like_parameters(CHAINS[name], shapes, places, mesh)
    mirrored = [
        (leaf.shape, place.spec)
        for leaf, place in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True)
        if leaf.shape == (16, 32)
    ]
    assert all(spec == P("fsdp", "tensor") for _, spec in mirrored)
    assert len(mirrored) >= {"adafactor": 0}.get(name, 1)
    params = jax.tree.map(lambda s: jnp.ones(s.shape), shapes)
    born = jax.jit(CHAINS[name].init, out_shardings=found)(params)
    assert jax.tree.structure(born) == jax.tree.structure(state)


def test_bytes_per_device_counts_one_devices_share(mesh):
    array = jax.device_put(np.zeros((16, 32), np.float32), NamedSharding(mesh, P("fsdp", "tensor")))
    assert bytes_per_device({"x": array}) == 16 * 32 * 4 // 4
