import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jtrain.train.loss import Loss
from jtrain.train.state import plan_state, select
from jtrain.train.step import make_forward
from tests.train.linear import ROWS, WIDTH, Linear, linear_batch, linear_program, squared_error
from tests.train.tiny import LENGTH, put, tiny_batch, tiny_program, tiny_rows


def by_hand(params, batch):
    """Loss and gradients of the mean over live rows, in float64."""
    x, y, weight = (np.float64(batch[name].reshape(ROWS, *batch[name].shape[2:])) for name in ("x", "y", "weight"))
    error = x @ np.float64(params["w"]) + np.float64(params["b"]) - y
    count = weight.sum()
    return (
        (weight * error**2).sum() / count,
        {"w": (2 * weight * error) @ x / count, "b": (2 * weight * error).sum() / count},
    )


@pytest.mark.parametrize("accumulation", (1, 2, 4))
def test_loss_and_update_are_those_of_the_mean_over_all_live_rows(accumulation):
    program = linear_program(accumulation)
    # Live rows are spread unevenly over the micro-batches: a mean of their means would be another number.
    batch = linear_batch(accumulation, weight=np.asarray([1, 0, 0, 0, 1, 1, 1, 1], np.float32))
    before = jax.device_get(program.init().params)
    loss, gradients = by_hand(before, batch)
    state, metrics = program.train_step(program.init(), batch)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-6)
    norm = np.sqrt((gradients["w"] ** 2).sum() + gradients["b"] ** 2)
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-6)
    np.testing.assert_allclose(state.params["w"], before["w"] - gradients["w"], rtol=1e-5)
    assert int(state.step) == int(metrics["step"]) == 1
    total, count = metrics["sums"]["absolute"]
    assert float(count) == ROWS and float(total) > 0


def test_micro_batches_with_1_7_64_and_128_live_tokens_equal_one_batch_of_200():
    counts, rows_each = (1, 7, 64, 128), 5
    rows = tiny_rows(rows=4 * rows_each)
    rows["segment_ids"][:] = 1
    rows["position_ids"] = np.tile(np.arange(LENGTH, dtype=np.int32), (4 * rows_each, 1))
    labels = np.full((4, rows_each, LENGTH), -100, np.int32)
    for micro, count in enumerate(counts):
        places = np.arange(count)
        labels[micro, places // (LENGTH - 1), 1 + places % (LENGTH - 1)] = 5  # a row's first token is no target
    rows["labels"] = labels.reshape(4 * rows_each, LENGTH)
    results = []
    for accumulation in (4, 1):
        program = tiny_program(global_batch_size=4 * rows_each, gradient_accumulation_steps=accumulation)
        _, metrics = program.train_step(program.init(), put(program, rows))
        assert float(metrics["sums"]["mean_token_accuracy"][1]) == sum(counts)
        results.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)


def test_clipping_scales_the_update_to_the_limit_and_reports_the_norm_before():
    program = linear_program(optimizer={"max_grad_norm": 0.25})
    before = jax.device_get(program.init().params)
    state, metrics = program.train_step(program.init(), linear_batch())
    assert float(metrics["grad_norm"]) > 1.0
    moved = jax.tree.map(lambda a, b: np.asarray(a) - b, state.params, before)
    assert float(optax.tree.norm(moved)) == pytest.approx(0.25, rel=1e-4)


def poisoned():
    return linear_batch(y=np.asarray([np.nan] + [0.0] * (ROWS - 1), np.float32))


