"""Projections of one input together: values and gradients of each by itself, on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from jtrain.models.projection import Projection, project
from jtrain.ops.logical import logical_rules

D, HEADS, SIZE = 8, 4, 2
RULES = {"batch": ("data",), "embed": ("data",), "heads": ("tensor",), "kv_heads": ("tensor",), "mlp": ("tensor",)}


def made(names_and_sizes):
    keys = jax.random.split(jax.random.key(0), len(names_and_sizes))
    with nnx.use_eager_sharding(False):
        return [
            Projection(key, 1.0, (("embed", D),), outputs, bias=True, dtype=jnp.float32)
            for key, outputs in zip(keys, names_and_sizes, strict=True)
        ]


GATED = [(("mlp", 12),)] * 2
GROUPED = [(("heads", HEADS), ("head_dim", SIZE))] + [(("kv_heads", 2), ("head_dim", SIZE))] * 2


@pytest.mark.parametrize("outputs, repeats", [(GATED, [1, 1]), (GROUPED, [1, 1, 1]), (GROUPED, [1, 2, 2])], ids=str)
@pytest.mark.parametrize("data, tensor", [(1, 1), (1, 2), (2, 2), (4, 1)])
def test_together_they_give_what_each_gives_alone(outputs, repeats, data, tensor):
    projections = made(outputs)
    kernels = [p.kernel[...] for p in projections]
    x = jax.random.normal(jax.random.key(1), (4, 6, D))

    def loss(x, kernels):
        mine = []
        for projection, kernel in zip(projections, kernels, strict=True):
            graph, values = nnx.split(projection)
            mine.append(nnx.merge(graph, nnx.to_pure_dict(values) | {"kernel": kernel}))
        return sum(jnp.sum(jnp.sin(y) * (n + 1)) for n, y in enumerate(project(mine, x, repeats)))

    def plain(x, kernels):
        total = 0.0
        for n, (kernel, times) in enumerate(zip(kernels, repeats, strict=True)):
            total += jnp.sum(jnp.sin(jnp.tensordot(x, jnp.repeat(kernel, times, axis=1), axes=1)) * (n + 1))
        return total

    want = jax.value_and_grad(plain, argnums=(0, 1))(x, kernels)
    devices = np.array(jax.devices()[: data * tensor]).reshape(data, tensor)
    mesh = Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with logical_rules(mesh, RULES):
        got = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, kernels)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
