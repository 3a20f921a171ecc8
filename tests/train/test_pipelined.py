"""Pipelines of a model that is not ours, and what no pipeline can run. Our own models: tests/parity/test_grid.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jtrain import Loss, load_config, scan_layers
from jtrain.errors import ConfigError
from jtrain.models.decoder import Decoder
from jtrain.models.presets import preset
from jtrain.parallel.pipeline import executor
from jtrain.parallel.pipeline.residuals import Residuals
from jtrain.tasks.pretrain import pretrain_loss
from jtrain.train.pipelined import Pipeline
from jtrain.train.program import build_program, mesh_and_batch, pipeline_of

WIDTH, ROWS = 6, 8
LONG = 256  # tokens of a row, where activations shall weigh more than weights


class Foreign(nnx.Module):
    """Equal blocks stacked along a leading axis, without a word about axes; every block also reads `mix`."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 5, runs: int = 1):
        key = rngs.params()
        draw = lambda i, *shape: jax.random.normal(jax.random.fold_in(key, i), shape, jnp.float32) / 3
        self.embed = nnx.Param(draw(0, 3, WIDTH))
        self.blocks = nnx.Param(draw(1, layers, WIDTH, WIDTH))
        self.gains = nnx.Param(1 + draw(2, layers, WIDTH))
        self.mix = nnx.Param(draw(3, WIDTH, WIDTH))
        self.out = nnx.Param(draw(4, WIDTH))
        self.runs = runs

    def __call__(self, x):
        mix = self.mix[...]

        def block(carry, layer):
            h, penalty = carry
            (kernel, gain), scale = layer
            new = h + jnp.tanh(h @ kernel * gain + h @ mix) * scale
            return new, penalty + jnp.square(new).mean(-1)

        h = jnp.tanh(x @ self.embed[...])
        carry = h, jnp.zeros(h.shape[:1], h.dtype)
        for _ in range(self.runs):
            scales = jnp.linspace(0.5, 1.5, self.blocks[...].shape[0], dtype=h.dtype)
            carry = scan_layers(block, carry, (self.blocks[...], self.gains[...]), scales)
        return carry[0] @ self.out[...] + h.sum(-1), carry[1]


def foreign_loss(model, batch, rng):
    y, penalty = model(batch["x"])
    live = batch["live"]
    wrong = jnp.square(y - batch["y"]) + 0.1 * penalty
    return Loss((wrong * live).sum(), live.sum(), {"penalty": ((penalty * live).sum(), live.sum())})


def program(model=Foreign, loss=foreign_loss, devices=1, **config):
    """A step that keeps its gradients among the figures; SGD."""

    def keep(gradients, state, metrics):
        return gradients, metrics | {"gradients": gradients}

    fields = {"precision": "64-true", "max_steps": 9, "global_batch_size": ROWS, "optimizer": {"max_grad_norm": 0.0}}
    checked, mesh, batch = mesh_and_batch(load_config(fields | config, env={}), jax.devices()[:devices])
    return build_program(
        checked, model, loss, mesh=mesh, batch=batch, max_steps=9, optimizer=optax.sgd(0.1), step_hook=keep
    )


def batch_of(p):
    generator = np.random.default_rng(0)
    rows = {
        "x": generator.normal(size=(ROWS, 3)),
        "y": generator.normal(size=ROWS),
        "live": (generator.random(ROWS) > 0.4).astype(np.float64),
        "row": np.arange(ROWS, dtype=np.int32),
    }
    split = {name: value.reshape(p.batch.accumulation, -1, *value.shape[1:]) for name, value in rows.items()}
    return {name: jax.device_put(value, NamedSharding(p.mesh, p.batch_sharding.spec)) for name, value in split.items()}


def figures(p):
    state, metrics = p.train_step(p.init(), batch_of(p))
    evaluated = p.eval_step(state.params, state.variables, batch_of(p))
    return jax.tree.map(np.asarray, (metrics["gradients"], metrics["loss"], metrics["sums"], evaluated.sum))


def close(a, b, tolerance=1e-10):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.abs(x - y).max() <= tolerance * np.abs(y).max()


@pytest.fixture(scope="module")
def alone():
    with jax.enable_x64(True):
        return figures(program())


@pytest.mark.parametrize(
    ("mesh", "devices", "section"),
    [
        ("pipeline=2,data=1", 2, {"schedule": "1f1b", "microbatches": 4}),
        ("pipeline=2,data=2", 4, {"virtual_stages": 2, "microbatches": 2, "residuals": "save"}),
        ("pipeline=2,fsdp=2,data=1", 4, {"schedule": "gpipe", "microbatches": 4, "residuals": "save"}),
    ],
)
def test_a_foreign_model_gives_the_gradients_of_one_device(alone, mesh, devices, section):
    with jax.enable_x64(True):
        p = program(mesh=mesh, devices=devices, pipeline=section)
        close(figures(p), alone)