@pytest.mark.parametrize("policy", ("skip", "stop"))
def test_a_batch_that_is_not_finite_leaves_everything_as_it_was(policy):
    program = linear_program(faults={"nonfinite": policy}, tx=optax.adam(0.1))
    first, _ = program.train_step(program.init(), linear_batch())
    before = jax.device_get(first)
    second, metrics = program.train_step(first, poisoned())
    assert not bool(metrics["finite"])
    assert (int(second.step), int(second.skipped)) == (1, 1)
    for old, new in zip(jax.tree.leaves(before.params), jax.tree.leaves(second.params), strict=True):
        np.testing.assert_array_equal(old, new)
    for old, new in zip(jax.tree.leaves(before.opt_state), jax.tree.leaves(second.opt_state), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("precision", ("32-true", "16-mixed"))
def test_under_warn_it_is_applied(precision):
    program = linear_program(faults={"nonfinite": "warn"}, precision=precision)
    state, metrics = program.train_step(program.init(), poisoned())
    assert not bool(metrics["finite"]) and np.isnan(state.params["b"])
    assert (int(state.step), int(state.skipped)) == (1, 0)


def test_a_batch_without_a_live_row_moves_nothing():
    program = linear_program()
    before = jax.device_get(program.init().params)
    state, metrics = program.train_step(program.init(), linear_batch(weight=np.zeros(ROWS, np.float32)))
    assert float(metrics["loss"]) == 0.0
    np.testing.assert_array_equal(state.params["w"], before["w"])


def test_frozen_parameters_stay_and_have_no_optimizer_state():
    program = linear_program(optimizer={"freeze": ["w"], "max_grad_norm": 0.0}, tx=optax.adam(0.1))
    before = jax.device_get(program.init().params)
    state, _ = program.train_step(program.init(), linear_batch())
    np.testing.assert_array_equal(state.params["w"], before["w"])
    assert float(state.params["b"]) != float(before["b"])
    assert {leaf.shape for leaf in jax.tree.leaves(state.opt_state)} == {()}
    assert select(state.params, program.plan.trainable)["w"] is None


def test_the_moving_average_follows_the_formula():
    program = linear_program(optimizer={"ema_decay": 0.9, "max_grad_norm": 0.0}, tx=optax.sgd(0.1))
    state = program.init()
    average = np.float64(state.params["b"])
    for step in range(1, 4):
        state, _ = program.train_step(state, linear_batch(seed=step))
        decay = min(0.9, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * np.float64(state.params["b"])
    assert float(state.ema["b"]) == pytest.approx(average, rel=1e-5)


def test_before_the_first_update_the_average_is_the_model():
    program = linear_program(optimizer={"ema_decay": 0.9})
    state = program.init()
    np.testing.assert_array_equal(state.ema["w"], state.params["w"])


@pytest.mark.parametrize("policy", ("skip", "stop", "warn"))
def test_fp16_skips_on_overflow_until_the_scale_fits_and_then_trains(policy):
    program = linear_program(precision="16-mixed", tx=optax.sgd(0.01), faults={"nonfinite": policy})
    batch = linear_batch(x=np.full((ROWS, WIDTH), 10.0, np.float32))  # gradients of some 1e3 overflow at scale 2^15
    state = program.init()
    scales = []
    for _ in range(14):
        state, metrics = program.train_step(state, batch)
        scales.append(float(state.loss_scale.scale))
        if bool(metrics["finite"]):
            break
    assert int(state.skipped) == len(scales) - 1 > 0
    assert scales[-1] == 2.0**15 / 2.0 ** int(state.skipped)
    assert int(state.step) == 1 and np.isfinite(state.params["w"]).all()


def test_a_forward_pass_brings_parameters_from_host_memory_and_is_deterministic():
    class Dropped(Linear):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return super().__call__(self.dropout(x))

    program = linear_program(model=Dropped)
    state, x = program.init(), jnp.ones((2, WIDTH))
    run = program.forward(lambda module, x: module(x))
    np.testing.assert_allclose(run(state.params, state.variables, x), np.full(2, state.params["w"].sum()), rtol=1e-6)

    def moves(offload):
        plan = plan_state(program.model, program.tx, program.mesh, offload_parameters=offload)
        forward = make_forward(program.model, plan, lambda module, x: module(x))
        return str(forward.trace(plan.abstract.params, plan.abstract.variables, x).jaxpr).count("device_put")

    assert (moves(False), moves(True)) == (0, 2)  # w and b


@pytest.mark.parametrize(
    ("precision", "stored", "computed"),
    (
        ("32-true", "float32", "float32"),
        ("bf16-mixed", "float32", "bfloat16"),
        ("bf16-true", "bfloat16", "bfloat16"),
        ("16-mixed", "float32", "float16"),
    ),
)
def test_precision_says_what_is_stored_and_what_the_model_computes_in(precision, stored, computed):
    seen = []

    def loss_fn(model, batch, rng):
        seen.append(str(model.w[...].dtype))
        return squared_error(model, batch, rng)

    program = linear_program(precision=precision, loss_fn=loss_fn, tx=optax.adam(0.1))
    state, _ = program.train_step(program.init(), linear_batch())
    assert set(seen) == {computed}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.params)} == {stored}


