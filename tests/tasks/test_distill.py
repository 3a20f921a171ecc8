"""The distillation trainer: TRL's numbers, exact evaluation, meshes and roles, resume, and what is refused."""

import json
import shutil

import jax
import numpy as np
import pytest
from etils import epath
from safetensors.numpy import load_file, save_file

from jtrain import Callback, DistillTrainer
from jtrain.checkpoint import peers
from jtrain.config.load import load_config
from jtrain.errors import CheckpointError, ConfigError, DataError
from jtrain.tasks.distill_loss import distillation_of
from jtrain.tasks.teacher_table import open_everywhere, read_kept, write_kept
from jtrain.train.guard import guarded
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
    quick = {"xla_options": {"xla_backend_optimization_level": 0}}
    return settings(place, "distill", distill={"teacher": str(place / "teacher"), **dict(section)}, **(quick | changes))


@pytest.mark.parametrize(
    "golden",
    [pytest.param(case, marks=grid, id=str(case["options"])) for case in GOLDEN["cases"]],
)
def test_the_first_step_has_trls_loss_and_norm_of_gradient(place, golden):
    line = first_line(config_of(place, golden["options"]), ROWS)
    assert line["loss"] == pytest.approx(golden["loss"], rel=1e-5)
    assert line["grad_norm"] == pytest.approx(golden["grad_norm"], rel=1e-4)
    assert line["entropy"] == pytest.approx(golden["entropy"], rel=1e-5)


@grid
@pytest.mark.timeout(900)
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


@grid
def test_an_evaluation_counts_tokens_whatever_the_batch_the_mesh_and_the_packing(place):
    """One device, rows of one example; then two devices, rows that are packed, batches of another size."""
    section = {"top_k": 7, "ce_weight": 0.25}
    figures = []
    for layout in (
        {"eval": {"batch_size": 3}},
        {"eval": {"batch_size": 2}, "devices": 2, "mesh": "fsdp=2", "data": {"packing": "best_fit", "buckets": []}},
    ):
        trainer = DistillTrainer(config_of(place, section, **layout), train_dataset=ROWS, eval_dataset=ROWS)
        figures.append(trainer.evaluate())
    first, other = figures
    for name in ("eval_loss", "eval_kl", "eval_nll", "eval_teacher_nll", "eval_entropy", "perplexity"):
        assert other[name] == pytest.approx(first[name], rel=1e-6), name
    assert first["eval_loss"] == pytest.approx(0.75 * first["eval_kl"] + 0.25 * first["eval_nll"], rel=1e-6)
    assert first["perplexity"] == pytest.approx(np.exp(first["eval_nll"]), rel=1e-6)


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        pytest.param({}, {}, id="plain"),
        pytest.param({}, {"model": {"lora": {"rank": 4}}}, id="lora", marks=grid),
        pytest.param({}, {"precision": "bf16-mixed"}, id="bfloat16", marks=grid),
        pytest.param({}, {"optimizer": {"ema_decay": 0.9}}, id="moving average", marks=grid),
        pytest.param({"precompute_teacher": True}, {}, id="precomputed", marks=grid),
        pytest.param({"on_policy_fraction": 0.5, "max_completion_length": 6}, {}, id="on policy", marks=grid),
        pytest.param(
            {"seq_kd": True, "max_completion_length": 6, "sampling_temperature": 0.0}, {},
            id="teacher's completions", marks=grid,
        ),
    ],
)  # fmt: skip
def test_a_resumed_run_ends_with_the_same_bits(place, section, changes):
    config = config_of(
        place, {"top_k": 5, **section}, max_steps=4, global_batch_size=2, data={"shuffle": True}, **changes
    )
    resumes_alike(place, config)


def resumes_alike(place, config):
    whole = trained(config, ROWS, eval_dataset=ROWS)
    first = config | {"run_dir": str(place / "other_run")}
    trained(first, ROWS, eval_dataset=ROWS, callbacks=[_Stop(2)])
    resumed = trained(first, ROWS, eval_dataset=ROWS)
    losses = {line["step"]: line["loss"] for line in whole.history.train}
    assert resumed.history.train and all(line["loss"] == losses[line["step"]] for line in resumed.history.train)
    assert resumed.history.eval[-1] == whole.history.eval[-1]
    assert bits(resumed.state) == bits(whole.state) and resumed.counters == whole.counters
    return whole