def test_residuals_over_the_weights_of_another_chunk_give_other_gradients(alone, monkeypatch):
    """Why `Residuals.backward` puts the weights back: with one chunk a stage the mistake would not be seen."""

    def careless(self, kept, chunk, shared, micro, carry, number):
        first = [leaf[0] for leaf in careless.weights]
        return original(self, kept, first, shared, micro, carry, number)

    original, start = Residuals.backward, executor._Loop.start

    def watched(self, variables):
        careless.weights = self.weights
        return start(self, variables)

    monkeypatch.setattr(Residuals, "backward", careless)
    monkeypatch.setattr(executor._Loop, "start", watched)
    with jax.enable_x64(True):
        one = program(mesh="pipeline=2,data=1", devices=2, pipeline={"residuals": "save"})
        close(figures(one)[0], alone[0])
        two = program(mesh="pipeline=2,data=1", devices=2, pipeline={"residuals": "save", "virtual_stages": 2})
        with pytest.raises(AssertionError):
            close(figures(two)[0], alone[0], tolerance=1e-2)


@pytest.mark.parametrize(
    ("model", "loss", "words"),
    [
        (
            lambda rngs: Foreign(rngs, layers=1),
            foreign_loss,
            ["mesh.pipeline=2 stages", "1 layers", "mesh.pipeline: 1"],
        ),
        (lambda rngs: Foreign(rngs, runs=2), foreign_loss, ["runs the stack of layers twice", "concatenate"]),
        (
            Foreign,
            lambda model, batch, rng: Loss(model.out[...].sum(), jnp.ones(())),
            ["run no stack of layers", "jtrain.scan_layers"],
        ),
    ],
)
def test_what_no_pipeline_can_run_is_refused(model, loss, words):
    p = program(model, loss, devices=2, mesh="pipeline=2,data=1", precision="32-true")
    with pytest.raises(ConfigError) as error:
        p.train_step.lower(p.plan.abstract, shapes(p, {"x": (3,), "y": (), "live": ()}, jnp.float32))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"microbatches": 3}, ["pipeline.microbatches=3", "8 rows", "pipeline.microbatches: 2", "1, 2, 4, 8"]),
        ({"schedule": "interleaved"}, ["virtual_stages=1", "virtual_stages: 2"]),
        ({"schedule": "1f1b", "virtual_stages": 2}, ["schedule='1f1b'", "schedule: interleaved"]),
    ],
)
def test_sections_that_do_not_fit_are_refused_with_the_nearest_that_do(section, words):
    with pytest.raises(ConfigError) as error:
        program(devices=2, mesh="pipeline=2,data=1", pipeline=section)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("section", "accumulation", "expected"),
    [
        ({}, 1, Pipeline("1f1b", 2, 8)),  # at least 4 x 2, and as many as there are rows
        ({"microbatches": 2}, 1, Pipeline("gpipe", 2, 2)),  # auto: it holds as little, and its program is smaller
        ({"microbatches": 2}, 2, Pipeline("1f1b", 2, 2)),  # four go through in one run
        ({"schedule": "gpipe"}, 1, Pipeline("gpipe", 2, 8)),
        ({"schedule": "1f1b", "microbatches": 1, "residuals": "save"}, 1, Pipeline("1f1b", 2, 1, recompute=False)),
        ({"virtual_stages": 3}, 1, Pipeline("interleaved", 2, 8, 3)),
        ({"schedule": "gpipe", "virtual_stages": 2}, 1, Pipeline("gpipe", 2, 8, 2)),
    ],
)
def test_the_section_says_how_the_step_is_pipelined(section, accumulation, expected):
    fields = {"global_batch_size": 8 * accumulation, "gradient_accumulation_steps": accumulation, "max_steps": 1}
    config, mesh, batch = mesh_and_batch(
        load_config(fields | {"mesh": "pipeline=2,data=1", "pipeline": section}, env={}), jax.devices()[:2]
    )
    assert pipeline_of(config, mesh, batch) == expected


