"""Every field and every choice changes something: what a run computes, or what the test that is named for it sees.

A trainer is built for each value. Two runs differ as soon as shapes, places, times or rows do; where those are equal
the programs are traced, not compiled: two that print alike compute alike. That each field also reaches the run from
file, environment and flag is tests/config/test_every_field.py.
"""

import ast
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrain.config.names import choices, fields
from jtrain.config.schema import LoraConfig
from jtrain.tasks import trainer_of

ROOT = Path(__file__).parents[2]
BPE = str(ROOT / "configs" / "assets" / "jargon-bpe-1024.json")

TEXTS = [{"text": "a quick brown fox " * (1 + n % 5), "body": f"number {n} " * 4} for n in range(40)]
BASE = {
    "max_steps": 20,
    "max_length": 32,
    "global_batch_size": 8,
    "precision": "32-true",
    "compile_cache": "",
    "accelerator": "cpu",
    "devices": 8,
    "mesh.data": 2,
    "mesh.fsdp": 2,
    "mesh.tensor": 2,
    "model.hidden_size": 16,
    "model.intermediate_size": 32,
    "model.num_hidden_layers": 1,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 2,
    "data.eval": 0.2,
    "checkpoint.best": None,
    "logging.trackers": (),
}

COMPUTED = {
    "seed": 7,
    "max_steps": 30,
    "num_train_epochs": 3,
    "max_length": 16,
    "fast_dev_run": 3,
    "global_batch_size": 16,
    "per_device_batch_size": 1,
    "gradient_accumulation_steps": 2,
    "devices": 4,
    "model.preset": "gpt2-124m",
    "model.vocab_size": 300,
    "model.hidden_size": 32,
    "model.intermediate_size": 48,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 8,
    "model.num_key_value_heads": 4,
    "model.head_dim": 8,
    "model.rope_theta": 500_000.0,
    "model.tie_word_embeddings": False,
    "model.norm_eps": 1e-6,
    "model.attention_bias": True,
    "model.mlp_bias": True,
    "model.dropout": 0.1,
    "model.initializer_range": 0.01,
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
    "model.expert_capacity_factor": 1.0,
    "model.lora.rank": 4,
    "model.lora.alpha": 8.0,
    "model.lora.dropout": 0.1,
    "model.lora.targets": ("q_proj",),
    "model.lora.rslora": True,
    "model.lora.dora": True,
    "data.text_field": "body",
    "data.tokenizer": BPE,
    "data.append_eos": False,
    "data.prepend_bos": True,
    "data.shuffle": False,
    "data.eval": 0.4,
    "mesh.data": 4,
    "mesh.fsdp": 4,
    "mesh.pipeline": 2,
    "mesh.context": 2,
    "mesh.tensor": 1,
    "mesh.expert": 2,
    "pipeline.microbatches": 2,
    "pipeline.virtual_stages": 2,
    "sharding.rules": {"mlp": ("fsdp",)},
    "sharding.optimizer_axes": ("data",),
    "sharding.gradient_axes": ("data",),
    "dcn.rank": 2,
    "dcn.error_feedback": False,
    "dcn.local_steps": 2,
    "dcn.outer_learning_rate": 1.0,
    "dcn.outer_momentum": 0.5,
    "dcn.outer_nesterov": False,
    "sft.neftune_noise_alpha": 5.0,
    "loss.label_smoothing": 0.1,
    "loss.z_loss": 1e-4,
    "loss.chunk_size": 4,
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
    "eval.eval_steps": 5,
    "checkpoint.save_steps": 5,
    "checkpoint.save_minutes": 5.0,
    "logging.log_every_n_steps": 1,
}
"""Field -> a value with which another program is traced, or other rows, places or times are planned."""

EXPERTS = {"model.num_experts": 4, "model.num_hidden_layers": 2}
OF_EXPERTS = (
    "model.num_experts_per_tok", "model.moe_intermediate_size", "model.n_shared_experts", "model.scoring_func",
    "model.norm_topk_prob", "model.routed_scaling_factor", "model.router_aux_loss_coef", "model.router_z_loss_coef",
    "model.router_bias_update_rate", "model.first_k_dense_replace", "model.expert_capacity_factor",
)  # fmt: skip

