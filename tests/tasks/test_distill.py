"""The distillation trainer: TRL's numbers, exact evaluation, meshes and roles, resume, and what is refused."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jtrain import Callback
from jtrain.config.load import load_config
from jtrain.errors import ConfigError, DataError
from jtrain.tasks.distill_loss import distillation_of
from tests.parity.runs import bits

from .preferences import GOLDENS, first_line, settings, trained, word_model

GOLDEN = json.loads((GOLDENS / "distillation.json").read_text())
ROWS = GOLDEN["rows"]
grid = pytest.mark.grid


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    word_model(folder / "model")
    word_model(folder / "teacher", "qwen2")
    return folder


@pytest.fixture
def place(models, tmp_path):
    """A folder for a run, with the models in it."""
    for name in ("model", "teacher"):
        (tmp_path / name).symlink_to(models / name)
    return tmp_path


def config_of(place, section=(), **changes):
    return settings(place, "distill", distill={"teacher": str(place / "teacher"), **dict(section)}, **changes)


@pytest.mark.parametrize(
    "golden",
    [
        pytest.param(case, marks=() if number in (2, 5) else grid, id=str(case["options"]))
        for number, case in enumerate(GOLDEN["cases"])
    ],
)
def test_the_first_step_has_trls_loss_and_norm_of_gradient(place, golden):
    line = first_line(config_of(place, golden["options"]), ROWS)
    assert line["loss"] == pytest.approx(golden["loss"], rel=1e-5)
    assert line["grad_norm"] == pytest.approx(golden["grad_norm"], rel=1e-4)
    assert line["entropy"] == pytest.approx(golden["entropy"], rel=1e-5)


@grid
@pytest.mark.parametrize(
    "section",
    [{}, {"top_k": 5, "loss": "reverse_kl"}, {"loss": "jsd", "beta": 0.3, "ce_weight": 0.5, "temperature": 2.0}],
    ids=str,
)
def test_accumulation_and_meshes_change_nothing(place, section):
    figures = []
    names = ("loss", "grad_norm", "kl", "nll", "agreement", "teacher_nll", "teacher_entropy")
    for layout in (
        {},
        {"gradient_accumulation_steps": 2},
        {"devices": 8, "mesh": "fsdp=2,tensor=2,pipeline=2"},
        {"devices": 8, "mesh": "fsdp=2,tensor=2,context=2"},
        {"devices": 4, "mesh": "fsdp=2,tensor=2", "roles": {"teacher": {"tensor": 4}}},
        {"devices": 4, "mesh": "fsdp=2", "roles": {"teacher": {"devices": 2, "fsdp": 2}}},
    ):
        shutil.rmtree(place / "run", ignore_errors=True)
        line = first_line(config_of(place, section, max_steps=2, **layout), ROWS)
        figures.append([line[name] for name in names])
    for other in figures[1:]:
        np.testing.assert_allclose(other, figures[0], rtol=2e-5, atol=2e-6)


def test_an_evaluation_counts_tokens_whatever_the_batch_the_mesh_and_the_packing(place):
    """One device, rows of one example; then two devices, rows that are packed, batches of another size."""
    section = {"top_k": 7, "ce_weight": 0.25}
    trainer = trained(config_of(place, section, eval={"batch_size": 3}), ROWS, eval_dataset=ROWS)
    first = trainer.history.eval[0]
    layout = {"devices": 2, "mesh": "fsdp=2", "data": {"packing": "best_fit", "buckets": []}, "max_length": 16}
    packed = config_of(place, section, eval={"batch_size": 2}, run_dir=str(place / "other"), **layout)
    other = type(trainer)(packed, train_dataset=ROWS, eval_dataset=ROWS)
    other.state = other.program.init_from(str(place / "run"))
    other = other.evaluate()
    for name in ("eval_loss", "eval_kl", "eval_nll", "eval_teacher_nll", "eval_entropy", "perplexity"):
        assert other[name] == pytest.approx(first[name], rel=1e-6), name
    assert first["eval_loss"] == pytest.approx(0.75 * first["eval_kl"] + 0.25 * first["eval_nll"], rel=1e-6)
    assert first["perplexity"] == pytest.approx(np.exp(first["eval_nll"]), rel=1e-6)


@grid
@pytest.mark.parametrize(
    "changes",
    [{"model": {"lora": {"rank": 4}}}, {"precision": "bf16-mixed"}, {"optimizer": {"ema_decay": 0.9}}],
    ids=["lora", "bfloat16", "moving average"],
)
def test_a_resumed_run_ends_with_the_same_bits(place, changes):
    config = config_of(place, {"top_k": 5}, max_steps=4, global_batch_size=2, data={"shuffle": True}, **changes)
    resumes_alike(place, config)


def resumes_alike(place, config):
    whole = trained(config, ROWS, eval_dataset=ROWS)
    first = config | {"run_dir": str(place / "other_run")}
    trained(first, ROWS, eval_dataset=ROWS, callbacks=[_Stop(2)])
    resumed = trained(first, ROWS, eval_dataset=ROWS)
    losses = {line["step"]: line["loss"] for line in whole.history.train}
    assert resumed.history.train and all(line["loss"] == losses[line["step"]] for line in resumed.history.train)
    assert resumed.history.eval[-1] == whole.history.eval[-1]
    for got, want in zip(*(bits(t.state.params) for t in (resumed, whole)), strict=True):
        assert got == want
    return whole


def test_the_teacher_lies_on_the_mesh_of_its_role(place):
    config = config_of(place, devices=4, mesh="fsdp=2", roles={"teacher": {"devices": 2, "tensor": 2}})
    from jtrain import DistillTrainer

    trainer = DistillTrainer(config, train_dataset=ROWS)
    ids = [device.id for device in trainer.teacher.mesh.devices.flat]
    assert ids == [2, 3] and trainer.teacher.mesh.shape["tensor"] == 2
    assert not {d.id for d in jax.tree.leaves(trainer.state.params)[0].devices()} & set(ids)


def test_a_teacher_of_another_vocabulary_is_refused(place):
    shutil.copytree(place / "teacher", place / "third")
    config = json.loads((place / "third/config.json").read_text())
    tensors = load_file(place / "third/model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.concatenate([tensors[name], tensors[name][:4]])
    save_file(tensors, place / "third/model.safetensors")
    (place / "third/config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(DataError, match=r"distill\.teacher: .* has a vocabulary of 100, the policy one of 96"):
        first_line(config_of(place, {"teacher": str(place / "third")}), ROWS)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"beta": 0.3}, "distill.beta: 0.3 with distill.loss: forward_kl"),
        ({"tail": "renormalise"}, "distill.tail: 'renormalise' without distill.top_k"),
        ({"teacher": None}, "distill.teacher is missing"),
        ({"teacher": "/nowhere"}, "/nowhere"),
    ],
)
def test_options_that_do_not_go_together_are_refused(place, section, message):
    with pytest.raises(ConfigError, match=message):
        trained(config_of(place, section), ROWS)


@pytest.mark.parametrize(
    "section",
    [
        {"loss": "jsd", "beta": 0.3, "temperature": 2.0, "ce_weight": 0.25, "top_k": 9, "tail": "renormalise"},
        {"loss": "reverse_kl"},
    ],
    ids=str,
)
def test_what_the_section_says_reaches_the_loss(section):
    found = distillation_of(load_config({"task": "distill", "distill": section}, env={}))
    assert found.beta == {"reverse_kl": 1.0, "jsd": 0.3}[section["loss"]]
    for name in ("temperature", "ce_weight", "top_k", "tail"):
        assert getattr(found, name) == section.get(name, getattr(distillation_of(load_config({}, env={})), name))


class _Stop(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, step, metrics):
        if step == self.step:
            trainer.request_stop("enough")
