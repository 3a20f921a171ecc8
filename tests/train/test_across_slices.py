"""Slices that compute by themselves, against the plain step and against arithmetic; what crosses between them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jtrain import Loss
from jtrain.config.schema import DcnConfig
from jtrain.models.decoder import Decoder
from jtrain.models.presets import preset
from jtrain.observe.hlo import analyze
from jtrain.parallel.mesh import make_mesh
from jtrain.tasks.pretrain import pretrain_loss
from jtrain.train.across_slices import Exchange, gradients_of_slices, stacked, total_loss
from jtrain.train.gradients import accumulated_gradients
from jtrain.train.model import functional_model
from jtrain.train.state import plan_state
from jtrain.train.step import make_train_step
from tests.train.linear import Linear
from tests.train.tiny import tiny_batch, tiny_program

SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "dropout": 0.1}
MESH = "data=2,slices=2"
EIGHT = "data=2,fsdp=2,tensor=2,slices=2", 8
CHEAP = {"xla_backend_optimization_level": 0}
"""What is sent is settled before machine code is made: it need not be good."""


@functools.cache
def program(mesh=MESH, devices=2, **dcn):
    """A decoder of one layer with dropout, two micro-batches, on two slices."""
    fields = {"optimizer.learning_rate": 1e-2, "schedule.name": "constant", "schedule.warmup_steps": 0}
    return tiny_program(mesh, devices=devices, shape=SHAPE, gradient_accumulation_steps=2, dcn=dcn, **fields)


@functools.cache
def run(mesh=MESH, devices=2, steps=4, **dcn):
    """The state and the figures of every step."""
    built = program(mesh, devices, **dcn)
    state, figures = built.init(), []
    for step in range(steps):
        state, metrics = built.train_step(state, tiny_batch(built, step))
        figures.append(jax.device_get(metrics))
    return state, figures


def sent(built, rounds=1):
    """Bytes that a device sends over `data` in a step; of a branch that one step in `rounds` takes, its share."""
    text = built.train_step.lower(built.plan.abstract, tiny_batch(built)).compile(CHEAP).as_text()
    found = analyze(text, dict(built.mesh.shape)).collectives
    return sum(c.wire_bytes * n / (rounds if c.conditional else 1) for c, n in found.items() if "data" in c.axes)


def assert_close(tree, other, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), *jax.device_get((tree, other)))


# -- gradients of slices ----------------------------------------------------------------------------------------------


def test_gradients_of_slices_added_in_float32_make_the_plain_step():
    built = program(*EIGHT)
    loss_fn = pretrain_loss()
    by_slices = make_train_step(
        built.model,
        loss_fn,
        built.tx,
        built.plan,
        seed=built.config.seed,
        max_grad_norm=1.0,
        gradients=gradients_of_slices(accumulated_gradients(built.model, loss_fn, built.plan), built.plan),
        exchange=Exchange(built.plan, DcnConfig(), built.model.names),
    )
    plain, state = built.init(), built.init()
    for step in range(3):
        batch = tiny_batch(built, step)
        plain, expected = built.train_step(plain, batch)
        state, metrics = by_slices(state, batch)
        for name in ("loss", "grad_norm", "tokens", "sums"):
            assert_close(metrics[name], expected[name], rtol=1e-6)
    assert_close(state.params, plain.params, rtol=1e-5, atol=1e-6)


def test_a_float_variable_is_the_mean_over_the_slices_and_a_count_counts_them_all():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones(3))
            self.mean = nnx.BatchStat(jnp.zeros(3))
            self.seen = nnx.BatchStat(jnp.int32(5))

    def loss_fn(model, batch, rng):
        model.mean[...] = batch["x"].mean(0)
        model.seen[...] += batch["x"].shape[0]
        return Loss((batch["x"] @ model.w[...]).sum(), jnp.float32(batch["x"].shape[0]))

    model = functional_model(Model)
    plan = plan_state(model, optax.sgd(1.0), make_mesh(MESH, devices=jax.devices()[:2]))
    gradients = gradients_of_slices(accumulated_gradients(model, loss_fn, plan), plan)
    x = np.arange(24, dtype=np.float32).reshape(1, 8, 3)
    params, variables = jax.device_get(jax.jit(model.init)(jax.random.key(0)))
    grads, loss, after = jax.jit(gradients)(params, variables, {"x": jnp.asarray(x)}, jax.random.key(0), jnp.float32(1))
    np.testing.assert_allclose(after["mean"], x[0].mean(0))
    assert after["seen"] == 5 + 8
    np.testing.assert_allclose(grads["w"], [x[0, :4].sum(0), x[0, 4:].sum(0)])
    np.testing.assert_allclose(total_loss(loss).sum, x.sum())


# -- compression ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compression", "mesh"), [("int8", EIGHT), ("powersgd", (MESH, 2))], ids=["int8", "powersgd"])
def test_a_compressed_run_goes_where_the_plain_one_goes_and_all_slices_agree(compression, mesh):
    _, plain = run(*EIGHT)
    state, figures = run(*mesh, compression=compression)
    # Only the gradient passes through the code: the first loss is the same, to the last bits of its sum.
    np.testing.assert_allclose(figures[0]["loss"], plain[0]["loss"], rtol=1e-6)
    assert figures[0]["tokens"] == plain[0]["tokens"]
    assert figures[0]["grad_norm"] != plain[0]["grad_norm"]
    np.testing.assert_allclose(figures[-1]["loss"], plain[-1]["loss"], rtol=5e-3)
    for leaf in jax.tree.leaves(state.params):
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert all(len(different) == 1 for different in copies.values())


def test_what_is_owed_lies_where_the_gradient_lies():
    state = program(*EIGHT, compression="int8").plan.abstract
    error = state.across["error"]["layers"]["attention"]["q_proj"]["kernel"]
    weight = state.params["layers"]["attention"]["q_proj"]["kernel"]
    assert error.shape == (2, *weight.shape)
    assert error.sharding.shard_shape(error.shape) == (1, *weight.sharding.shard_shape(weight.shape))


def test_debts_are_kept_without_the_loss_scale():
    model = functional_model(Linear)
    plan = plan_state(model, optax.sgd(1.0), make_mesh(MESH, devices=jax.devices()[:2]))
    exchange = Exchange(plan, DcnConfig(compression="int8"), model.names)
    stacks = {"w": jnp.asarray([[1.0, -0.013, 0.4], [0.02, 0.3, -2.0]]), "b": jnp.asarray([0.7, 0.1])}
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), exchange.abstract())
    add = jax.jit(exchange)
    # Twice, so that the debts of the first time are paid in the second, under another scale. Powers of two are exact.
    sums, kept = add(stacks, add(stacks, zeros, 1.0)[1], 1.0)
    scaled, other = add(times(8, stacks), add(times(4, stacks), zeros, 4.0)[1], 8.0)
    assert_close(times(1 / 8, scaled), sums, rtol=1e-6)
    assert_close(other, kept, rtol=1e-5, atol=1e-7)
    assert max(float(jnp.abs(e).max()) for e in jax.tree.leaves(kept)) > 1e-4


def times(factor, tree):
    return jax.tree.map(lambda x: factor * x, tree)


def test_without_error_feedback_nothing_is_kept():
    assert program(compression="int8", error_feedback=False).plan.abstract.across is None
    assert set(program(compression="powersgd", error_feedback=False).plan.abstract.across) == {"sketch"}


def test_vectors_and_frozen_parameters_have_no_sketch():
    across = program(compression="powersgd", rank=2).plan.abstract.across
    layers = across["sketch"]["layers"]
    assert layers["attention_norm"]["scale"] is None and across["error"]["layers"]["attention_norm"]["scale"] is None
    assert layers["mlp"]["up_proj"]["kernel"].shape == (1, 32, 2)  # one layer, 32 columns, rank 2


# -- bytes ------------------------------------------------------------------------------------------------------------


@functools.cache
def wide(**dcn):
    """64 channels: large enough that scales and padding weigh what they weigh in earnest. Compiled, never run."""
    shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 1024}
    return tiny_program("data=2,slices=2", devices=2, shape=shape, dcn=dcn, **{"optimizer.name": "sgd"})


def plain_bytes(params, slices=2):
    """What a device sends at least to add float32 gradients: a ring sends 2 (S-1)/S of its shard."""
    shard = sum(np.prod(p.sharding.shard_shape(p.shape)) for p in jax.tree.leaves(params))
    return 4 * shard * 2 * (slices - 1) / slices


@pytest.mark.parametrize(("compression", "least"), [pytest.param("bf16", 1.99, marks=pytest.mark.grid), ("int8", 3.9)])
def test_a_code_saves_what_it_says_in_the_compiled_step(compression, least):
    built = wide(compression=compression)
    assert plain_bytes(built.plan.abstract.params) >= least * sent(built)


def test_local_steps_of_50_save_45_times():
    built = wide(local_steps=50)
    assert plain_bytes(built.plan.abstract.params) >= 45 * sent(built, rounds=50)
    # In an update that ends no round: the loss and its count, the accuracy and its, the tokens, the mean norm.
    assert sent(built, rounds=10**9) < 64


@pytest.mark.parametrize(("compression", "least"), [("none", 1.0), ("int8", 3.9), ("powersgd", 100)])
def test_bytes_of_a_llama_of_one_billion(compression, least):
    """The exchange alone, compiled on the shapes of a whole model; on two slices of two devices."""
    mesh = make_mesh("data=2,fsdp=2,slices=2", devices=jax.devices()[:4])
    model = functional_model(lambda rngs: Decoder(preset("llama3.2-1b"), rngs))
    plan = plan_state(model, optax.sgd(1.0), mesh)
    exchange = Exchange(plan, DcnConfig(compression=compression, rank=4), model.names)
    stacks = jax.tree.map(lambda p: stacked(p, 2), plan.abstract.params)
    places = (plan.gradients, jax.tree.map(lambda x: x.sharding, exchange.abstract()))
    compiled = jax.jit(exchange, out_shardings=places).lower(stacks, exchange.abstract()).compile(CHEAP)
    found = analyze(compiled.as_text(), dict(mesh.shape)).collectives
    taken = sum(c.wire_bytes * n for c, n in found.items() if "data" in c.axes)
    plain = plain_bytes(plan.abstract.params)
    assert plain > 4 * 1.2e9 / 2  # half of the model a device
    assert plain >= least * taken * (1 - 1e-6)
