"""Training of adapters: on meshes, what it costs, from a base run, resumed, and what is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain import PretrainTrainer, load_model
from jtrain.checkpoint import arrays
from jtrain.errors import CheckpointError
from jtrain.models.decoder import Decoder
from jtrain.models.lora import Lora, add_lora
from jtrain.models.presets import preset
from jtrain.parallel.sharding import bytes_per_device
from jtrain.tasks.importing import save
from jtrain.tasks.loaded import drawn
from jtrain.tasks.pretrain import pretrain_loss
from jtrain.train.adapters import counts, has_adapters
from jtrain.train.program import build_program, mesh_and_batch
from tests.parity.runs import bits, settings, train, write_corpus
from tests.train.tiny import put

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "remat": "none",
}  # fmt: skip
QUANTIZED = Lora(rank=4, quantization="nf4", targets=("k_proj", "o_proj"))
ALL = Lora(rank=4, dropout=0.2, dora=True, quantization="nf4")
ROWS, LENGTH = 8, 16


def program(lora, mesh=None, devices=1, shape=(), **config):
    from jtrain.config import load_config

    fields = {"precision": "32-true", "max_steps": 20, "max_length": LENGTH, "global_batch_size": ROWS}
    fields |= {"xla_options": {"xla_backend_optimization_level": 0}, "optimizer": {"learning_rate": 1e-2}}
    fields |= ({} if mesh is None else {"mesh": mesh}) | config
    checked, built, batch = mesh_and_batch(load_config(fields, env={}), jax.devices()[:devices])
    decoder = preset("llama-tiny", **SHAPE | dict(shape))

    def model(rngs):
        module = Decoder(decoder, rngs)
        return module if lora is None else add_lora(module, lora, key=rngs.params())

    return build_program(checked, model, pretrain_loss(), mesh=built, batch=batch, max_steps=20)


def batch_of(program):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 64, (ROWS, LENGTH)).astype(np.int32)
    rows = {"input_ids": ids, "labels": ids, "segment_ids": np.ones_like(ids)}
    return put(program, rows | {"position_ids": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))})


def steps(program, count=3):
    state, batch, figures = program.init(), batch_of(program), []
    for _ in range(count):
        state, metrics = program.train_step(state, batch)
        figures.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return state, figures


@pytest.fixture(scope="module")
def alone():
    """Three steps on one device, each once: the program, the parameters before and after, and the figures."""
    made = {}

    def of(lora):
        if lora not in made:
            one = program(lora)
            before = jax.device_get(one.init().params)
            state, figures = steps(one)
            made[lora] = one, before, jax.device_get(state.params), figures
        return made[lora]

    return of


def grid(*values):
    return pytest.param(*values, marks=pytest.mark.grid)


@pytest.mark.parametrize("lora, mesh, config", [
    (QUANTIZED, {"data": 1, "fsdp": 2, "tensor": 2}, {}),
    grid(QUANTIZED, {"data": 1, "pipeline": 2}, {}),
    grid(ALL, {"data": 1, "fsdp": 2, "tensor": 2}, {}),
    grid(ALL, {"data": 1, "pipeline": 2}, {"gradient_accumulation_steps": 2}),
    grid(ALL, {"data": 2}, {}),
    grid(ALL, {"data": 1, "context": 2}, {}),
    grid(ALL, {"data": 1, "tensor": 4}, {}),
    grid(ALL, {"data": 1, "fsdp": 2, "pipeline": 2, "tensor": 2}, {}),
    grid(Lora(rank=4, quantization="int8"), {"data": 1, "fsdp": 2}, {"gradient_accumulation_steps": 2}),
], ids=lambda x: "-".join(x) if isinstance(x, dict) else x.quantization + "-dora" * x.dora)  # fmt: skip
def test_every_mesh_gives_one_answer(alone, lora, mesh, config):
    """Kernels are cut over fsdp and tensor in few bits; the masks of dropout are those of the global rows."""
    _, _, params, figures = alone(lora)
    made = program(lora, mesh, int(np.prod(list(mesh.values()))), **config)
    state, got = steps(made)
    np.testing.assert_allclose(got, figures, rtol=2e-5)
    for path, leaf in arrays.flatten(jax.device_get(state.params)).items():
        np.testing.assert_allclose(leaf, arrays.flatten(params)[path], atol=2e-4, err_msg=path)


def test_only_adapters_change(alone):
    made, before, after, figures = alone(QUANTIZED)
    for (path, old), new in zip(arrays.flatten(before).items(), arrays.flatten(after).values(), strict=True):
        assert (old.tobytes() != new.tobytes()) == has_adapters([path]), path
    assert figures[2][0] < figures[0][0]
    trained, total = counts(made.model, made.plan.trainable)
    kernels = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64)
    assert total - trained == kernels + 2 * 2 * 32 + 32 + 64 * 32  # of which NF4 keeps two in a byte


def test_what_the_compiled_step_holds_and_computes_falls():
    """Moments for adapters only, and no gradient of a kernel: of three products a frozen one has two."""
    shape = {"hidden_size": 64, "intermediate_size": 512}
    made, full = program(Lora(rank=1, targets=("q_proj",)), shape=shape), program(None, shape=shape)
    trained, _ = counts(made.model, made.plan.trainable)
    moments, all_moments = (bytes_per_device(p.plan.abstract.opt_state) for p in (made, full))
    assert moments == 2 * 4 * trained + 2 * 4 < all_moments / 100  # two moments and two counters
    batch = batch_of(made)
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in batch.items()}
    frozen, whole = (p.train_step.lower(p.plan.abstract, shapes) for p in (made, full))
    assert frozen.cost_analysis()["flops"] < 0.8 * whole.cost_analysis()["flops"]
    arguments = frozen.compile().memory_analysis().argument_size_in_bytes
    assert abs(arguments - bytes_per_device(made.plan.abstract) - sum(x.nbytes for x in batch.values())) < 1024


def test_kernels_in_nf4_take_less_than_six_tenths_of_a_byte():
    made = program(Lora(rank=4, quantization="nf4"), shape={"hidden_size": 128, "intermediate_size": 256})
    flat = arrays.flatten(made.plan.abstract.params)
    size = sum(leaf.size * leaf.dtype.itemsize for path, leaf in flat.items() if "/kernel/" in path)
    weights = sum(leaf.size * 2 for path, leaf in flat.items() if path.endswith("kernel/codes"))
    assert size / weights <= 0.6


@pytest.mark.parametrize("precision, base, stored", [
    ("bf16-mixed", "auto", "bfloat16"), ("32-true", "auto", "float32"), ("bf16-mixed", None, "float32"),
    ("32-true", "bfloat16", "bfloat16"),
])  # fmt: skip
def test_the_frozen_model_is_stored_as_it_is_asked_for_and_adapters_in_float32(precision, base, stored):
    made = program(Lora(rank=4, dtype=base, quantization="int8"), precision=precision, optimizer={"ema_decay": 0.9})
    for path, leaf in arrays.flatten(made.plan.abstract.params).items():
        scale, codes = path.endswith("kernel/scale"), path.endswith("codes")
        assert leaf.dtype == ("int8" if codes else "float32" if scale or has_adapters([path]) else stored), path
    averaged = arrays.flatten(made.plan.abstract.ema)
    assert averaged and has_adapters(averaged) and all(has_adapters([path]) for path in averaged)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Adapters on a base: six steps at once, and broken off after two and resumed."""
    folder = tmp_path_factory.mktemp("runs")
    corpus = write_corpus(folder)
    lora = {"rank": 4, "dropout": 0.1, "dora": True, "base": "nf4", "targets": ["q_proj", "down_proj"]}
    changes = {
        "max_steps": 6, "gradient_accumulation_steps": 1, "optimizer": {"learning_rate": 5e-2},
        "xla_options": {"xla_backend_optimization_level": 0}, "model": {"lora": lora, "dropout": 0.0},
        "checkpoint": {"init_from": str(folder / "base")},
    }  # fmt: skip
    whole = PretrainTrainer(settings(corpus, folder / "whole", **changes))
    save(drawn(whole.decoder, seed=1), folder / "base", {})
    whole.fit()
    train(settings(corpus, folder / "broken", **changes), stop_at=2)
    broken, _ = train(settings(corpus, folder / "broken", **changes))
    return folder, whole, broken


