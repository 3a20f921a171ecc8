"""Layers, precedence, aliases and messages of `load_config`."""

import logging

import numpy as np
import pytest

from jtrain.config import Config, load_config
from jtrain.config.names import ALIASES
from jtrain.config.schema import MeshConfig
from jtrain.errors import ConfigError


def load(source=None, overrides=(), env=None):
    return load_config(source, overrides, env or {})


def refused(source=None, overrides=(), env=None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(source, overrides, env)
    assert caught.value.exit_code == 64
    return str(caught.value)


@pytest.fixture
def file(tmp_path):
    def write(text: str, name: str = "run.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(file):
    path = file("mesh: {fsdp: 2, tensor: 2}\nseed: 1\nmax_length: 7\n")
    config = load(path, ["--mesh.fsdp", "8"], {"JTRAIN_MESH__FSDP": "4", "JTRAIN_SEED": "2"})
    assert (config.mesh.fsdp, config.mesh.tensor, config.seed, config.max_length) == (8, 2, 2, 7)
    assert config.loss.z_loss == Config().loss.z_loss


def test_the_short_form_of_a_section_replaces_it(file):
    path = file("mesh: {data: 2, fsdp: 2, tensor: 2}\n")
    assert load(path, ["--mesh", "fsdp=4"]).mesh == MeshConfig(fsdp=4)
    assert load(path, {"mesh": "fsdp=4, tensor=2"}).mesh == MeshConfig(fsdp=4, tensor=2)
    assert load(path, {"mesh": {"fsdp": 4}}).mesh == MeshConfig(data=2, fsdp=4, tensor=2)
    assert load(path, {"mesh": MeshConfig(tensor=4)}).mesh == MeshConfig(tensor=4)
    assert load(path, (), {"JTRAIN_MESH": "fsdp=4"}).mesh == MeshConfig(fsdp=4)
    assert load(file("mesh: fsdp=4,tensor=2\n", "short.yaml")).mesh == MeshConfig(fsdp=4, tensor=2)


def test_a_stronger_length_or_strategy_takes_the_place_of_a_weaker_one(file):
    path = file("max_steps: 10\nmesh: {data: 2, fsdp: 4}\ndata: {train: [a, b], weights: [1, 2]}\n")
    config = load(path, {"num_train_epochs": 2})
    assert (config.max_steps, config.num_train_epochs) == (None, 2)
    config = load(path, {"strategy": "zero3"})
    assert (config.mesh.data, config.mesh.fsdp) == (1, -1)
    assert load(path, {"data.train": "c"}).data.weights == ()
    assert load(file("strategy: ddp\n", "s.yaml"), ["--mesh", "fsdp=2"]).strategy is None


def test_paths_are_relative_to_the_file_and_on_flags_to_the_working_directory(file, tmp_path, monkeypatch):
    path = file(
        "run_dir: runs/x\ndata: {train: [a.txt, 'gs://b/c.txt', /d], eval: e.txt, tokenizer: t.json, cache_dir: ../c}\n"
        "checkpoint: {init_from: old}\n"
    )
    monkeypatch.chdir("/")
    config = load(path)
    assert config.data.train == (str(tmp_path / "a.txt"), "gs://b/c.txt", "/d")
    assert config.data.eval == (str(tmp_path / "e.txt"),)
    assert config.data.cache_dir == str(tmp_path.parent / "c")
    assert [config.run_dir, config.data.tokenizer, config.checkpoint.init_from] == [
        str(tmp_path / name) for name in ("runs/x", "t.json", "old")
    ]
    assert load(path, ["--data.train", "b.txt"]).data.train == ("b.txt",)
    words = load(file("data: {tokenizer: bytes, eval: 0.1}\ncompile_cache: auto\n", "w.yaml"))
    assert (words.data.tokenizer, words.data.eval, words.compile_cache) == ("bytes", 0.1, "auto")


def test_sources_take_a_text_a_list_or_paths_with_weights(file):
    assert load({"data": {"train": "a.txt"}}).data.train == ("a.txt",)
    data = load({"data": {"train": [{"path": "a", "weight": 2}, {"path": "b", "weight": 1}]}}).data
    assert (data.train, data.weights) == (("a", "b"), (2.0, 1.0))
    assert Config(data={"train": [{"path": "a", "weight": 2}]}).data.weights == (2.0,)
    assert "data.train" in refused({"data": {"train": [{"path": "a", "weigth": 2}]}})
    assert "data.train" in refused({"data": {"train": [{"path": "a", "weight": 2}, "b"]}})


@pytest.mark.parametrize(
    ("given", "path", "value"),
    [
        ({"output_dir": "x"}, "run_dir", "x"),
        ({"per_device_train_batch_size": 4}, "per_device_batch_size", 4),
        ({"max_seq_length": 9}, "max_length", 9),
        ({"learning_rate": 1e-5}, "optimizer.learning_rate", 1e-5),
        ({"lr": 1e-5}, "optimizer.learning_rate", 1e-5),
        ({"model_name_or_path": "/m"}, "model.path", "/m"),
        ({"packing": "wrapped"}, "data.packing", "concat"),
        ({"packing": True}, "data.packing", "best_fit"),
        ({"packing": False}, "data.packing", "none"),
        ({"packing": "bfd_split", "task": "sft"}, "data.packing", "best_fit_split"),
        ({"truncation_mode": "keep_end", "task": "sft"}, "data.truncation", "keep_end"),
        ({"dataset_text_field": "body"}, "data.text_field", "body"),
        ({"dataset_num_proc": 2}, "data.num_workers", 2),
        ({"chat_template_path": "/chat.jinja", "task": "sft"}, "data.chat_template", "/chat.jinja"),
        ({"completion_only_loss": False, "task": "sft"}, "sft.completion_only_loss", False),
        ({"assistant_only_loss": True, "task": "sft"}, "sft.assistant_only_loss", True),
        ({"neftune_noise_alpha": 5.0, "task": "sft"}, "sft.neftune_noise_alpha", 5.0),
        ({"loss_type": ["hinge", "sft"], "task": "dpo"}, "dpo.loss_type", ("hinge", "sft")),
        (
            {"center_rewards_coefficient": 0.01, "task": "reward"},
            "reward.center_rewards_coefficient",
            0.01,
        ),
        ({"teacher_model_name_or_path": "/t", "task": "distill"}, "distill.teacher", "/t"),
        ({"lmbda": 0.5, "task": "distill"}, "distill.on_policy_fraction", 0.5),
        ({"seq_kd": True, "task": "distill"}, "distill.seq_kd", True),
        ({"max_completion_length": 32, "seq_kd": True, "task": "distill"}, "distill.max_completion_length", 32),
        ({"loss_weights": ["0.5"], "task": "dpo"}, "dpo.loss_weights", (0.5,)),
        ({"beta": 0.3, "task": "dpo"}, "dpo.beta", 0.3),
        ({"ld_alpha": 0.5, "task": "dpo"}, "dpo.ld_alpha", 0.5),
        ({"f_divergence_type": "forward_kl", "task": "dpo"}, "dpo.f_divergence_type", "forward_kl"),
        (
            {"f_alpha_divergence_coef": 0.3, "task": "dpo", "dpo.f_divergence_type": "alpha_divergence"},
            "dpo.f_alpha_divergence_coef",
            0.3,
        ),
        ({"use_weighting": True, "task": "dpo"}, "dpo.use_weighting", True),
        ({"discopop_tau": 0.1, "task": "dpo", "loss_type": "discopop"}, "dpo.discopop_tau", 0.1),
        ({"simpo_gamma": 1.0, "task": "dpo", "loss_type": "simpo"}, "dpo.simpo_gamma", 1.0),
        ({"cpo_alpha": 0.5, "task": "dpo", "loss_type": "cpo"}, "dpo.cpo_alpha", 0.5),
        ({"desirable_weight": 1.3, "task": "dpo", "loss_type": "kto"}, "dpo.desirable_weight", 1.3),
        ({"undesirable_weight": 0.7, "task": "dpo", "loss_type": "kto"}, "dpo.undesirable_weight", 0.7),
        ({"ref_model": "/reference", "task": "dpo"}, "dpo.ref_model", "/reference"),
        ({"precompute_ref_log_probs": True, "task": "dpo"}, "dpo.precompute_ref_log_probs", True),
        ({"sync_ref_model": True, "task": "dpo"}, "dpo.sync_ref_model", True),
        (
            {"ref_model_mixup_alpha": 0.5, "task": "dpo", "sync_ref_model": True},
            "dpo.ref_model_mixup_alpha",
            0.5,
        ),
        ({"ref_model_sync_steps": 64, "task": "dpo", "sync_ref_model": True}, "dpo.ref_model_sync_steps", 64),
        (
            {"precompute_ref_batch_size": 4, "task": "dpo", "precompute_ref_log_probs": True},
            "dpo.precompute_ref_batch_size",
            4,
        ),
        ({"disable_dropout": False, "task": "dpo"}, "dpo.disable_dropout", False),
        ({"weight_decay": 0.5}, "optimizer.weight_decay", 0.5),
        ({"adam_beta1": 0.5}, "optimizer.beta1", 0.5),
        ({"adam_beta2": 0.5}, "optimizer.beta2", 0.5),
        ({"adam_epsilon": 1e-6}, "optimizer.eps", 1e-6),
        ({"max_grad_norm": 2.0}, "optimizer.max_grad_norm", 2.0),
        ({"gradient_clip_val": 2.0}, "optimizer.max_grad_norm", 2.0),
        ({"lr_scheduler_type": "inverse_sqrt"}, "schedule.name", "rsqrt"),
        ({"lr_scheduler_type": "linear"}, "schedule.name", "linear"),
        ({"warmup_steps": 100}, "schedule.warmup_steps", 100),
        ({"warmup_ratio": 0.03}, "schedule.warmup_steps", 0.03),
        ({"label_smoothing_factor": 0.1}, "loss.label_smoothing", 0.1),
        ({"bf16": True}, "precision", "bf16-mixed"),
        ({"fp16": True}, "precision", "16-mixed"),
        ({"fp16": False, "precision": "32-true"}, "precision", "32-true"),
        ({"gradient_checkpointing": False}, "model.remat", "none"),
        ({"gradient_checkpointing": True}, "model.remat", "full"),
        ({"r": 4}, "model.lora.rank", 4),
        ({"lora_alpha": 8, "r": 4}, "model.lora.alpha", 8.0),
        ({"lora_dropout": 0.1, "r": 4}, "model.lora.dropout", 0.1),
        ({"target_modules": ["q_proj", "v_proj"], "r": 4}, "model.lora.targets", ("q_proj", "v_proj")),
        ({"target_modules": "all-linear", "r": 4}, "model.lora.targets", ("all-linear",)),
        ({"use_rslora": True, "r": 4}, "model.lora.rslora", True),
        ({"use_dora": True, "r": 4}, "model.lora.dora", True),
        ({"load_in_8bit": True, "r": 4}, "model.lora.base", "int8"),
        ({"load_in_4bit": True, "r": 4}, "model.lora.base", "nf4"),
        ({"logging_steps": 5}, "logging.log_every_n_steps", 5),
        ({"log_every_n_steps": 5}, "logging.log_every_n_steps", 5),
        ({"report_to": "none"}, "logging.trackers", ()),
        ({"report_to": ["tensorboard"]}, "logging.trackers", ("tensorboard",)),
        ({"eval_steps": 7}, "eval.eval_steps", 7),
        ({"save_steps": 7}, "checkpoint.save_steps", 7),
        ({"save_total_limit": 7}, "checkpoint.save_total_limit", 7),
        ({"resume_from_checkpoint": True}, "checkpoint.resume", "auto"),
        ({"resume_from_checkpoint": 20}, "checkpoint.resume", 20),
        ({"resume": "never"}, "checkpoint.resume", "never"),
        ({"max_restarts": 1}, "faults.max_restarts", 1),
        ({"max_infra_restarts": 2}, "faults.max_infra_restarts", 2),
        ({"init_from": "old"}, "checkpoint.init_from", "old"),
        ({"preset": "llama-60m"}, "model.preset", "llama-60m"),
        ({"accumulate_grad_batches": 3}, "gradient_accumulation_steps", 3),
        ({"max_epochs": 3}, "num_train_epochs", 3.0),
    ],
)
def test_names_of_other_trainers_are_translated_everywhere(given, path, value, file):
    def read(config):
        for part in path.split("."):
            config = getattr(config, part)
        return config

    from jtrain.config.yaml_file import dump_yaml

    (name, _), *_ = given.items()
    assert name in ALIASES
    assert read(load(given)) == value
    assert read(load(None, given)) == value
    assert read(load(None, (), {f"JTRAIN_{n.upper()}": str(v) for n, v in given.items() if v != ["tensorboard"]})) in (
        value,
        ("tensorboard",),
    )
    flags = [
        token
        for n, v in given.items()
        for token in (f"--{n.replace('_', '-')}", *([str(v)] if not isinstance(v, list) else v))
    ]
    assert read(load(None, flags)) == value
    written = load(file(dump_yaml(given)))
    assert (
        str(read(written)).endswith(str(value))
        if path in ("run_dir", "checkpoint.init_from")
        else read(written) == value
    )


def test_every_alias_stands_in_the_table_of_the_test():
    marks = test_names_of_other_trainers_are_translated_everywhere.pytestmark
    tested = {next(iter(case[0])) for mark in marks for case in mark.args[1]}
    assert tested == set(ALIASES)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"mehs": 1}, ["mehs", "Did you mean mesh?"]),
        ({"mesh": {"fdsp": 2}}, ["mesh.fdsp", "Did you mean mesh.fsdp?"]),
        ({"fsdp": 2}, ["Did you mean mesh.fsdp?"]),
        ({"model": {"zzz": 2}}, ["model has: preset,"]),
        ({"optimiser": {"learning_rte": 2}}, ["optimiser", "Did you mean optimizer?"]),
        ({"optimizer": {"max_steps": 2}}, ["optimizer.max_steps", "Did you mean max_steps?"]),
        ({"mesh": {"fsdp": "x"}}, ["mesh.fsdp: 'x'", "a whole number"]),
        ({"mesh": {"fsdp": 1.5}}, ["mesh.fsdp: 1.5", "a whole number"]),
        ({"max_length": True}, ["max_length: True", "a whole number above 0"]),
        ({"optimizer": {"name": "adamm"}}, ["'adamm'", "lion", "Did you mean adamw?"]),
        ({"precision": "bf16"}, ["Did you mean bf16-mixed?"]),
        ({"learning_rate": float("nan")}, ["learning_rate: nan", "a finite number"]),
        ({"learning_rate": "inf"}, ["learning_rate: 'inf'", "a finite number"]),
        ({"max_steps": -1}, ["max_steps: -1", "num_train_epochs"]),
        ({"max_steps": -5}, ["max_steps: -5", "2 epochs"]),
        ({"max_steps": "3 eons"}, ["'3 eons'", "2 epochs"]),
        ({"max_steps": 2**31}, [str(2**31)]),
        ({"max_steps": "1e999999999 tokens"}, ["max_steps: '1e999999999 tokens'", "1e9 tokens"]),
        ({"schedule": {"warmup_steps": -0.1}}, ["schedule.warmup_steps: -0.1"]),
        ({"schedule": {"warmup_steps": 1.5}}, ["schedule.warmup_steps: 1.5", "ratio"]),
        ({"data": {"eval": 1.5}}, ["data.eval: 1.5", "below 1"]),
        ({"run_dir": ""}, ["run_dir: ''", "not empty"]),
        ({"strategy": "auto"}, ["strategy: 'auto' is not built yet", "zero3"]),
        ({"mesh": "auto"}, ["mesh: 'auto' is not built yet", "fsdp=4"]),
        ({"model": {"lora": {"dora": True}}}, ["model.lora.dora: True", "rank: 0", "model.lora.rank: 8"]),
        ({"model": {"lora": {"base": "nf4"}}}, ["model.lora.base: 'nf4'", "trains nothing"]),
        ({"model": {"lora": {"rank": 4, "targets": []}}}, ["model.lora.targets", "nothing", "all-linear"]),
        ({"model": {"lora": {"rnk": 4}}}, ["model.lora.rnk", "model.lora.rank"]),
        ({"task": "grpo"}, ["'grpo' is not built yet", "pretrain"]),
        ({"sft": {"assistant_only_loss": True}}, ["sft with task: pretrain", "task: sft"]),
        ({"data.truncation": "keep_end"}, ["data.truncation: 'keep_end' with task: pretrain", "task: sft"]),
        ({"data.packing": "best_fit_split"}, ["best_fit_split with task: pretrain", "data.packing: best_fit"]),
        (
            {"task": "sft", "data": {"packing": "concat", "buckets": [8]}},
            ["data.buckets: [8] with data.packing: concat", "data.packing: none"],
        ),
        ({"task": "sft", "data.buckets": [8, 2048]}, ["data.buckets: 2048 is over max_length: 1024"]),
        ({"mesh": "fsdp"}, ["mesh: 'fsdp'", "fsdp=4,tensor=2"]),
        ({"mesh": "fsdp=2,fsdp=4"}, ["twice"]),
        ({"mesh": 4}, ["mesh: 4", "fsdp=4,tensor=2"]),
        ({"learning_rate": 1, "optimizer": {"learning_rate": 2}}, ["learning_rate", "contradicts", "keep one"]),
        ({"report_to": "wandb"}, ["'wandb'", "tensorboard"]),
        ({"bf16": "perhaps"}, ["bf16: 'perhaps'"]),
        ({"sharding": {"rules": {"mlp": ["tensr"]}}}, ["'tensr'", "Did you mean tensor?"]),
    ],
)
def test_a_mistake_is_answered_with_field_value_and_remedy(source, words):
    message = refused(source)
    assert all(word in message for word in words), message
    assert len(message) < 400 and "pydantic" not in message