def test_a_table_is_made_once_and_says_what_the_teacher_says(place, monkeypatch):
    config = config_of(place, GOLDEN["cases"][5]["options"] | {"precompute_teacher": True})
    first = trained(config, ROWS)
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4)):  # TRL's numbers, by way of the table
        assert first.history.train[0][name] == pytest.approx(GOLDEN["cases"][5][name], rel=tolerance)
    assert first._teacher is None  # not in memory any more
    (folder,) = (place / "cache/teacher").glob("*[!k]")
    shapes = {path.stem: np.load(path).shape for path in folder.glob("*.npy")}
    targets = sum(len(row["completion"].split()) + 1 for row in ROWS)  # with the token that ends it
    assert shapes["teacher_logps"] == shapes["teacher_ids"] == (targets, 5) and shapes["first"] == (5,)
    monkeypatch.setattr("jtrain.tasks.distill.make_table", lambda *_: pytest.fail("made again"))
    again = DistillTrainer(config | {"run_dir": str(place / "second")}, train_dataset=ROWS)
    with guarded(again.config) as guard, again._open_session(guard) as session:
        again._restore_or_init(session)
    row = again.train_rows.rows(np.arange(4))
    assert row["teacher_ids"].shape == (4, 32, 5) and (row["teacher_logps"] < 0).sum() == targets * 5