def test_a_resumed_run_of_adapters_is_the_uninterrupted_one_bit_by_bit(runs):
    _, whole, broken = runs
    assert int(whole.state.step) == 6
    assert bits(whole.state) == bits(broken.state)
    assert whole.history.train[-1]["loss"] < whole.history.train[0]["loss"]


def test_the_base_of_a_run_is_what_init_from_names_and_its_model_loads_merged(runs):
    """What is quantised is the base run's kernel in float32; lengths begin as those of what is kept of it."""
    folder, whole, _ = runs
    base = arrays.flatten(load_model(str(folder / "base")).params)
    params = arrays.flatten(jax.device_get(whole.state.params))
    assert bits(params["embed_tokens/embedding"]) == bits(base["embed_tokens/embedding"])
    module = whole.program.model.merge(jax.device_get(whole.state.params), jax.device_get(whole.state.variables))
    kept = np.asarray(module.layers.mlp.up_proj.kernel[...])
    off = np.abs(kept - np.asarray(base["layers/mlp/up_proj/kernel"]))
    assert 0 < off.max() < 0.17 * np.abs(base["layers/mlp/up_proj/kernel"]).max()  # half the widest gap of the table

    ids = np.random.default_rng(0).integers(0, 200, (2, 8))
    loaded = load_model(str(folder / "whole"))
    assert not has_adapters(arrays.flatten(loaded.params))
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(loaded(ids), module(jnp.asarray(ids)), atol=2e-5)


