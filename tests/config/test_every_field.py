"""A walk over every field and choice: each can be set, is carried into the run's config, and is read by the program.

That each also changes what a run does is tests/tasks/test_every_field.py.
"""

import ast
from pathlib import Path

import pytest

import jtrain
from jtrain.config import load_config, to_yaml
from jtrain.config.contrastive_section import ContrastiveConfig
from jtrain.config.names import choices, fields
from jtrain.config.schema import DistillConfig, DpoConfig, LoraConfig, RewardConfig
from jtrain.config.task_sections import RoleConfig
from jtrain.config.yaml_file import dump_yaml

BASE = {"max_steps": 10, "data": {"train": ["a.txt"], "eval": ["e.txt"]}, "accelerator": "tpu"}
"""A config in which every field may take the value of the table."""

CHANGED = {
    "run_dir": "/elsewhere",
    "seed": 7,
    "max_steps": 20,
    "num_train_epochs": 2.0,
    "max_length": 64,
    "global_batch_size": 64,
    "per_device_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "fast_dev_run": 3,
    "deterministic": True,
    "devices": 16,
    "overlap": "off",
    "xla_options": {"xla_backend_optimization_level": 1},
    "compile_cache": "/cache",
    "distributed.coordinator_address": "host:1234",
    "distributed.num_processes": 2,
    "distributed.process_id": 1,
    "distributed.bind_address": "host:1234",
    "model.preset": "llama-60m",
    "model.path": "/model",
    "model.vocab_size": 2048,
    "model.hidden_size": 64,
    "model.intermediate_size": 96,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 8,
    "model.num_key_value_heads": 1,
    "model.head_dim": 16,
    "model.max_position_embeddings": 4096,
    "model.rope_theta": 500_000.0,
    "model.tie_word_embeddings": False,
    "model.norm_eps": 1e-6,
    "model.attention_bias": True,
    "model.mlp_bias": True,
    "model.dropout": 0.1,
    "model.num_experts": 4,
    "model.num_experts_per_tok": 3,
    "model.moe_intermediate_size": 8,
    "model.n_shared_experts": 1,
    "model.norm_topk_prob": False,
    "model.routed_scaling_factor": 2.5,
    "model.router_aux_loss_coef": 0.01,
    "model.router_z_loss_coef": 0.001,
    "model.router_bias_update_rate": 0.001,
    "model.first_k_dense_replace": 1,
    "model.expert_capacity_factor": 1.25,
    "model.lora.rank": 4,
    "model.lora.alpha": 8.0,
    "model.lora.dropout": 0.1,
    "model.lora.targets": ("q_proj",),
    "model.lora.rslora": True,
    "model.lora.dora": True,
    "model.lora.path": "/adapter",
    "mesh.expert": 2,
    "model.initializer_range": 0.01,
    "data.train": ("/b.txt",),
    "data.weights": (2.0,),
    "data.eval": 0.2,
    "data.tokenizer": "/t.json",
    "data.text_field": "body",
    "data.append_eos": False,
    "data.prepend_bos": True,
    "data.chat_template": "/chat.jinja",
    "data.buckets": (64,),
    "sft.completion_only_loss": False,
    "sft.assistant_only_loss": True,
    "sft.neftune_noise_alpha": 5.0,
    "reward.center_rewards_coefficient": 0.01,
    "contrastive.image_field": "picture",
    "contrastive.label_field": "kind",
    "contrastive.classes": ("cat", "dog"),
    "contrastive.templates": ("a {}",),
    "distill.teacher": "/teacher",
    "distill.beta": 0.3,
    "distill.temperature": 2.0,
    "distill.ce_weight": 0.25,
    "distill.top_k": 64,
    "distill.precompute_teacher": True,
    "distill.on_policy_fraction": 0.5,
    "distill.seq_kd": True,
    "distill.max_completion_length": 32,
    "distill.sampling_temperature": 0.7,
    "reward.disable_dropout": False,
    "dpo.loss_weights": (0.5,),
    "dpo.beta": 0.3,
    "dpo.label_smoothing": 0.1,
    "dpo.f_alpha_divergence_coef": 0.3,
    "dpo.discopop_tau": 0.1,
    "dpo.ld_alpha": 0.5,
    "dpo.use_weighting": True,
    "dpo.simpo_gamma": 1.0,
    "dpo.cpo_alpha": 0.5,
    "dpo.alpha": 0.1,
    "dpo.desirable_weight": 1.3,
    "dpo.undesirable_weight": 0.7,
    "dpo.ref_model": "/reference",
    "dpo.precompute_ref_log_probs": True,
    "dpo.precompute_ref_batch_size": 64,
    "dpo.sync_ref_model": True,
    "dpo.ref_model_mixup_alpha": 0.3,
    "dpo.ref_model_sync_steps": 64,
    "dpo.disable_dropout": False,
    "data.shuffle": False,
    "data.cache_dir": "/cache",
    "data.max_bad_records": 5,
    "data.num_workers": 3,
    "data.prefetch": 4,
    "mesh.data": 1,
    "mesh.fsdp": 2,
    "mesh.pipeline": 2,
    "mesh.context": 2,
    "mesh.tensor": 2,
    "mesh.slices": 2,
    "pipeline.microbatches": 4,
    "pipeline.virtual_stages": 2,
    "sharding.rules": {"mlp": ("fsdp",)},
    "sharding.optimizer_axes": ("data",),
    "sharding.gradient_axes": ("data",),
    "sharding.offload_optimizer": True,
    "sharding.offload_parameters": True,
    "dcn.rank": 8,
    "dcn.error_feedback": False,
    "dcn.local_steps": 50,
    "dcn.outer_learning_rate": 1.0,
    "dcn.outer_momentum": 0.5,
    "dcn.outer_nesterov": False,
    "loss.label_smoothing": 0.1,
    "loss.z_loss": 1e-4,
    "loss.chunk_size": 128,
    "optimizer.learning_rate": 1e-5,
    "optimizer.weight_decay": 0.5,
    "optimizer.beta1": 0.8,
    "optimizer.beta2": 0.99,
    "optimizer.eps": 1e-6,
    "optimizer.max_grad_norm": 0.5,
    "optimizer.decay_rules": ((".*", 1.0),),
    "optimizer.freeze": (".*embed.*",),
    "optimizer.ema_decay": 0.9,
    "schedule.warmup_steps": 5,
    "schedule.min_ratio": 0.0,
    "schedule.decay_steps": 3,
    "checkpoint.save_steps": "5%",
    "checkpoint.save_minutes": 5.0,
    "checkpoint.save_total_limit": 1,
    "checkpoint.best": "perplexity",
    "checkpoint.keep_best": 2,
    "checkpoint.resume": 5,
    "checkpoint.init_from": "/old",
    "checkpoint.async_save": False,
    "checkpoint.backup": "/second",
    "eval.eval_steps": 5,
    "eval.batch_size": 8,
    "eval.max_batches": 3,
    "eval.use_ema": False,
    "eval.early_stopping_patience": 2,
    "eval.early_stopping_threshold": 0.1,
    "eval.metrics": ("bleu", "rouge"),
    "eval.metric_examples": 10,
    "eval.max_new_tokens": 16,
    "eval.num_samples": 2,
    "eval.sample_prompts": ("Once",),
    "eval.sample_tokens": 8,
    "eval.sample_temperature": 0.0,
    "logging.log_every_n_steps": 1,
    "logging.trackers": (),
    "faults.max_consecutive_skips": 3,
    "faults.spike_window": 16,
    "faults.spike_threshold": 6.0,
    "faults.max_rollbacks": 5,
    "faults.rollback_margin": 2,
    "faults.bundle_step": 7,
    "faults.check_replicas_every_n_steps": 100,
    "faults.replay_every_n_steps": 100,
    "faults.watchdog_minutes": 30.0,
    "faults.preemption_signals": ("SIGHUP",),
    "faults.preemption_grace_seconds": 30.0,
    "faults.max_restarts": 1,
    "faults.max_infra_restarts": 2,
    "roles.reference.devices": 4,
    "roles.teacher.devices": 4,
    "roles.reference.data": 4,
    "roles.teacher.data": 4,
    "roles.reference.fsdp": 4,
    "roles.teacher.fsdp": 4,
    "roles.reference.tensor": 4,
    "roles.teacher.tensor": 4,
    "roles.reference.expert": 4,
    "roles.teacher.expert": 4,
}

