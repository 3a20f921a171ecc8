import functools
import re
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jtrain.models.config import Remat

from .build import jit, make, small

IDS = np.random.default_rng(0).integers(0, 37, (1, 6))


def gradient(name):
    # One narrow layer: what is tested is the program's shape, and it compiles nine times.
    config = small(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1, remat=name)
    graph, params = make(config)
    return jit(jax.grad(lambda p: jnp.sum(jnp.sin(nnx.merge(graph, p).hidden(IDS))))), params


def test_every_policy_saves_something_else():
    programs = set()
    for name in get_args(Remat):
        run, params = gradient(name)
        # Without the policy's own name: what is kept has to differ.
        programs.add(re.sub(r"policy=.*", "", str(run.trace(params).jaxpr)))
    assert len(programs) == len(get_args(Remat)) == 9


@pytest.mark.parametrize("name", [name for name in get_args(Remat) if name != "none"])
def test_gradients_are_the_same_under_every_policy(name):
    run, params = gradient(name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), run(params), without_remat())


@functools.cache
def without_remat():
    run, params = gradient("none")
    return run(params)