def test_a_step_hook_sees_and_changes_gradients_and_metrics():
    def halve(gradients, state, metrics):
        return jax.tree.map(lambda g: g * 0.5, gradients), metrics | {"hooked": state.step + 10}

    program, plain, batch = linear_program(step_hook=halve), linear_program(), linear_batch()
    _, hooked = program.train_step(program.init(), batch)
    _, without = plain.train_step(plain.init(), batch)
    assert float(hooked["grad_norm"]) == pytest.approx(0.5 * float(without["grad_norm"]), rel=1e-6)
    assert int(hooked["hooked"]) == 10


class Normalised(nnx.Module):
    """Keeps batch statistics and drops out with its own random stream."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.inner = Linear(rngs)

    def __call__(self, x):
        return self.inner(self.drop(self.norm(x)))


def test_variables_beside_parameters_are_carried_and_dropout_follows_seed_and_step():
    program = linear_program(model=Normalised, tx=optax.sgd(0.0))
    batch = linear_batch()
    first, one = program.train_step(program.init(), batch)
    np.testing.assert_allclose(first.variables["norm"]["mean"], 0.5 * batch["x"][0].mean(0), rtol=1e-5)
    again, same = program.train_step(program.init(), batch)
    assert float(one["loss"]) == float(same["loss"])
    _, two = program.train_step(again, batch)
    assert float(two["loss"]) != float(one["loss"])  # another step, another mask


class Counting(Linear):
    """Counts the rows of an update, and ends it by remembering and forgetting them."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.rows = nnx.Variable(jnp.int32(0))
        self.updates = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.rows[...] += x.shape[0]
        return super().__call__(x)

    def end_step(self):
        counted = self.rows[...]
        self.rows[...] = jnp.zeros_like(counted)
        self.updates[...] += 1
        return {"rows_counted": counted}


@pytest.mark.parametrize("accumulation", (1, 4))
def test_a_model_ends_every_update_once_after_all_micro_batches(accumulation):
    program = linear_program(accumulation, model=Counting)
    first, metrics = program.train_step(program.init(), linear_batch(accumulation))
    assert (int(metrics["rows_counted"]), int(first.variables["rows"]), int(first.variables["updates"])) == (8, 0, 1)
    bad = linear_batch(accumulation, y=np.full(ROWS, np.nan, np.float32))
    second, _ = program.train_step(first, bad)
    assert int(second.variables["updates"]) == 1  # an update that is skipped has no end


def test_evaluation_is_not_random_and_sums_over_micro_batches():
    program = linear_program(model=Normalised, accumulation=2)
    state = program.init()
    losses = [program.eval_step(state.params, state.variables, linear_batch(2)) for _ in range(2)]
    assert float(losses[0].sum) == float(losses[1].sum)
    assert float(losses[0].count) == ROWS


def test_the_state_is_donated():
    program = linear_program()
    compiled = program.train_step.lower(program.init(), linear_batch()).compile()
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes >= (WIDTH + 1) * 4


def test_the_compiled_program_hardly_grows_with_the_number_of_layers():
    def size(layers: int) -> int:
        program = tiny_program(shape={"num_hidden_layers": layers})
        batch = jax.eval_shape(lambda: {k: jnp.asarray(v) for k, v in tiny_batch(program).items()})
        return len(program.train_step.lower(program.plan.abstract, batch).as_text().splitlines())

    assert size(32) <= 1.05 * size(4)


def test_a_loss_of_integers_and_unused_metrics_is_no_trouble():
    def loss_fn(model, batch, rng):
        loss = squared_error(model, batch, rng)
        return Loss(loss.sum, jnp.int32(ROWS))

    program = linear_program(loss_fn=loss_fn)
    _, metrics = program.train_step(program.init(), linear_batch())
    assert metrics["sums"] == {} and np.isfinite(float(metrics["loss"]))


def test_heads_and_vocabulary_that_tensor_does_not_divide_are_moved_without_gathering_everything(capfd):
    # 2 key-value heads, 101 tokens. A new seed is a new program: one from the compile cache would bring no warnings.
    program = tiny_program("data=1,fsdp=2,tensor=4", devices=8, seed=time.time_ns() % 2**31)
    program.train_step.lower(program.plan.abstract, tiny_batch(program)).compile()
    assert "Involuntary full rematerialization" not in capfd.readouterr().err
