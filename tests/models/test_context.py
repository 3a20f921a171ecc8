"""A decoder whose rows lie on several devices: natural order for who asks nothing, zig-zag for who arranges it."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jtrain.ops.context import ContextOptions, context_options
from jtrain.ops.logical import logical_rules
from jtrain.ops.zigzag import to_zigzag, zigzag_order

from .build import RULES, jit, make, mesh, small

IDS = np.random.default_rng(0).integers(0, 37, (2, 16))
GRAPH, PARAMS = make(small())


def on_four_devices(function):
    """What `function(model)` gives with its rows on four devices and its heads on two."""

    def traced(params):
        with logical_rules(mesh(context=4, tensor=2), RULES), context_options(ContextOptions("ring")):
            return function(nnx.merge(GRAPH, params))

    return jit(traced)(PARAMS)


@pytest.fixture(scope="module")
def expected():
    def both(params):
        model = nnx.merge(GRAPH, params)
        return model(IDS), model.hidden(IDS)

    return jit(both)(PARAMS)


def test_logits_and_hidden_come_in_natural_order(expected):
    found = on_four_devices(lambda model: (model(IDS), model.hidden(IDS)))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_who_arranges_the_tokens_gets_their_order(expected):
    def arranged(model):
        ways = model.balanced_ways(16)
        with zigzag_order(ways):
            return model.hidden(to_zigzag(IDS, ways)), jnp.int32(ways)  # positions follow by themselves

    found, ways = on_four_devices(arranged)
    assert ways == 4
    np.testing.assert_allclose(found, to_zigzag(expected[1], 4), atol=1e-5)
