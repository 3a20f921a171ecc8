"""Repro bundles: what ends a run is kept so that it can be made again, bit by bit, and says where it went wrong."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jtrain import Loss
from jtrain.checkpoint import Checkpoints
from jtrain.errors import CheckpointError, NumbersError
from jtrain.train.bundle import read_bundle
from jtrain.train.nonfinite import Place, first_nonfinite
from jtrain.train.replay import replay
from tests.train.fits import BATCH, examples, make, squared_error
from tests.train.tiny import tiny_batch, tiny_program


def rows(bad=(), value=np.nan):
    data = examples(32 * BATCH)
    for number in bad:
        data["y"][number * BATCH : (number + 1) * BATCH] *= value
    return data


def dropped(model, batch, rng):
    """The squared error of a random half of the rows: another one in every step."""
    keep = jax.random.bernoulli(rng, 0.5, batch["row_weight"].shape)
    return squared_error(model, batch | {"row_weight": batch["row_weight"] * keep}, rng)


FIELDS = {"max_steps": 16, "checkpoint": {"save_steps": 4}, "loss_fn": dropped}
ENDS = {
    "stop": ({"nonfinite": "stop"}, [10], np.nan),
    "first": ({"max_consecutive_skips": 1, "max_rollbacks": 0}, [10], np.nan),
    "streak": ({"max_consecutive_skips": 3, "max_rollbacks": 0}, [7, 10, 11, 12], np.nan),
    "spike": ({"spike": "rollback", "spike_window": 8, "max_rollbacks": 0}, [10], 1e4),
    "all": (
        {"spike": "rollback", "spike_window": 8, "max_rollbacks": 1, "max_consecutive_skips": 2},
        range(10, 32),
        1e4,
    ),
}


def bundle_of(folder):
    (found,) = (Path(folder) / "bundles").iterdir()
    return found


@pytest.mark.parametrize(
    "end", ["streak", *(pytest.param(end, marks=pytest.mark.faults) for end in ENDS if end != "streak")]
)
def test_b3_the_batch_that_ends_a_run_can_be_made_again_bit_by_bit(end, tmp_path):
    faults, bad, value = ENDS[end]
    trainer = make(tmp_path, rows=rows(bad, value), faults=faults, **FIELDS)
    with pytest.raises(NumbersError, match="jtrain replay") as caught:
        trainer.fit()
    folder = bundle_of(tmp_path)
    assert str(folder) in caught.value.remedy
    said, batch = read_bundle(folder)
    number = {"streak": 12, "all": 11}.get(end, 10)
    assert said["batch"] == number
    np.testing.assert_array_equal(batch["y"].reshape(-1), rows(bad, value)["y"][number * BATCH : (number + 1) * BATCH])
    program = make(tmp_path / "elsewhere", rows=rows(), faults=faults, **FIELDS).program
    found = replay(program, folder)
    with Checkpoints(folder, read_only=True) as checkpoints:
        numbers = checkpoints.restore(program.plan.abstract)[0].numbers
    assert numbers is None or not numbers.halted  # as it was before the batch
    (step,) = found["steps"]
    assert step["equal"] and found["state"]["equal"] and found["changed"] == {}
    assert step["finite"] == (end in ("spike", "all")) and step.get("spike", False) == (end in ("spike", "all"))
    where = [] if step["finite"] else [{"kind": "batch", "name": "y", "layers": (), "micro_batches": ()}]
    assert found["nonfinite"] == where
    assert json.loads(json.dumps(found))["step"] == said["step"]


def test_an_update_can_be_kept_by_request_and_changes_nothing(tmp_path):
    kept = make(tmp_path / "kept", rows=rows(), faults={"bundle_step": 6}, **FIELDS)
    plain = make(tmp_path / "plain", rows=rows(), **FIELDS)
    for trainer in (kept, plain):
        trainer.fit()
    np.testing.assert_array_equal(kept.state.params["w"], plain.state.params["w"])
    found = replay(plain.program, bundle_of(tmp_path / "kept"))
    assert (found["step"], found["batch"], found["reason"]) == (6, 5, "faults.bundle_step")
    assert found["steps"][0]["equal"] and found["state"]["equal"] and found["nonfinite"] == []


def test_on_another_mesh_the_state_is_the_same_and_what_changed_is_told(tmp_path):
    trainer = make(tmp_path, rows=rows(), faults={"bundle_step": 6}, **FIELDS)
    trainer.fit()
    other = make(tmp_path / "other", rows=rows(), **FIELDS | {"devices": 4, "mesh": "data=4"})
    found = replay(other.program, bundle_of(tmp_path))
    assert found["state"]["equal"] and set(found["changed"]) == {"mesh", "devices"}
    recorded, again = found["steps"][0]["recorded"], found["steps"][0]
    np.testing.assert_allclose(again["loss"], recorded["loss"], rtol=1e-6)


def test_nothing_of_a_bundle_is_a_pickle_and_a_damaged_one_is_refused(tmp_path):
    make(tmp_path, rows=rows(), faults={"bundle_step": 2}, **FIELDS).fit()
    folder = bundle_of(tmp_path)
    for path in folder.rglob("*"):
        assert path.suffix not in (".pkl", ".pickle", ".npy", ".npz", ".pt", ".bin")
        assert path.is_dir() or not path.read_bytes().startswith(b"\x80\x04")
    program = make(tmp_path / "elsewhere", rows=rows(), **FIELDS).program
    batch = folder / "batch.safetensors"
    content = batch.read_bytes()
    batch.write_bytes(content[:100])
    with pytest.raises(CheckpointError, match="is damaged"):
        replay(program, folder)
    batch.write_bytes(content)
    manifest = folder / "bundle.json"
    said = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(said | {"format": 99}))
    with pytest.raises(CheckpointError, match="newer format"):
        replay(program, folder)
    manifest.unlink()  # the run was killed while it wrote
    with pytest.raises(CheckpointError, match=r"is no bundle: bundle\.json is missing"):
        replay(program, folder)


def test_a_bundle_that_cant_be_written_does_not_hide_why_the_run_ends(tmp_path):
    trainer = make(tmp_path, rows=rows([10]), faults={"nonfinite": "stop"}, **FIELDS)
    (tmp_path / "bundles").write_text("a file is in the way")
    with pytest.raises(NumbersError, match="update 11 is not finite") as caught:
        trainer.fit()
    assert "replay" not in caught.value.remedy


# Where numbers first stop being finite


@pytest.fixture(scope="module")
def decoder():
    return tiny_program(optimizer=optax.sgd(0.1), gradient_accumulation_steps=2)


def places(program, change=lambda params: None, batch=None):
    state = program.init()
    change(state.params)
    return first_nonfinite(program, state, tiny_batch(program) if batch is None else batch)


def test_a_state_and_batch_that_are_fine_have_no_such_place(decoder):
    assert places(decoder) == []


def test_a_parameter_is_named_with_its_layer(decoder):
    def change(params):
        scale = params["layers"]["attention_norm"]["scale"]
        params["layers"]["attention_norm"]["scale"] = scale.at[1, 3].set(jnp.nan)

    assert places(decoder, change) == [Place("parameter", "layers/attention_norm/scale", (1,))]


def test_a_layer_whose_outcome_overflows_is_named(decoder):
    def change(params):  # finite by itself: 1e30 times 1e30 is not
        for name in ("up_proj", "down_proj"):
            kernel = params["layers"]["mlp"][name]["kernel"]
            params["layers"]["mlp"][name]["kernel"] = kernel.at[1].set(1e30)

    (found,) = places(decoder, change)
    assert found == Place("layer", "0", (1,), (0, 1))


def test_what_goes_into_the_first_layer_is_told_from_the_layers(decoder):
    program = tiny_program(optimizer=optax.sgd(0.1), precision="16-mixed")

    def change(params):  # above the largest number of float16
        params["embed_tokens"]["embedding"] = params["embed_tokens"]["embedding"].at[:].set(1e6)

    (found,) = places(program, change)
    assert found.kind == "embedding" and found.micro_batches == (0,)


def test_a_gradient_that_overflows_behind_a_finite_loss_is_named(tmp_path):
    def loss(model, batch, rng):
        good = squared_error(model, batch, rng)
        return Loss(good.sum + jnp.sqrt(model.b[...] * 0.0), good.count)  # 0, and the slope there is infinite

    trainer = make(tmp_path, rows=rows(), loss_fn=loss)
    with trainer.train_loader() as loader:
        found = first_nonfinite(trainer.program, trainer.state, loader[0])
    assert found == [Place("gradient", "b")]