def test_a_run_of_adapters_goes_on_from_another_and_a_plain_run_can_not(runs):
    folder, whole, _ = runs
    state = whole.program.init_from(str(folder / "whole"))
    assert bits(state.params) == bits(whole.state.params) and int(state.step) == 0
    plain = program(None, shape={"vocab_size": whole.decoder.vocab_size, "num_hidden_layers": 2})
    with pytest.raises(CheckpointError, match=r"model\.path"):
        plain.init_from(str(folder / "whole"))


@pytest.mark.grid
def test_experts_in_nf4_give_one_answer_over_expert_and_fsdp():
    shape = {"num_experts": 4, "moe_intermediate_size": 16, "n_shared_experts": 1}
    lora = Lora(rank=4, quantization="nf4", targets=("q_proj",))
    _, want = steps(program(lora, shape=shape))
    mesh = {"data": 1, "fsdp": 2, "expert": 2}
    _, got = steps(program(lora, mesh, 4, shape=shape))
    np.testing.assert_allclose(got, want, rtol=2e-5)


@pytest.mark.grid
def test_fp8_trains_as_bfloat16_does_within_its_rounding():
    """Ten steps on one batch; emulated, with the numbers of a device that has 8-bit products."""
    figures = {}
    for precision, fp8 in (("bf16-mixed", "native"), ("fp8-mixed", "emulate")):
        made = program(None, precision=precision, fp8=fp8, optimizer={"learning_rate": 3e-3})
        figures[precision] = np.array(steps(made, 10)[1])
    bf16, eight = figures["bf16-mixed"], figures["fp8-mixed"]
    assert bf16[-1, 0] < bf16[0, 0] - 0.5
    np.testing.assert_allclose(eight[:, 0], bf16[:, 0], rtol=0.02)  # losses
    np.testing.assert_allclose(eight[:3, 1], bf16[:3, 1], rtol=0.1)  # gradient norms
    assert np.abs(eight - bf16).max() > 1e-4