STAGES = {"mesh.data": 1, "mesh.pipeline": 2, "model.num_hidden_layers": 4, "global_batch_size": 16}

ADAPTERS = {"model.lora.rank": 4}
OF_ADAPTERS = tuple(f"model.lora.{name}" for name in LoraConfig.model_fields if name != "rank")

BESIDE = {
    **{name: {"task": "sft"} for name in ("data.truncation", "sft.neftune_noise_alpha")},
    "data.packing": {"task": "sft", "max_length": 64},  # some examples share a row, some are longer
    "precision": {"fp8": "emulate"},
    **dict.fromkeys(OF_ADAPTERS, ADAPTERS),
    **dict.fromkeys(OF_EXPERTS, EXPERTS),
    "mesh.expert": {"mesh.data": 1, **EXPERTS},
    "num_train_epochs": {"max_steps": None},
    "per_device_batch_size": {"global_batch_size": None},
    "devices": {"mesh.data": 1},
    "mesh.data": {"mesh.tensor": 1},
    "mesh.fsdp": {"mesh.data": 1},
    "mesh.pipeline": {"mesh.data": 1, "model.num_hidden_layers": 4},
    "mesh.context": {"mesh.data": 1},
    "mesh.tensor": {"mesh.data": 4},
    "context.method": {"mesh.data": 1, "mesh.context": 2},
    "context.layout": {"mesh.data": 1, "mesh.context": 2, "context.method": "ring"},
    "pipeline.microbatches": STAGES,
    "pipeline.virtual_stages": STAGES,
    "pipeline.residuals": STAGES,
    "dcn.compression": {"mesh.slices": 2},
    "dcn.rank": {"mesh.slices": 2, "dcn.compression": "powersgd"},
    "dcn.error_feedback": {"mesh.slices": 2, "dcn.compression": "int8"},
    "dcn.local_steps": {"mesh.slices": 2, "dcn.compression": "int8"},
    "dcn.outer_learning_rate": {"mesh.slices": 2, "dcn.local_steps": 2},
    "dcn.outer_momentum": {"mesh.slices": 2, "dcn.local_steps": 2},
    "dcn.outer_nesterov": {"mesh.slices": 2, "dcn.local_steps": 2},
    "schedule.decay_steps": {"schedule.name": "wsd"},
    "strategy": {"mesh.data": -1, "mesh.fsdp": 1, "mesh.tensor": 1},
}
"""What else is set to make the value legal, or to make it count."""

_CONDITIONAL = ("schedule.decay_steps", *OF_EXPERTS, *OF_ADAPTERS)
COMPARED = {
    name: BESIDE[name] for name in BESIDE if name in _CONDITIONAL or name.startswith(("dcn.", "pipeline.", "sft."))
}
"""Fields that count beside another choice only: what the value is compared with."""

COMPUTED_CHOICES = {
    "precision": 6,  # auto is 32-true here
    "strategy": 4,  # fsdp is another word for zero3
    "dcn.compression": 4,
    "model.remat": 9,
    "model.norm": 2,
    "model.activation": 3,
    "model.scoring_func": 2,
    "model.lora.base": 4,  # auto is keep in float32
    "data.packing": 4,
    "data.truncation": 2,
    "context.method": 2,  # auto is ulysses here
    "context.layout": 2,
    "pipeline.residuals": 2,
    "optimizer.name": 5,
    "schedule.name": 5,
}
"""Field with choices -> programs (or rows) that they make."""