def test_a_mistake_names_the_place_where_it_was_written(file):
    path = file("seed: 1\noptimizer:\n  name: adamw\n  learning_rat: 3\n")
    assert f"{path} line 4: optimizer.learning_rat: there is no such field" in refused(path)
    path = file("seed: 1\nmax_length: none\n")
    assert f"{path} line 2: max_length: 'none'" in refused(path)
    assert "line 1: run_dir: ''" in refused(file("run_dir: ''\n"))  # and not the folder of the file
    assert "JTRAIN_MESH__FSDP: 'x'" in refused(None, (), {"JTRAIN_MESH__FSDP": "x"}).replace(" (mesh.fsdp)", "")
    assert "--mesh.fsdp: 'x'" in refused(None, ["--mesh.fsdp", "x"])


def test_blank_values_and_sections_leave_the_default(file):
    config = load(file("optimizer:\n  # learning_rate: 1\nstrategy:\nprecision:\nmesh:\nseed: 7\n"))
    assert config.model_copy(update={"seed": 42}) == load(None)


def test_a_file_must_be_a_utf8_mapping(file, tmp_path):
    assert "a list, not a mapping" in refused(file("- a\n"))
    assert load(file("")) == load(None)
    (tmp_path / "b.yaml").write_bytes(b"\xff")
    assert "config: a list" in refused(["a"])
    assert "not UTF-8" in refused(str(tmp_path / "b.yaml"))


