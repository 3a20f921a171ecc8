"""The sections of tasks: sft, dpo, reward, distill (names and defaults are TRL's); and the meshes of roles."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from jtrain.config.section import NotNegative, Positive, Ratio, Section, one_or_many

PreferenceLoss = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm", "orpo", "simpo", "cpo", "kto", "apo_zero_unpaired",
]  # fmt: skip


def _losses(value: Any) -> Any:
    """A single name is a list of one; an older name of TRL's for aot."""
    value = one_or_many(value)
    return tuple("aot" if name == "aot_pair" else name for name in value) if isinstance(value, list | tuple) else value


class DpoConfig(Section):
    loss_type: Annotated[tuple[PreferenceLoss, ...], BeforeValidator(_losses), Field(min_length=1)] = ("sigmoid",)
    """Losses of preferences, TRL's names: one, or several of the first fifteen with `loss_weights`. kto and
    apo_zero_unpaired learn from single completions; orpo, simpo and cpo need no reference. aot_pair is aot."""
    loss_weights: tuple[float, ...] = ()
    """Weight of each loss of a list; empty: 1 each."""
    beta: Annotated[float, Field(gt=0.0)] = 0.1
    """Strength of the tie to the reference (ipo: tau; orpo: lambda; simpo and cpo: scale of the reward)."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Probability that a label is wrong: exo_pair, robust, aot, aot_unpaired, cpo, simpo."""
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    """Divergence from the reference that the reward is derived from (f-DPO, Wang et al. 2023)."""
    f_alpha_divergence_coef: float = 0.5
    """alpha_divergence: its alpha."""
    discopop_tau: Annotated[float, Field(gt=0.0)] = 0.05
    """discopop: temperature of its mixture."""
    ld_alpha: Ratio | None = None
    """Weight of the tokens behind the length that both completions have (LD-DPO, Liu et al. 2024); blank: 1."""
    use_weighting: bool = False
    """Weighs pairs by the policy's probability of them (WPO, Zhou et al. 2024)."""
    simpo_gamma: float = 0.5
    """simpo: target margin."""
    cpo_alpha: Annotated[float, Field(ge=0.0)] | None = None
    """cpo, simpo: weight of the cross-entropy of the chosen completion; by default 1 for cpo, 0 for simpo."""
    alpha: Annotated[float, Field(ge=0.0)] = 0.0
    """cpo, simpo: alpha of the reward (1 - p^-alpha) / alpha (AlphaPO, Gupta et al. 2025); 0: log p."""
    desirable_weight: Annotated[float, Field(ge=0.0)] = 1.0
    """kto, apo_zero_unpaired: weight of the completions that are wanted."""
    undesirable_weight: Annotated[float, Field(ge=0.0)] = 1.0
    """kto, apo_zero_unpaired: weight of the others."""
    ref_model: str | None = None
    """Path of the reference model; by default the policy as it begins: without its adapters, or a frozen copy."""
    precompute_ref_log_probs: bool = False
    """One pass with the reference before training, and a table in its place: no second model in memory."""
    precompute_ref_batch_size: Positive | None = None
    """Rows of a batch of that pass; by default those of a micro-batch."""
    sync_ref_model: bool = False
    """Moves the reference towards the policy now and then (TR-DPO, Gorbatovski et al. 2024); full fine-tuning."""
    ref_model_mixup_alpha: Annotated[float, Field(gt=0.0, le=1.0)] = 0.6
    """sync_ref_model: the new reference is alpha x policy + (1 - alpha) x reference; 1 replaces it."""
    ref_model_sync_steps: Positive = 512
    """sync_ref_model: updates between two such moves."""
    disable_dropout: bool = True
    """Trains without dropout, also that of adapters: else a policy that equals its reference differs from it."""


class RewardConfig(Section):
    center_rewards_coefficient: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of (chosen + rejected reward)^2, which keeps rewards around 0 (Eisenstein et al. 2023: 0.01); 0: none."""
    disable_dropout: bool = True
    """Trains without dropout, also that of adapters."""


class SftConfig(Section):
    completion_only_loss: Literal["auto"] | bool = "auto"
    """Whether only completions are learned. auto: of records with prompt and completion, yes."""
    assistant_only_loss: bool = False
    """Whether of conversations only what the assistant writes is learned, the end of its turns included."""
    neftune_noise_alpha: Annotated[float, Field(ge=0.0)] = 0.0
    """Noise on the embeddings while training: alpha / sqrt(length x width) (NEFTune, Jain et al. 2023); 0: none."""


class DistillConfig(Section):
    teacher: str | None = None
    """Path of the teacher: what `model.path` takes. It has the student's tokenizer."""
    loss: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """Divergence of the student q from the teacher p. forward_kl: KL(p || q); reverse_kl: KL(q || p); jsd: the
    generalised Jensen-Shannon divergence of `beta`."""
    beta: Ratio = 0.5
    """jsd: beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q (GKD, Agarwal et al. 2024). By convention
    0 is forward_kl and 1 is reverse_kl."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Divides the logits of both before the softmax, 0.01 or more; the loss is not multiplied by its square."""
    ce_weight: Ratio = 0.0
    """Share a of the labels' cross-entropy: the loss is (1 - a) divergence + a cross-entropy."""
    top_k: NotNegative = 0
    """The teacher's likeliest tokens whose log-probabilities are kept at every place; 0: those of all tokens."""
    tail: Literal["bucket", "renormalise"] = "bucket"
    """top_k: what becomes of the other tokens. bucket: one outcome, for both models; renormalise: both distributions
    are those of the k tokens alone."""
    precompute_teacher: bool = False
    """One pass of the teacher over the rows before training, kept in the cache folder: no teacher in memory."""
    precompute_dtype: Literal["float32", "float16"] = "float32"
    """Type in which that pass keeps log-probabilities."""
    on_policy_fraction: Ratio = 0.0
    """Share of the steps that train on the student's own completions of the rows' prompts (GKD's lambda)."""
    seq_kd: bool = False
    """The other steps train on the teacher's completions in place of the data's (Kim and Rush 2016)."""
    max_completion_length: Positive = 128
    """Tokens of a completion that is drawn, at most."""
    sampling_temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """Temperature at which completions are drawn; 0: the likeliest token."""


class RoleConfig(Section):
    """A mesh for a model beside the policy; with every field blank the model lies on the policy's mesh."""

    devices: Literal["shared"] | Positive = "shared"
    """shared: the policy's devices, laid out another way; n: the last n devices of the run, which the policy then has
    not: both compute at the same time. One process only."""
    data: int | None = None
    """Copies of the model. Blank, with another axis or `devices` given: the devices that are left."""
    fsdp: int | None = None
    """Rows and parameters are divided. Blank: 1."""
    tensor: int | None = None
    """Heads, feed-forward and vocabulary are divided. Blank: 1."""
    expert: int | None = None
    """Experts are divided. Blank: 1."""


class RolesConfig(Section):
    reference: RoleConfig = RoleConfig()
    teacher: RoleConfig = RoleConfig()
