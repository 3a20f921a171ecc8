"""The DPO trainer: TRL's numbers, references of every kind, meshes, accumulation, resume."""

import json
import math
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jtrain import Callback
from jtrain.cli.main import main
from jtrain.config import to_yaml
from jtrain.config.load import load_config
from jtrain.errors import ConfigError, DataError
from jtrain.tasks.dpo import DPOTrainer, preference_of
from jtrain.tasks.reward import RewardTrainer
from tests.parity.runs import bits

from .preferences import FIGURES, RUNS, first_line, settings, trained, word_model

PAIRS = RUNS["pairs"]
grid = pytest.mark.grid


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    word_model(folder / "model")
    word_model(folder / "other", "llama31-ropescaled")
    return folder


@pytest.fixture
def place(models, tmp_path):
    """A folder for a run, with the models in it."""
    for name in ("model", "other"):
        (tmp_path / name).symlink_to(models / name)
    return tmp_path


def with_reference(place, **section):
    return settings(place, "dpo", dpo={"ref_model": str(place / "other"), **section})


def compare(line, golden, names):
    assert line["loss"] == pytest.approx(golden["loss"], rel=1e-5, abs=1e-5)
    assert line["grad_norm"] == pytest.approx(golden["grad_norm"], rel=1e-4)
    for name in names:
        assert line[name] == pytest.approx(golden["metrics"][name], rel=2e-5, abs=1e-5), name


def cases(kind):
    """Goldens of a trainer; the first one runs by default."""
    return [
        pytest.param(golden, marks=() if not number else grid, id=f"{kind} {golden['options']}")
        for number, golden in enumerate(RUNS[kind])
    ]


@pytest.mark.parametrize("golden", cases("dpo"))
def test_the_first_step_of_dpo_has_trls_loss_metrics_and_norm_of_gradient(place, golden):
    line = first_line(with_reference(place, **golden["options"]), PAIRS)
    compare(line, golden, (*FIGURES, "logits/chosen", "logits/rejected", "entropy", "mean_token_accuracy"))
    assert line["tokens"] == golden["metrics"]["num_tokens"]


@pytest.mark.parametrize("golden", cases("kto"))
def test_the_first_step_of_kto_has_trls_loss_metrics_and_norm_of_gradient(place, golden):
    options = {"loss_type": "kto"} | golden["options"]
    line = first_line(with_reference(place, **options), RUNS["singles"])
    names = [name for name in golden["metrics"] if name in line and name != "num_tokens"]
    assert {"rewards/margins", "logps/chosen", "rewards/rejected", "entropy"} <= set(names)
    compare(line, golden, [name for name in names if name != "kl" or options["loss_type"] == "kto"])