SEEN = {
    "model.lora.path": "tests/tasks/test_adapter_export.py::"
    "test_a_run_begins_with_an_adapter_folder_and_writes_it_back",
    "fp8": "tests/train/test_precision.py::test_fp8_is_refused_where_the_device_has_none",
    "task": "tests/cli/test_main.py::test_train_runs_the_task_of_the_config_and_returns_its_code",
    "run_dir": "tests/train/test_trainer.py::test_every_save_is_durable_before_the_run_says_its_end",
    "deterministic": "tests/parallel/test_xla.py::test_gpu_options_follow_determinism",
    "overlap": "tests/parallel/test_xla.py::test_overlap_gives_an_accelerator_its_options_and_off_takes_them_away",
    "xla_options": "tests/parallel/test_xla.py::test_an_option_of_the_user_reaches_the_compiler_of_the_step",
    "accelerator": "tests/parallel/test_processes.py::test_the_accelerator_chooses_the_platforms_and_auto_leaves_them",
    "compile_cache": "tests/parallel/test_processes.py::test_the_compile_cache_is_a_private_folder",
    "distributed.coordinator_address": "tests/parity/test_processes.py::test_losses_and_rows_are_equal",
    "distributed.num_processes": "tests/parity/test_processes.py::test_losses_and_rows_are_equal",
    "distributed.process_id": "tests/parity/test_processes.py::test_losses_and_rows_are_equal",
    "distributed.bind_address": "tests/parallel/test_processes.py::"
    "test_the_coordinator_listens_where_it_is_told_and_never_on_all_interfaces",
    "model.path": "tests/tasks/test_source.py::test_a_run_begins_with_the_weights_of_the_folder",
    "model.attention": "tests/ops/test_attention.py::test_the_kernel_follows_platform_shape_and_type",
    "model.expert_kernel": "tests/ops/test_grouped_matmul.py::test_the_kernel_follows_platform_shape_and_type",
    "model.max_position_embeddings": "tests/tasks/test_pretrain.py::"
    "test_a_shape_that_does_not_fit_is_refused_with_what_to_change",
    "data.train": "tests/tasks/test_pretrain.py::test_texts_in_memory_and_in_a_file_give_the_same_rows",
    "data.chat_template": "tests/data/test_sft.py::test_the_chat_template_is_part_of_the_cache",
    "data.buckets": "tests/data/test_sft.py::test_a_batch_is_cut_to_the_first_bucket_that_holds_it",
    "sft.completion_only_loss": "tests/data/test_sft.py::test_what_is_learned_follows_the_form_and_the_section",
    "sft.assistant_only_loss": "tests/data/test_sft.py::test_what_is_learned_follows_the_form_and_the_section",
    "reward.center_rewards_coefficient": (
        "tests/tasks/test_reward.py::test_the_first_step_has_trls_loss_metrics_and_norm_of_gradient"
    ),
    "reward.disable_dropout": "tests/tasks/test_dpo.py::test_training_is_without_dropout_unless_it_is_asked_for",
    "dpo.loss_type": "tests/tasks/test_dpo.py::test_what_the_section_says_reaches_the_loss",
    "dpo.loss_weights": "tests/tasks/test_dpo.py::test_what_the_section_says_reaches_the_loss",
    "dpo.beta": "tests/tasks/test_dpo.py::test_what_the_section_says_reaches_the_loss",
    "dpo.label_smoothing": "tests/tasks/test_dpo.py::test_what_the_section_says_reaches_the_loss",
    "dpo.f_divergence_type": "tests/tasks/test_dpo.py::test_what_the_section_says_reaches_the_loss",
    "dpo.f_alpha_divergence_coef": "tests/tasks/test_dpo.py::test_what_the_section_says_reaches_the_loss",
    "dpo.discopop_tau": "tests/tasks/test_dpo.py::test_what_the_section_says_reaches_the_loss",
    "dpo.ld_alpha": "tests/tasks/test_dpo.py::test_what_the_section_says_reaches_the_loss",
    "dpo.use_weighting": "tests/tasks/test_dpo.py::test_what_the_section_says_reaches_the_loss",
    "dpo.simpo_gamma": "tests/tasks/test_dpo.py::test_what_the_section_says_reaches_the_loss",
    "dpo.cpo_alpha": "tests/tasks/test_dpo.py::test_what_the_section_says_reaches_the_loss",
    "dpo.alpha": "tests/tasks/test_dpo.py::test_what_the_section_says_reaches_the_loss",
    "dpo.desirable_weight": "tests/tasks/test_dpo.py::test_what_the_section_says_reaches_the_loss",
    "dpo.undesirable_weight": "tests/tasks/test_dpo.py::test_what_the_section_says_reaches_the_loss",
    "dpo.ref_model": "tests/tasks/test_dpo.py::test_the_first_step_of_dpo_has_trls_loss_metrics_and_norm_of_gradient",
    "dpo.precompute_ref_log_probs": "tests/tasks/test_dpo.py::test_step_0_costs_ln_2_whatever_the_reference",
    "dpo.precompute_ref_batch_size": "tests/tasks/test_dpo.py::test_a_table_is_made_once_and_is_the_same_by_any_batch",
    **{
        f"dpo.{name}": "tests/tasks/test_references.py::test_a_reference_that_moves_takes_its_share_of_the_policy"
        for name in ("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps")
    },
    "dpo.disable_dropout": "tests/tasks/test_dpo.py::test_training_is_without_dropout_unless_it_is_asked_for",
    "data.weights": "tests/data/test_build.py::test_weights_and_order_come_from_the_config",
    "data.cache_dir": "tests/data/test_build.py::test_how_sources_are_tokenised_comes_from_the_config",
    "data.on_bad_record": "tests/tasks/test_pretrain.py::test_records_without_text_may_be_left_out",
    "data.max_bad_records": "tests/tasks/test_pretrain.py::test_records_without_text_may_be_left_out",
    "data.num_workers": "tests/data/test_build.py::test_how_sources_are_tokenised_comes_from_the_config",
    "data.prefetch": "tests/train/test_trainer.py::test_batches_are_read_ahead_on_another_thread_where_that_is_wanted",
    "pipeline.schedule": "tests/train/test_pipelined.py::test_the_section_says_how_the_step_is_pipelined",
    "mesh.slices": "tests/parallel/test_mesh.py::test_slices_keep_every_axis_but_data_inside_a_slice",
    "sharding.offload_optimizer": "tests/train/test_offload.py::"
    "test_optimizer_state_then_parameters_move_from_the_device_to_the_host",
    "sharding.offload_parameters": "tests/train/test_offload.py::"
    "test_optimizer_state_then_parameters_move_from_the_device_to_the_host",
    "checkpoint.save_total_limit": "tests/train/test_trainer.py::test_the_newest_and_the_best_survive",
    "checkpoint.best": "tests/train/test_trainer.py::test_the_newest_and_the_best_survive",
    "checkpoint.best_mode": "tests/train/test_session.py::test_how_checkpoints_are_kept_comes_from_the_config",
    "checkpoint.keep_best": "tests/train/test_session.py::test_how_checkpoints_are_kept_comes_from_the_config",
    "checkpoint.resume": "tests/train/test_session.py::test_a_run_that_goes_back_to_a_step_sets_the_newer_ones_aside",
    "checkpoint.init_from": "tests/train/test_session.py::test_init_from_takes_the_parameters_and_begins_anew",
    "checkpoint.async_save": "tests/train/test_session.py::test_how_checkpoints_are_kept_comes_from_the_config",
    "checkpoint.backup": "tests/checkpoint/test_backup_run.py::"
    "test_a_run_whose_directory_is_gone_goes_on_from_the_copies",
    "eval.batch_size": "tests/train/test_evaluation.py::test_a_limit_means_the_same_rows_on_every_mesh",
    "eval.max_batches": "tests/train/test_evaluation.py::test_a_limit_means_the_same_rows_on_every_mesh",
    "eval.use_ema": "tests/train/test_evaluation.py::test_the_moving_average_is_what_is_evaluated_where_it_is_wanted",
    "eval.early_stopping_patience": "tests/train/test_trainer.py::"
    "test_early_stopping_counts_over_a_resume_and_a_stopped_run_stays_stopped",
    "eval.early_stopping_threshold": "tests/train/test_callbacks.py::"
    "test_early_stopping_waits_for_evaluations_in_a_row_without_a_better_one",
    **{
        f"eval.{name}": "tests/tasks/test_held_out_answers.py::test_they_are_those_of_the_models_own_answers"
        for name in ("metrics", "metric_examples", "max_new_tokens", "num_samples")
    },
    "eval.sample_prompts": "tests/tasks/test_pretrain.py::test_prompts_are_continued_when_the_run_ends",
    "eval.sample_tokens": "tests/tasks/test_pretrain.py::test_prompts_are_continued_when_the_run_ends",
    "eval.sample_temperature": "tests/tasks/test_pretrain.py::test_prompts_are_continued_when_the_run_ends",
    "logging.trackers": "tests/train/test_session.py::test_trackers_and_the_level_of_the_console_come_from_the_config",
    "logging.level": "tests/train/test_session.py::test_trackers_and_the_level_of_the_console_come_from_the_config",
    "faults.nonfinite": "tests/train/test_faults.py::test_stop_ends_the_run_and_warn_goes_on_without_an_event",
    **{
        f"contrastive.{name}": "tests/tasks/test_contrastive.py::test_what_the_section_says_reaches_the_run"
        for name in ("loss", "equal_texts", "image_field", "label_field", "classes", "templates")
    },
    "distill.teacher": "tests/tasks/test_distill.py::test_the_first_step_has_trls_loss_and_norm_of_gradient",
    **{
        f"distill.{name}": "tests/tasks/test_distill.py::test_what_the_section_says_reaches_the_loss"
        for name in ("loss", "beta", "temperature", "ce_weight", "top_k", "tail")
    },
    "distill.precompute_teacher": "tests/tasks/test_distill.py::"
    "test_a_table_is_made_once_and_says_what_the_teacher_says",
    "distill.precompute_dtype": "tests/tasks/test_distill.py::test_another_teacher_than_that_of_the_table_is_noticed",
    **{
        f"distill.{name}": "tests/tasks/test_distill.py::test_a_step_on_the_students_own_completions_scores_these_alone"
        for name in ("on_policy_fraction", "max_completion_length")
    },
    **{
        f"distill.{name}": "tests/tasks/test_distill.py::test_completions_of_the_teacher_are_drawn_as_the_section_says"
        for name in ("seq_kd", "sampling_temperature")
    },
    **{
        f"roles.teacher.{name}": "tests/tasks/test_distill.py::test_the_teacher_lies_on_the_mesh_of_its_role"
        for name in ("devices", "data", "fsdp", "tensor", "expert")
    },
    **{
        f"roles.reference.{name}": "tests/tasks/test_roles.py::test_a_role_lies_where_its_section_says"
        for name in ("devices", "data", "fsdp", "tensor", "expert")
    },
    "faults.max_consecutive_skips": "tests/train/test_trainer.py::test_batches_skipped_one_after_the_other_end_the_run",
    "faults.spike": "tests/train/test_spikes.py::test_the_rule_of_a_config",
    "faults.spike_window": "tests/train/test_spikes.py::test_the_rule_of_a_config",
    "faults.spike_threshold": "tests/train/test_spikes.py::test_the_rule_of_a_config",
    "faults.max_rollbacks": "tests/train/test_rollback.py::"
    "test_no_rollback_without_a_checkpoint_or_where_the_config_forbids_it",
    "faults.rollback_margin": "tests/train/test_rollback.py::"
    "test_b2_a_spike_takes_the_run_back_and_it_goes_on_behind_it",
    "faults.bundle_step": "tests/train/test_bundle.py::test_an_update_can_be_kept_by_request_and_changes_nothing",
    "faults.check_replicas_every_n_steps": "tests/train/test_device_checks.py::"
    "test_b4_replicas_are_compared_every_n_steps_and_before_a_save_and_never_by_default",
    "faults.replay_every_n_steps": "tests/train/test_device_checks.py::"
    "test_b5_an_update_that_comes_to_something_else_the_second_time_ends_the_run",
    "faults.watchdog_minutes": "tests/config/test_ladder.py::test_the_watchdog_sets_the_limits_of_a_step",
    "faults.preemption_signals": "tests/train/test_preemption.py::test_signals_of_the_config_save_and_leave",
    "faults.preemption_grace_seconds": "tests/train/test_guard.py::"
    "test_a_save_that_takes_longer_than_the_grace_is_left_behind",
    "faults.maintenance_notices": "tests/train/test_notices.py::test_notices_are_looked_for_where_the_config_says_so",
    "faults.max_restarts": "tests/launch/test_restarts.py::test_errors_of_the_run_itself_have_a_budget_of_their_own",
    "faults.max_infra_restarts": "tests/launch/test_restarts.py::test_lost_machines_have_a_budget_in_a_row",
}
"""Field -> the test in which another value has another outcome."""