def shapes(p, columns, dtype):
    lead = (p.batch.accumulation, p.batch.total // p.batch.accumulation)
    made = {
        name: jax.ShapeDtypeStruct((*lead, *rest), dtype, sharding=p.batch_sharding) for name, rest in columns.items()
    }
    return made | {"row": jax.ShapeDtypeStruct(lead, jnp.int32, sharding=p.batch_sharding)}


def temporary_bytes(microbatches, *, mesh="pipeline=4,data=1", devices=4, shape=None, length=64, **section):
    """Of the compiled step of a small decoder, one row a micro-batch and rank."""
    rows = microbatches * (2 if "fsdp" in mesh else 1)
    fields = {"max_steps": 9, "max_length": length, "global_batch_size": rows, "precision": "32-true", "mesh": mesh}
    fields |= {"pipeline": {"microbatches": microbatches, **section}}
    checked, built, batch = mesh_and_batch(load_config(fields, env={}), jax.devices()[:devices])
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    decoder = preset("llama-tiny", **sizes | {"num_attention_heads": 2, "remat": "full"} | (shape or {}))
    p = build_program(
        checked, lambda rngs: Decoder(decoder, rngs), pretrain_loss(), mesh=built, batch=batch, max_steps=9
    )
    columns = dict.fromkeys(("input_ids", "labels", "segment_ids", "position_ids"), (length,))
    step = p.train_step.lower(p.plan.abstract, shapes(p, columns, jnp.int32))
    return step.compile({"xla_backend_optimization_level": 0}).memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_the_number_of_micro_batches():
    few, many = temporary_bytes(16, schedule="1f1b"), temporary_bytes(256, schedule="1f1b")
    batch = (256 - 16) * (4 * 64 + 1) * 4  # jaxlib 0.10.2 copies the step's arguments: tokens, not activations
    assert min(abs(many - few), abs(many - few - batch)) <= 0.01 * few


class Chain(nnx.Module):
    """Wide activations, few weights: [b, 256, 64] through 8 layers."""

    def __init__(self, rngs: nnx.Rngs):
        key = rngs.params()
        self.kernels = nnx.Param(jax.random.normal(key, (8, 64, 64)) / 8, out_sharding=("layers", None, None))

    def __call__(self, x):
        return scan_layers(lambda h, layer: h + jnp.tanh(h @ layer[0]), x, self.kernels[...])


def chain_loss(model, batch, rng):
    y = model(jnp.broadcast_to(batch["x"][..., None], (*batch["x"].shape, 64)))
    return Loss(jnp.square(y).sum(), jnp.float32(y.size))


def usual_step(mesh, microbatches):
    """The usual pipeline: a scan over ticks, each checkpointed, that JAX differentiates; inputs and outputs for all."""
    stages = mesh.shape["pipeline"]
    shift = [(i, (i + 1) % stages) for i in range(stages)]

    def run(kernels, x_MBLD):
        stage = jax.lax.axis_index("pipeline")

        def tick(arriving, number):
            entering = x_MBLD[jnp.minimum(number, microbatches - 1)]
            x = jnp.where(stage == 0, entering, arriving)
            y, _ = jax.lax.scan(lambda h, kernel: (h + jnp.tanh(h @ kernel), None), x, kernels)
            return jax.lax.ppermute(y, "pipeline", shift), y

        start = jnp.zeros(x_MBLD.shape[1:], x_MBLD.dtype)
        _, ys = jax.lax.scan(jax.checkpoint(tick), start, jnp.arange(microbatches + stages - 1))
        return ys[None, stages - 1 :]

    specs = {"in_specs": (PartitionSpec("pipeline"), PartitionSpec()), "out_specs": PartitionSpec("pipeline")}
    mapped = jax.shard_map(run, mesh=mesh, axis_names={"pipeline"}, check_vma=False, **specs)

    def loss(kernels, x):
        wide = jnp.broadcast_to(x[..., None], (*x.shape, 64))
        return jnp.square(mapped(kernels, wide)[-1]).sum()

    return jax.jit(jax.grad(loss))


@pytest.mark.grid
def test_differentiating_through_the_loop_needs_many_times_the_memory():
    count = 256
    p = program(Chain, chain_loss, devices=4, mesh="pipeline=4,data=1", precision="32-true", global_batch_size=count,
                pipeline={"schedule": "1f1b", "microbatches": count})  # fmt: skip
    ours = p.train_step.lower(p.plan.abstract, shapes(p, {"x": (LONG,)}, jnp.float32)).compile()
    kernels = p.plan.abstract.params["kernels"]
    assert kernels.sharding.shard_shape(kernels.shape)[0] == 2
    x = jax.ShapeDtypeStruct((count, 1, LONG), jnp.float32, sharding=NamedSharding(p.mesh, PartitionSpec()))
    usual = usual_step(p.mesh, count).lower(kernels, x).compile()
    ours, usual = (program.memory_analysis().temp_size_in_bytes for program in (ours, usual))
    assert usual >= 8 * ours, f"{usual / 2**20:.1f} MiB against {ours / 2**20:.1f} MiB"


@pytest.mark.grid
def test_interleaving_holds_less_where_a_chunks_own_residuals_weigh_most():
    """Half as many layers a chunk: half the residuals of the backward that runs. More chunk inputs wait in the ring."""
    wide = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 16, "remat": "none"}
    common = {"mesh": "pipeline=4,fsdp=2,data=1", "devices": 8, "shape": wide, "length": LONG}
    assert temporary_bytes(64, virtual_stages=2, **common) < temporary_bytes(64, schedule="1f1b", **common)