@grid
@pytest.mark.parametrize("golden", [*cases("orpo"), *cases("cpo")])
def test_the_first_step_without_a_reference_has_trls_loss_metrics_and_norm_of_gradient(place, golden):
    options, orpo = golden["options"], "log_odds_chosen" in golden["metrics"]
    kind = "orpo" if orpo else "simpo" if options.get("loss_type") == "simpo" else "cpo"
    given = {name: value for name, value in options.items() if name not in ("loss_type", "cpo_alpha")}
    # TRL's tokenizer of these two puts the begin token first; that of DPO does what the model's own does.
    line = first_line(settings(place, "dpo", dpo={"loss_type": kind, **given}, data={"prepend_bos": True}), PAIRS)
    more = ("nll_loss",) if kind != "simpo" else ()
    compare(line, golden, (*FIGURES, *more, *(("log_odds_chosen", "log_odds_ratio") if orpo else ())))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"model": {"lora": {"rank": 4, "dropout": 0.1}}}, marks=grid),
        pytest.param({"dpo": {"precompute_ref_log_probs": True}}, marks=grid),
        pytest.param({"precision": "bf16-mixed"}, marks=grid),
    ],
    ids=["frozen copy", "without adapters", "precomputed", "bfloat16"],
)
def test_step_0_costs_ln_2_whatever_the_reference(place, changes):
    line = first_line(settings(place, "dpo", **changes), PAIRS)
    assert line["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert line["rewards/margins"] == pytest.approx(0, abs=1e-6) and line["grad_norm"] > 0


LAYOUTS = [
    pytest.param({"gradient_accumulation_steps": 2}, id="accumulation"),
    pytest.param({"devices": 8, "mesh": "fsdp=2,tensor=2,pipeline=2"}, id="fsdp tensor pipeline"),
]
LOSSES = [
    {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    {"loss_type": "aot_unpaired"},
    {"loss_type": "kto"},
    {"loss_type": "orpo"},
]


@grid
@pytest.mark.parametrize("section", LOSSES, ids=lambda section: str(section["loss_type"]))
def test_accumulation_and_meshes_change_nothing(place, section):
    rows, figures = RUNS["singles"] if section["loss_type"] == "kto" else PAIRS, []
    for layout in ({}, *(case.values[0] for case in LAYOUTS)):
        shutil.rmtree(place / "run", ignore_errors=True)
        # Another model as the reference: rewards of 0 would be larger or smaller by rounding.
        other = {} if section["loss_type"] == "orpo" else {"ref_model": str(place / "other")}
        line = first_line(settings(place, "dpo", dpo=section | other, max_steps=2, **layout), rows)
        figures.append([line[name] for name in ("loss", "grad_norm", *FIGURES) if name in line])
    for other in figures[1:]:
        np.testing.assert_allclose(other, figures[0], rtol=2e-5, atol=2e-6)


@grid
@pytest.mark.parametrize("changes", [{}, {"dpo": {"precompute_ref_log_probs": True}}], ids=["copy", "precomputed"])
def test_a_resumed_run_ends_with_the_same_bits_and_needs_the_first_model_no_more(place, models, changes):
    config = settings(place, "dpo", max_steps=4, global_batch_size=2, data={"shuffle": True}, **changes)
    whole = trained(config, PAIRS)
    first = config | {"run_dir": str(place / "other_run")}
    trained(first, PAIRS, callbacks=[_Stop(2)])
    shutil.rmtree(place / "cache", ignore_errors=True)
    gone = place / "model"
    gone.unlink()
    resumed = trained(first, PAIRS)
    losses = {line["step"]: line["loss"] for line in whole.history.train}
    assert resumed.history.train and all(line["loss"] == losses[line["step"]] for line in resumed.history.train)
    for got, want in zip(*(bits(t.state.params) for t in (resumed, whole)), strict=True):
        assert got == want


@grid
def test_an_evaluation_is_exact_and_reads_other_pairs(place):
    config = settings(place, "dpo", eval={"batch_size": 3}, dpo={"loss_type": ["sigmoid", "sft"]})
    trainer = trained(config, PAIRS, eval_dataset=PAIRS)
    first, section = trainer.history.eval[0], trainer.config.eval.model_copy(update={"batch_size": 1})
    trainer.config = trainer.config.model_copy(update={"eval": section})
    other = trainer.evaluate(list(PAIRS))
    for name in ("eval_loss", "eval_rewards/accuracies", "eval_nll_loss"):
        assert other[name] == pytest.approx(first[name], rel=1e-6), name
    assert trainer.predict(PAIRS)["chosen_logps"].shape == (4,)


def test_a_reference_of_another_vocabulary_is_refused(place):
    word_model(place / "third", "qwen2")
    config = json.loads((place / "third/config.json").read_text())
    tensors = load_file(place / "third/model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.concatenate([tensors[name], tensors[name][:4]])
    save_file(tensors, place / "third/model.safetensors")
    (place / "third/config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(DataError, match="vocabulary of 100, the policy one of 96"):
        first_line(settings(place, "dpo", dpo={"ref_model": str(place / "third")}), PAIRS)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (PAIRS[0] | {"images": ["a.png"]}, "line 3.*it holds images"),
        (PAIRS[0] | {"rejected": PAIRS[0]["chosen"]}, "line 3.*its chosen and its rejected half are equal"),
        (PAIRS[0] | {"chosen": ""}, "line 3.*its chosen completion is empty"),
        (PAIRS[0] | {"chosen": None}, "line 3.*its fields are prompt, rejected"),
        ({"question": "a", "answer": "b"}, "line 3.*its fields are question, answer"),
    ],
    ids=["images", "equal", "empty", "null", "columns"],
)
def test_a_record_that_can_not_be_used_ends_the_verb_with_65_and_its_line(place, capsys, record, message):
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*PAIRS[:2], record]))
    config = settings(place, "dpo")
    config["data"] = config["data"] | {"train": [str(place / "pairs.jsonl")]}
    (place / "run.yaml").write_text(to_yaml(load_config(config, env={})))
    assert main(["dpo", str(place / "run.yaml")]) == 65
    assert re.search(message, capsys.readouterr().err)