@grid
def test_another_teacher_than_that_of_the_table_is_noticed(place):
    config = config_of(place, {"precompute_teacher": True, "precompute_dtype": "float16"}, max_steps=2)
    trained(config, ROWS, callbacks=[_Stop(1)])
    (file,) = (place / "cache/teacher").glob("*/teacher_logps.npy")
    assert np.load(file).dtype == np.float16
    for change in ({"temperature": 4.0}, {"top_k": 5}, {"teacher": str(place / "model")}):
        (name,) = change
        with pytest.raises(ConfigError, match=rf"distill\.{name}: .* -> "):  # though the table is there
            trained(config | {"distill": config["distill"] | change}, ROWS)
    (place / "teacher").unlink()
    (place / "teacher").symlink_to((place / "model").resolve())
    with pytest.raises(CheckpointError, match="is not the teacher"):
        trained(config, ROWS, eval_dataset=ROWS)  # evaluation rows without a table
    shutil.rmtree(place / "cache/teacher")
    with pytest.raises(CheckpointError, match="is not the teacher"):
        trained(config, ROWS)
    (place / "run/teacher.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"teacher\.json is damaged"):
        trained(config, ROWS)


@grid
def test_other_evaluation_rows_on_a_resume_have_a_table_of_their_own(place):
    config = config_of(place, {"precompute_teacher": True}, max_steps=1)
    first = trained(config, ROWS, eval_dataset=ROWS[:2])
    resumed = trained(config | {"max_steps": 2}, ROWS, eval_dataset=ROWS[2:])
    assert resumed.eval_rows.table.rows == first.eval_rows.table.rows == 2
    wanted = resumed.train_rows.plain.in_order()
    assert resumed.eval_rows.table.targets == sum(
        (wanted.rows(np.array([row]))["labels"][:, 1:] >= 0).sum() for row in (2, 3)
    )
    kept = read_kept(epath.Path(place / "run/teacher.json"))
    assert kept["eval"]["rows"] == resumed.eval_rows.fingerprint != first.eval_rows.fingerprint
    assert kept["train"] == kept["eval"] | {name: kept["train"][name] for name in ("name", "rows")}


def test_what_is_kept_of_a_table_is_whole_or_an_error(tmp_path):
    file = epath.Path(tmp_path / "teacher.json")
    assert read_kept(file) == {}
    one = {"name": "n", "rows": "r", "settings": [5, 1.0, "float32"], "teacher": "t", "dtype": "float32"}
    write_kept(file, {"train": one})
    assert read_kept(file) == {"train": one} and [path.name for path in tmp_path.iterdir()] == ["teacher.json"]
    whole = file.read_text()
    for text in ("", whole[:-9], "[]", '{"train": "n"}', '{"train": {}}', whole.replace('"n"', "3"), "\xff"):
        file.write_bytes(text.encode("latin-1"))
        with pytest.raises(CheckpointError, match="damaged"):
            read_kept(file)


@pytest.mark.parametrize(("others", "opened"), [([True], True), ([False], False)])
def test_a_table_is_opened_where_every_process_has_it(tmp_path, monkeypatch, others, opened):
    np.save(tmp_path / "first.npy", np.array([0, 2, 3]))
    np.save(tmp_path / "teacher_logps.npy", np.zeros((3, 5), np.float32))
    monkeypatch.setattr(peers, "exchange", lambda topic, value: [value, *others])
    assert (open_everywhere(tmp_path, 2) is not None) is opened
    assert open_everywhere(tmp_path, 3) is None and open_everywhere(tmp_path / "none", 2) is None


@grid
def test_a_step_on_the_students_own_completions_scores_these_alone(place):
    section = {"on_policy_fraction": 1.0, "max_completion_length": 6, "ce_weight": 0.5}
    trainer = DistillTrainer(config_of(place, section), train_dataset=ROWS)
    state = trainer.state
    with trainer.train_loader() as loader:
        batch, again = (trainer.prepare(loader[0], state.params, state.variables) for _ in range(2))
    loss = trainer.program.eval_step(state.params, state.variables, batch)
    assert float(loss.sum) == pytest.approx(float(loss.metrics["kl"][0]), rel=1e-6)  # no cross-entropy
    assert [int(x) for x in loss.metrics["on_policy"]] == [4, 4]
    batch, again = ({name: np.asarray(x)[0] for name, x in found.items()} for found in (batch, again))
    for name in ("input_ids", "labels"):  # the same tokens, however often they are drawn
        np.testing.assert_array_equal(again[name], batch[name])
    for row, record in enumerate(ROWS):
        prompt = [int(word[1:]) for word in record["prompt"].split()]
        ids, labels, held = (batch[name][row] for name in ("input_ids", "labels", "segment_ids"))
        assert ids[: len(prompt)].tolist() == prompt
        live = np.flatnonzero(labels != -100)
        assert live[0] == len(prompt) and 1 <= len(live) <= 6 and (np.diff(live) == 1).all()
        assert (labels[live] == ids[live]).all() and held.sum() == len(prompt) + len(live)


@grid
def test_completions_of_the_teacher_are_drawn_as_the_section_says(place):
    section = {"seq_kd": True, "max_completion_length": 5, "sampling_temperature": 0.0}
    trainer = DistillTrainer(config_of(place, section), train_dataset=ROWS)
    with trainer.train_loader() as loader:
        batch = trainer.prepare(loader[0], trainer.state.params, trainer.state.variables)
    labels, logps = (np.asarray(batch[name])[0] for name in ("labels", "teacher_logps"))
    for row, record in enumerate(ROWS):
        live, first = np.flatnonzero(labels[row] != -100), len(record["prompt"].split())
        assert live[0] == first and 1 <= len(live) <= 5
        # At temperature 0 every token is what the teacher, reading the whole row, finds likeliest.
        assert labels[row][live].tolist() == logps[row][live - 1].argmax(-1).tolist()
    assert "on_policy" not in batch and batch["teacher_logps"].shape == (1, 4, 32, 96)


def test_the_teacher_lies_on_the_mesh_of_its_role(place):
    config = config_of(place, devices=4, mesh="fsdp=2", roles={"teacher": {"devices": 2, "tensor": 2}})
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
        ({"precompute_dtype": "float16"}, "without distill.precompute_teacher"),
        ({"sampling_temperature": 0.5}, "without distill.on_policy_fraction"),
        ({"max_completion_length": 7}, "without distill.on_policy_fraction"),
        ({"seq_kd": True, "precompute_teacher": True}, "precompute_teacher: true with distill.seq_kd: true"),
        ({"on_policy_fraction": 0.5}, "max_completion_length: 128 leaves rows of max_length: 32 no place"),
        ({"teacher": None}, "distill.teacher is missing"),
        ({"teacher": "/nowhere"}, "/nowhere"),
    ],
)
def test_options_that_do_not_go_together_are_refused(place, section, message):
    with pytest.raises(ConfigError, match=message):
        trained(config_of(place, section), ROWS)


def test_completions_without_a_prompt_are_refused(place):
    section = {"on_policy_fraction": 0.5, "max_completion_length": 6}
    with pytest.raises(ConfigError, match="every token is learned: no prompt is known"):
        DistillTrainer(config_of(place, section), train_dataset=[{"text": "w5 w6 w7"}])


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