def test_foreign_variables_are_left_alone_and_near_misses_are_not(caplog):
    with caplog.at_level(logging.WARNING):
        assert load(None, (), {"JTRAIN_WORKSPACE_HQ": "x", "JTRAIN_CACHE_DIR": "/c", "OTHER": "1"}) == load(None)
    assert "JTRAIN_WORKSPACE_HQ" in caplog.text and "JTRAIN_CACHE_DIR" not in caplog.text
    assert "Did you mean max_steps?" in refused(None, (), {"JTRAIN_MAX_STPES": "3"})
    assert "JTRAIN_MESH__FSPD" in refused(None, (), {"JTRAIN_MESH__FSPD": "3"})


def test_lengths_have_one_form():
    for written, form in (("100", 100), (100.0, 100), ("100 steps", 100), (0.05, 0.05), ("5%", "5%"), ("0.5", 0.5)):
        assert load({"save_steps": written}).checkpoint.save_steps == form
        assert load(None, ["--save-steps", str(written)]).checkpoint.save_steps == form
    assert load({"max_steps": "2 epochs"}).max_steps == "2 epochs"
    assert type(load({"max_steps": np.int32(3)}).max_steps) is int


def test_a_config_object_is_not_changed_by_the_environment():
    config = load(None, ["--seed", "1"], {"JTRAIN_SEED": "2"})
    assert load(config, (), {"JTRAIN_SEED": "2"}).seed == 1


def test_another_mesh_takes_a_strategy_and_what_it_stood_for_away():
    config = load(load({"strategy": "zero2", "max_steps": 5}), {"mesh": "fsdp=2"})
    assert config == load({"mesh": "fsdp=2", "max_steps": 5})


def test_a_config_object_is_a_source_too():
    config = load({"mesh": "fsdp=2", "max_steps": 5})
    assert load(config) == config
    assert load(config, {"num_train_epochs": 1}).max_steps is None


def test_names_of_the_hub_are_no_paths(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "model: {path: org/name@v1}\ndata: {train: ['hf:org/text:train', b.txt], eval: ['hf:org/x']}"
    )
    config = load_config(tmp_path / "a.yaml", env={})
    assert config.model.path == "org/name@v1"
    assert config.data.train == ("hf:org/text:train", str(tmp_path / "b.txt"))
    assert config.data.eval == ("hf:org/x",)
