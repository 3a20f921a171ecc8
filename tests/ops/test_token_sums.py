"""Gradients of weights over divided tokens, against a plain product on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jtrain.observe.hlo import analyze
from jtrain.observe.partitioned import compile_and_partition
from jtrain.ops.logical import constrain, logical_rules
from jtrain.ops.token_sums import by_group, meet, weight_gradient

AXES = ("data", "fsdp", "context")
RULES = {"batch": ("data", "fsdp"), "sequence": ("context",), "embed": ("fsdp",), "mlp": ()}
B, L, D, F = 8, 6, 4, 5
RNG = np.random.default_rng(0)
X, DY = RNG.normal(size=(B, L, D)).astype(np.float32), RNG.normal(size=(B, L, F)).astype(np.float32)


def meshes(*sizes):
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)


def gradient():
    """A function of its own for every mesh: JAX would find the first one's trace again."""

    def function(x, d_y):
        x, d_y = (constrain(a, "batch", "sequence", None) for a in (x, d_y))
        return constrain(weight_gradient(x, d_y, "embed", "mlp"), "embed", "mlp")

    return jax.jit(function)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2), (4, 2, 1), (1, 4, 2), (8, 1, 1), (1, 8, 1)], ids=str)
def test_the_gradient_of_a_weight_is_the_sum_over_all_tokens(sizes):
    with logical_rules(meshes(*sizes), RULES):
        got = gradient()(X, DY)
    np.testing.assert_allclose(got, np.einsum("bld,blf->df", X.astype(np.float64), DY), rtol=1e-5, atol=1e-5)


def test_what_divides_the_weight_adds_first_and_the_others_add_parts():
    mesh = meshes(2, 2, 2)
    with logical_rules(mesh, RULES):
        _, text = compile_and_partition(gradient().lower(X, DY))
    size = 4 * D * F
    found = {(c.op, c.axes, c.bytes) for c in analyze(text, dict(mesh.shape)).collectives if c.op != "all-gather"}
    added = {(op, size) for op, axes, size in found if axes != ("fsdp",)}
    assert ("reduce-scatter", ("fsdp",), size) in found and added == {("all-reduce", size // 2)}


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2), (2, 4, 1)], ids=str)
def test_sums_by_group_meet_in_the_whole_sum(sizes):
    def total(x):
        parts, axes = by_group(constrain(x, "batch", "sequence", None), (D,), "embed")
        return meet(parts.sum(len(axes)), axes, "embed")

    with logical_rules(meshes(*sizes), RULES):
        np.testing.assert_allclose(jax.jit(total)(X), X.astype(np.float64).sum((0, 1)), rtol=1e-5, atol=1e-5)


def test_outside_a_mesh_it_is_the_plain_product():
    np.testing.assert_allclose(
        weight_gradient(jnp.asarray(X), jnp.asarray(DY), "embed", "mlp"),
        np.einsum("bld,blf->df", X, DY),
        rtol=1e-5,
        atol=1e-5,
    )