SFT, DPO = {"task": "sft"}, {"task": "dpo"}
TOGETHER = {
    **dict.fromkeys(("data.packing", "data.truncation", "data.chat_template"), SFT),
    **dict.fromkeys(("sft.completion_only_loss", "sft.assistant_only_loss", "sft.neftune_noise_alpha"), SFT),
    **dict.fromkeys(("eval.metrics", "eval.metric_examples", "eval.max_new_tokens", "eval.num_samples"), SFT),
    "data.buckets": {**SFT, "data.packing": "none"},
    **{f"dpo.{name}": DPO for name in DpoConfig.model_fields},
    **{f"reward.{name}": {"task": "reward"} for name in RewardConfig.model_fields},
    **{f"distill.{name}": {"task": "distill"} for name in DistillConfig.model_fields},
    **{f"contrastive.{name}": {"task": "contrastive"} for name in ContrastiveConfig.model_fields},
    "distill.beta": {"task": "distill", "distill.loss": "jsd"},
    "distill.tail": {"task": "distill", "distill.top_k": 64},
    "distill.precompute_dtype": {"task": "distill", "distill.precompute_teacher": True},
    **{
        f"distill.{name}": {"task": "distill", "distill.seq_kd": True, "data.packing": "none"}
        for name in ("max_completion_length", "sampling_temperature")
    },
    "dpo.label_smoothing": {**DPO, "dpo.loss_type": "robust"},
    "dpo.f_alpha_divergence_coef": {**DPO, "dpo.f_divergence_type": "alpha_divergence"},
    "dpo.discopop_tau": {**DPO, "dpo.loss_type": "discopop"},
    **{f"dpo.{name}": {**DPO, "dpo.loss_type": "simpo"} for name in ("simpo_gamma", "cpo_alpha", "alpha")},
    **{f"dpo.{name}": {**DPO, "dpo.loss_type": "kto"} for name in ("desirable_weight", "undesirable_weight")},
    **{f"dpo.ref_model_{name}": {**DPO, "dpo.sync_ref_model": True} for name in ("mixup_alpha", "sync_steps")},
    "dpo.precompute_ref_batch_size": {**DPO, "dpo.precompute_ref_log_probs": True},
    **{f"roles.reference.{name}": DPO for name in RoleConfig.model_fields},
    **{f"roles.teacher.{name}": {"task": "distill"} for name in RoleConfig.model_fields},
    "exo_pair": {"dpo.label_smoothing": 0.001},
    **{f"model.lora.{name}": {"model.lora.rank": 4} for name in LoraConfig.model_fields if name != "rank"},
    "model.lora.path": {"model.path": "/base"},
    "distributed.process_id": {"distributed.num_processes": 2},
    "dcn.compression": {"mesh.slices": 2},
    "dcn.local_steps": {"mesh.slices": 2},
}
"""What else has to be set for a value to be legal."""