class Run:
    """What a run with these fields would do, each part looked at when it is asked for."""

    def __init__(self, folder, changes):
        given = {name: value for name, value in (BASE | changes).items() if value is not None}
        self.trainer = trainer_of(given.get("task", "pretrain"))({**given, "run_dir": str(folder)}, train_dataset=TEXTS)
        self.program = self.trainer.program
        self.wide = jax.config.jax_enable_x64
        jax.config.update("jax_enable_x64", False)  # 64-true sets it for the whole process

    @functools.cached_property
    def plan(self):
        leaves = [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(self.program.plan.abstract)]
        return str((leaves, self.program.batch, self.program.mesh.devices.tolist(), self.trainer.timetable))

    @functools.cached_property
    def rows(self):
        given = [data.rows(np.arange(40)) for data in (self.trainer.train_rows, self.trainer.eval_rows)]
        return [(name, values.tobytes()) for batch in given for name, values in sorted(batch.items())]

    @functools.cached_property
    def start(self):
        with jax.enable_x64(self.wide):
            return str(jax.make_jaxpr(self.program.model.init)(jax.random.key(0)))

    @functools.cached_property
    def evaluation(self):
        state = self.program.plan.abstract
        return self._traced(self.program.eval_step, state.params, state.variables)

    @functools.cached_property
    def step(self):
        return self._traced(self.program.train_step, self.program.plan.abstract)

    def _traced(self, function, *arguments):
        batch = self.program.batch
        tokens = jax.ShapeDtypeStruct((batch.accumulation, batch.rows, self.trainer.config.max_length), jnp.int32)
        arrays = dict.fromkeys(("input_ids", "labels", "segment_ids", "position_ids"), tokens)
        arrays["row"] = jax.ShapeDtypeStruct(tokens.shape[:2], jnp.int32)
        with jax.enable_x64(self.wide):
            traced = function.trace(*arguments, arrays).jaxpr
            return str(traced), [np.asarray(constant).tobytes() for constant in traced.consts]