def test_columns_that_fit_no_form_are_named(place):
    with pytest.raises(DataError, match="its records have the fields text"):
        first_line(settings(place, "dpo"), [{"text": "a"}])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"loss_type": ["sigmoid", "kto"]}, "kto can't be combined"),
        ({"loss_type": "exo_pair"}, "dpo.label_smoothing: 0 with dpo.loss_type: exo_pair"),
        ({"loss_type": "robust", "label_smoothing": 0.5}, "dpo.label_smoothing: 0.5 with dpo.loss_type: robust"),
        ({"loss_weights": [1.0, 2.0]}, "2 weights for the 1 losses"),
        ({"simpo_gamma": 1.0}, "dpo.simpo_gamma: 1.0 with dpo.loss_type: sigmoid"),
        ({"loss_type": "nca_pair", "f_divergence_type": "forward_kl"}, "dpo.f_divergence_type: 'forward_kl' with"),
        ({"loss_type": "orpo", "precompute_ref_log_probs": True}, "dpo.precompute_ref_log_probs: True with"),
        ({"loss_type": "simpo", "sync_ref_model": True}, "dpo.sync_ref_model: True with dpo.loss_type: simpo"),
        ({"ref_model_sync_steps": 8}, "dpo.ref_model_sync_steps: 8 without dpo.sync_ref_model"),
        ({"sync_ref_model": True, "precompute_ref_log_probs": True}, "a table is of one reference"),
        ({"sync_ref_model": True, "ref_model": "/other"}, "begins as the policy"),
        ({"loss_type": ["sigmoid", "aot"], "use_weighting": True}, "dpo.use_weighting: True with dpo.loss_type: aot"),
        ({"precompute_ref_batch_size": 4}, "without precomputing"),
        ({"f_alpha_divergence_coef": 0.3}, "dpo.f_divergence_type: reverse_kl"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused(place, section, message):
    with pytest.raises(ConfigError, match=message):
        trained(settings(place, "dpo", dpo=section), PAIRS)


@pytest.mark.parametrize(
    "section",
    [
        {"loss_type": ("sigmoid", "sft"), "loss_weights": (0.5, 2.0), "beta": 0.3, "ld_alpha": 0.5},
        {"loss_type": ("robust",), "label_smoothing": 0.1, "use_weighting": True},
        {"loss_type": ("hinge",), "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
        {"loss_type": ("discopop",), "discopop_tau": 0.1},
        {"loss_type": ("simpo",), "simpo_gamma": 1.0, "cpo_alpha": 0.5, "alpha": 0.1},
        {"loss_type": ("kto",), "desirable_weight": 1.3, "undesirable_weight": 0.7},
    ],
    ids=lambda section: section["loss_type"][0],
)
def test_what_the_section_says_reaches_the_loss(section):
    found = preference_of(load_config({"task": "dpo", "dpo": section}, env={}))
    names = {"loss_type": "kinds", "loss_weights": "weights"}
    for field, value in section.items():
        holder = found if hasattr(found, names.get(field, field)) else found.options
        assert getattr(holder, names.get(field, field)) == value


def test_the_cross_entropy_counts_in_full_for_cpo_and_not_for_simpo_unless_it_is_asked_for():
    weights = {
        kind: preference_of(load_config({"task": "dpo", "dpo": {"loss_type": kind}}, env={})).nll_weight
        for kind in ("cpo", "simpo", "orpo", "sft", "sigmoid")
    }
    assert weights == {"cpo": 1.0, "simpo": 0.0, "orpo": 1.0, "sft": 1.0, "sigmoid": 0.0}


@grid
def test_a_table_is_made_once_and_is_the_same_by_any_batch(place):
    tables = []
    for size in (1, 3, None):
        shutil.rmtree(place / "run", ignore_errors=True)
        if size == 3:
            shutil.rmtree(place / "cache")
        section = {"precompute_ref_log_probs": True, "precompute_ref_batch_size": size}
        trainer = trained(settings(place, "dpo", dpo=section), PAIRS)
        tables.append(trainer.train_rows.table["ref_chosen_logps"])
    np.testing.assert_allclose(tables[0], tables[1], rtol=1e-6)
    np.testing.assert_array_equal(tables[1], tables[2])  # from the cache
    assert len(list((place / "cache/reference").iterdir())) == 1


@pytest.mark.parametrize(("task", "trainer"), [("dpo", DPOTrainer), ("reward", RewardTrainer)])
def test_training_is_without_dropout_unless_it_is_asked_for(task, trainer):
    model = {"dropout": 0.1, "lora": {"rank": 4, "dropout": 0.2}}
    settled = trainer.settle(None, load_config({"task": task, "model": model}, env={})).model
    assert (settled.dropout, settled.lora.dropout, settled.lora.rank) == (0.0, 0.0, 4)
    kept = load_config({"task": task, "model": model, task: {"disable_dropout": False}}, env={})
    assert trainer.settle(None, kept) is kept


class _Stop(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, step, values):
        if step == self.step:
            trainer.request_stop("the test says so")
