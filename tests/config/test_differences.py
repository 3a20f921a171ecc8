"""What a resumed run may change (the contract's list), and what makes it another run."""

import pytest

from jtrain.config import differences, load_config
from jtrain.config.differences import may_be_filled_in

DISTILL = {
    "task": "distill",
    "distill.teacher": "/t",
    "distill.top_k": 64,
    "distill.precompute_teacher": True,
}


def names(old, new):
    old, new = (load_config({"max_steps": 10, **fields}, (), {}) for fields in (old, new))
    return [[difference.field for difference in group] for group in differences(old, new)]


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ({}, {"mesh": "fsdp=2"}, "mesh.fsdp"),
        ({}, {"devices": 8}, "devices"),
        ({}, {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({}, {"max_steps": 20}, "max_steps"),
        ({}, {"schedule": {"name": "linear"}}, "schedule.name"),
        ({}, {"learning_rate": 1.0}, "optimizer.learning_rate"),
        ({}, {"eval_steps": 3}, "eval.eval_steps"),
        ({}, {"save_steps": 3}, "checkpoint.save_steps"),
        ({}, {"logging_steps": 3}, "logging.log_every_n_steps"),
        ({}, {"faults": {"nonfinite": "stop"}}, "faults.nonfinite"),
        ({}, {"run_dir": "elsewhere"}, "run_dir"),
        ({}, {"model": {"remat": "none"}}, "model.remat"),
        ({}, {"data": {"cache_dir": "c"}}, "data.cache_dir"),
        ({}, {"precision": "32-true"}, "precision"),
        ({"data": {"eval": "a"}}, {"data": {"eval": "b"}}, "data.eval"),
        ({"optimizer": {"ema_decay": 0.9}}, {"optimizer": {"ema_decay": 0.99}}, "optimizer.ema_decay"),
        ({}, {"global_batch_size": 32}, "global_batch_size"),
        (DISTILL, {**DISTILL, "distill.beta": 0.1, "distill.loss": "jsd"}, "distill.beta"),
        ({"task": "dpo"}, {"task": "dpo", "dpo": {"beta": 0.2}}, "dpo.beta"),
    ],
)
def test_these_may_change(old, new, field):
    harmless, refused = names(old, new)
    assert field in harmless and not refused


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ({}, {"model": {"preset": "llama-60m"}}, "model.preset"),
        ({}, {"model": {"dropout": 0.1}}, "model.dropout"),
        ({}, {"optimizer": {"name": "lion"}}, "optimizer.name"),
        ({}, {"optimizer": {"freeze": [".*"]}}, "optimizer.freeze"),
        ({}, {"optimizer": {"ema_decay": 0.9}}, "optimizer.ema_decay"),
        ({}, {"precision": "bf16-true"}, "precision"),
        ({}, {"data": {"tokenizer": "t.json"}}, "data.tokenizer"),
        ({}, {"data": {"train": "a"}}, "data.train"),
        ({}, {"data": {"packing": "concat"}}, "data.packing"),
        ({}, {"data": {"eval": 0.1}}, "data.eval"),
        ({"data": {"eval": 0.2}}, {"data": {"eval": 0.1}}, "data.eval"),
        ({}, {"seed": 1}, "seed"),
        ({"global_batch_size": 32}, {"global_batch_size": 64}, "global_batch_size"),
        ({}, {"max_length": 5}, "max_length"),
        ({"task": "dpo"}, {"task": "dpo", "dpo": {"ref_model": "/m"}}, "dpo.ref_model"),
        ({"task": "dpo"}, {"task": "dpo", "dpo": {"ld_alpha": 0.3}}, "dpo.ld_alpha"),
        (
            {"task": "dpo"},
            {"task": "dpo", "dpo": {"precompute_ref_log_probs": True}},
            "dpo.precompute_ref_log_probs",
        ),
        (DISTILL, {**DISTILL, "distill.teacher": "/u"}, "distill.teacher"),
        (DISTILL, {**DISTILL, "distill.temperature": 4.0}, "distill.temperature"),
        (DISTILL, {**DISTILL, "distill.top_k": 0}, "distill.top_k"),
        (DISTILL, {**DISTILL, "distill.precompute_dtype": "float16"}, "distill.precompute_dtype"),
    ],
)
def test_these_need_a_new_run(old, new, field):
    assert field in names(old, new)[1]


def test_nothing_differs_between_equal_configs_in_any_form(monkeypatch, tmp_path):
    config = load_config({"max_steps": 10, "data": {"train": "a.txt"}, "run_dir": "r"}, (), {})
    absolute = load_config(
        {"max_steps": 10, "data": {"train": str(tmp_path / "a.txt")}, "run_dir": str(tmp_path / "r")}, (), {}
    )
    monkeypatch.chdir(tmp_path)
    assert differences(config, absolute) == ([], [])
    assert differences(config.model_dump(mode="json"), config) == ([], [])


def test_no_tokenizer_and_bytes_are_one_without_a_model_on_disk():
    assert names({}, {"data": {"tokenizer": "bytes"}}) == [[], []]
    old, new = {"model": {"path": "/m"}}, {"model": {"path": "/m"}, "data": {"tokenizer": "bytes"}}
    assert names(old, new) == [[], ["data.tokenizer"]]


def test_a_config_of_an_older_version_gets_the_defaults_of_newer_fields():
    config = load_config({"max_steps": 10}, (), {})
    old = config.model_dump(mode="json")
    del old["loss"], old["model"]["dropout"]
    old["gone"] = 3
    harmless, refused = differences(old, config)
    assert [str(difference) for difference in harmless] == ["gone: 3 -> None"] and not refused


@pytest.mark.parametrize(
    ("filled", "given", "left"),
    [
        ({"max_length": 32}, {}, []),
        ({"max_length": 32}, {"max_length": 64}, ["max_length"]),
        ({"optimizer": {"freeze": ["vision_tower/.*"]}}, {}, []),
        ({"data": {"tokenizer": "/teacher/tokenizer.json"}}, {}, []),
        ({"data": {"tokenizer": "/teacher/tokenizer.json"}}, {"data": {"tokenizer": "/other"}}, ["data.tokenizer"]),
        ({"model": {"vocab_size": 104}}, {}, []),
        ({"model": {"lora": {"rank": 4, "targets": ["q_proj"]}}}, {}, []),
        ({"model": {"lora": {"rank": 4}}}, {"model": {"lora": {"rank": 8}}}, ["model.lora.rank"]),
        ({"seed": 3, "max_length": 32}, {}, ["seed"]),
    ],
)
def test_what_a_trainer_fills_in_may_differ_before_it_has_seen_the_config(filled, given, left):
    _, refused = differences(load_config(filled, env={}), load_config(given, env={}))
    assert [one.field for one in refused if not may_be_filled_in(one)] == left
