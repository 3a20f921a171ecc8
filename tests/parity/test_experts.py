"""A mixture of experts gives one answer on every mesh and accumulation, and goes on after a stop as if there were none.

Everything that a router adds is in it: a leading dense layer, shared experts, sigmoid scores, both losses with weights
that can be seen, and a bias that moves in every step.
"""

import jax
import numpy as np
import pytest

from jtrain import PretrainTrainer
from jtrain.errors import ConfigError
from tests.parity.runs import bits, settings, train, write_corpus

STEPS = 12
MODEL = {
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "router_aux_loss_coef": 0.05,
    "router_z_loss_coef": 0.01,
    "router_bias_update_rate": 0.002,
    "initializer_range": 0.1,
}
FIGURES = ("loss", "grad_norm", "aux_loss", "router_z_loss", "expert_load_max")

MESHES = {
    "fsdp2.tensor2.expert2": {
        "devices": 8,
        "mesh": {"data": 1, "fsdp": 2, "tensor": 2, "expert": 2},
        "gradient_accumulation_steps": 1,
    },
}
MORE = {
    "accumulation1": {"gradient_accumulation_steps": 1},
    "expert4": {"devices": 4, "mesh": {"data": 1, "expert": 4}},
    "expert8": {"devices": 8, "mesh": {"data": 1, "expert": 8}, "gradient_accumulation_steps": 1},
    "data2.fsdp2.expert2": {
        "devices": 8,
        "mesh": {"data": 2, "fsdp": 2, "expert": 2},
        "gradient_accumulation_steps": 1,
    },
    "tensor4": {"devices": 4, "mesh": {"data": 1, "tensor": 4}},
    "context2.expert2": {"devices": 4, "mesh": {"data": 1, "context": 2, "expert": 2}},
    "pipeline2.expert2": {"devices": 4, "mesh": {"data": 1, "pipeline": 2, "expert": 2}},
    "pipeline2.fsdp2.tensor2": {"devices": 8, "mesh": {"data": 1, "pipeline": 2, "fsdp": 2, "tensor": 2}},
    "remat full": {"model": MODEL | {"remat": "full"}},
    "remat minimal": {"model": MODEL | {"remat": "minimal"}},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def run(corpus, folder, **changes):
    config = settings(corpus, folder / "run", max_steps=STEPS, **({"model": MODEL} | changes))
    trainer = PretrainTrainer(config)
    initial = bits(trainer.state.params)
    trainer.fit()
    return initial, trainer.history.train, jax.device_get(trainer.state.variables)


@pytest.fixture(scope="module")
def reference_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("reference")


@pytest.fixture(scope="module")
def reference(corpus, reference_dir):
    return run(corpus, reference_dir)


def check(found, expected):
    (initial, lines, variables), (expected_initial, expected_lines, expected_variables) = found, expected
    assert initial == expected_initial
    for name in FIGURES:
        np.testing.assert_allclose(lines[0][name], expected_lines[0][name], rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(lines[-1]["loss"], expected_lines[-1]["loss"], rtol=1e-5)
    np.testing.assert_allclose(variables["router_bias"], expected_variables["router_bias"], atol=1e-8)
    assert not variables["router_load"].any()


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_and_another_accumulation_change_nothing(name, corpus, reference, tmp_path):
    check(run(corpus, tmp_path, **MESHES[name]), reference)


@pytest.mark.grid
@pytest.mark.parametrize("name", MORE)
def test_further_meshes_change_nothing(name, corpus, reference, tmp_path):
    check(run(corpus, tmp_path, **MORE[name]), reference)


def test_the_reference_learns_balances_and_says_how_full_its_experts_are(reference):
    _, lines, variables = reference
    assert lines[-1]["loss"] < 0.85 * lines[0]["loss"]
    assert all(1.0 <= line["expert_load_max"] <= 8 / 2 for line in lines)
    # A bias moves by one rate a step, or stays where a load is the mean: STEPS moves at most.
    moves = variables["router_bias"] / MODEL["router_bias_update_rate"]
    np.testing.assert_allclose(moves, np.round(moves), atol=1e-3)
    assert 0 < np.abs(moves).max() <= STEPS + 1e-3


def test_a_run_that_stops_goes_on_with_its_bias(corpus, reference, tmp_path):
    config = settings(corpus, tmp_path / "run", max_steps=STEPS, model=MODEL)
    train(config, stop_at=5)
    trainer, _ = train(config)
    lines = {line["step"]: line for line in trainer.history.train}
    for line in reference[1][-4:]:
        assert [lines[line["step"]][name] for name in FIGURES] == [line[name] for name in FIGURES]
    assert bits(trainer.state.variables) == bits(reference[2])


def test_a_run_that_starts_from_another_takes_its_bias(corpus, reference, reference_dir, tmp_path):
    bias = reference[2]["router_bias"]
    program = PretrainTrainer(settings(corpus, tmp_path / "run", max_steps=2, model=MODEL)).program
    found = program.init_from(str(reference_dir / "run")).variables["router_bias"]
    assert bias.any() and not program.init().variables["router_bias"].any()
    np.testing.assert_array_equal(found, bias)


def test_dropped_tokens_are_logged_where_experts_have_a_capacity(corpus, tmp_path):
    tight = {"num_experts": 4, "expert_capacity_factor": 0.5, "num_hidden_layers": 1, "dropout": 0.0}
    config = settings(corpus, tmp_path / "run", max_steps=2, model=tight)
    trainer, _ = train(config)
    # Half of an even share: at least half of the assignments of full rows find no place.
    assert all(0.3 < line["dropped_tokens"] < 0.9 for line in trainer.history.train)


@pytest.mark.parametrize(
    ("changes", "words", "remedy"),
    [
        ({"mesh": {"data": 1, "expert": 3}, "devices": 3}, "8 / 3 = 2.667 experts a device", "mesh.expert: 2 "),
        ({"mesh": {"data": 1, "expert": 2}, "devices": 2, "model": {}}, "has no experts", "mesh.data"),
        (
            {"mesh": {"data": 1, "context": 2}, "devices": 2, "model": MODEL | {"expert_capacity_factor": 1.0}},
            "tokens of a row share a capacity",
            "expert_capacity_factor: 0",
        ),
    ],
)
def test_experts_that_do_not_fit_the_mesh_are_refused_with_what_to_change(changes, words, remedy, corpus, tmp_path):
    config = settings(corpus, tmp_path / "run", **({"model": MODEL, "global_batch_size": 12} | changes))
    with pytest.raises(ConfigError, match=words) as caught:
        PretrainTrainer(config)
    assert remedy in caught.value.remedy