QUICK = "plan", "rows", "start"


def differ(run, other, path):
    """Whether two runs differ; the short trace of an evaluation first, where it can show what the field does."""
    parts = (*QUICK, "evaluation", "step") if path.startswith(("model.", "context.")) else (*QUICK, "step")
    return any(getattr(run, part) != getattr(other, part) for part in parts)


@pytest.fixture(scope="module")
def compared_with(tmp_path_factory):
    """Field -> the run that its value is compared with."""
    folder = tmp_path_factory.mktemp("run")
    run = functools.cache(lambda changes: Run(folder, dict(changes)))
    assert not differ(run(()), Run(folder, {}), "model.")  # equal runs are equal
    return lambda path: run(tuple(COMPARED.get(path, {}).items()))


def test_the_table_is_the_schema():
    assert sorted([*COMPUTED, *COMPUTED_CHOICES, *SEEN]) == sorted(fields())


@pytest.mark.parametrize("path", COMPUTED)
def test_every_value_changes_what_a_run_does(path, compared_with, tmp_path):
    assert differ(Run(tmp_path, BESIDE.get(path, {}) | {path: COMPUTED[path]}), compared_with(path), path)


@pytest.mark.parametrize("path", COMPUTED_CHOICES)
def test_every_choice_makes_another_program(path, tmp_path):
    different = []
    for choice in choices(path):
        run = Run(tmp_path, BESIDE.get(path, {}) | {path: choice})
        if all(differ(run, other, path) for other in different):
            different.append(run)
    assert len(different) == COMPUTED_CHOICES[path]


def test_the_tests_that_are_named_exist():
    for place in set(SEEN.values()):
        file, _, name = place.partition("::")
        assert name in {getattr(node, "name", "") for node in ast.parse((ROOT / file).read_text()).body}, place