CHOICES = [(path, choice) for path in fields() for choice in choices(path)]


def value_of(config, path):
    for part in path.split("."):
        config = getattr(config, part)
    return config


def load(overrides):
    return load_config(BASE, overrides, {})


def test_the_table_is_the_schema():
    with_choices = {path for path, _ in CHOICES}
    assert set(CHANGED) | with_choices == set(fields())


@pytest.mark.parametrize("path", CHANGED)
def test_every_field_is_carried_from_python_file_environment_and_into_the_run(path, tmp_path):
    changed = CHANGED[path]
    config = load({path: changed, **TOGETHER.get(path, {})})
    assert value_of(config, path) == changed != value_of(load({}), path)

    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml({path: changed}))
    assert value_of(load_config(BASE | TOGETHER.get(path, {}), load_config_values(file, path), {}), path) == changed

    text = changed if isinstance(changed, str) else dump_yaml(changed).removesuffix("...\n")
    variable = "JTRAIN_" + path.upper().replace(".", "__")
    assert value_of(load_config(BASE | TOGETHER.get(path, {}), (), {variable: text.strip()}), path) == changed

    (tmp_path / "saved.yaml").write_text(to_yaml(config))
    assert value_of(load_config(str(tmp_path / "saved.yaml"), (), {}), path) == changed


def load_config_values(file, path):
    """The value of `path` as the file gives it, with nothing else of that file."""
    from jtrain.config.load import from_file

    return {path: from_file(file).values[path]}


@pytest.mark.parametrize(("path", "choice"), CHOICES)
def test_every_choice_is_taken(path, choice):
    accelerator = {"splash": "tpu", "megablox": "tpu", "cudnn": "gpu"}.get(choice, "auto")
    beside = TOGETHER.get(path, {}) | TOGETHER.get(choice, {})
    config = load({"accelerator": accelerator, path: choice, **beside})
    value = value_of(config, path)
    assert choice in (value if isinstance(value, tuple) else (value,))


RESOLVED = {
    "faults.watchdog_minutes": "outer_limits",
    "strategy": "mesh",
    "mesh.pipeline": "mesh",
    "mesh.context": "mesh",
    "mesh.expert": "mesh",
    "mesh.data": "mesh",
    "mesh.fsdp": "mesh",
    "mesh.tensor": "mesh",
    "global_batch_size": "resolve_batch",
    "per_device_batch_size": "resolve_batch",
    "gradient_accumulation_steps": "resolve_batch",
    **{
        f"roles.{role}.{name}": "mesh_of"
        for role in ("reference", "teacher")
        for name in ("data", "fsdp", "tensor", "expert")
    },
    "task": "tasks",  # one choice so far: any other is refused
}
"""Fields that the program reads through a rule or as a whole section: the field -> the name that is asked for."""


def test_every_field_is_read_outside_the_config():
    """A field that nothing reads is a dead option: its name must be an attribute or name that some module asks for."""
    package = Path(jtrain.__file__).parent
    nodes = [
        node
        for file in package.rglob("*.py")
        if file.relative_to(package).parts[0] != "config"
        for node in ast.walk(ast.parse(file.read_text()))
    ]
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    read |= {node.id for node in nodes if isinstance(node, ast.Name)}
    read |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not [path for path in fields() if RESOLVED.get(path, path.rpartition(".")[2]) not in read]
