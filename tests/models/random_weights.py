"""Decoders with random weights that nothing has to be compiled for."""

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.tasks.loaded import LoadedModel, as_mesh, decoder_model, make_precision, plan_of, rules_for


def random_model(shape, *, mesh=None, tokenizer=None, std=0.4):
    """A `LoadedModel` of any shape and mesh; strong weights, so that a wrong position or window shows."""
    model, mesh, precision = decoder_model(shape), as_mesh(mesh), make_precision("float32")
    rules = rules_for(mesh)
    generator = np.random.default_rng(2)

    def draw(leaf, place, scale):
        return jax.device_put(jnp.asarray(generator.normal(size=leaf.shape) * scale, leaf.dtype), place.sharding)

    plan = plan_of(model, mesh, rules, precision).abstract
    params = jax.tree.map(lambda leaf, place: draw(leaf, place, std), model.params, plan.params)
    variables = jax.tree.map(lambda leaf, place: draw(leaf, place, 0.1), model.variables, plan.variables)
    return LoadedModel(shape, model, params, variables, mesh, rules, precision, tokenizer)
