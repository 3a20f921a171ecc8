"""Rules of the section `dpo`: what its losses can be combined with, and which of them read a field."""

from __future__ import annotations

from jtrain.config.schema import Config, DpoConfig
from jtrain.errors import ConfigError

UNPAIRED = ("kto", "apo_zero_unpaired")
ALONE = ("orpo", "simpo", "cpo", *UNPAIRED)
"""Losses that can't be parts of a list: they have no reference, or other data."""
_F_DIVERGENCE = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
_PAIRED_WITH_REFERENCE = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
_SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired", "cpo", "simpo")

READ_BY_LOSSES: dict[str, tuple[str, ...]] = {
    "label_smoothing": _SMOOTHED,
    "f_divergence_type": _F_DIVERGENCE,
    "f_alpha_divergence_coef": _F_DIVERGENCE,
    "discopop_tau": ("discopop",),
    "ld_alpha": _PAIRED_WITH_REFERENCE,
    "use_weighting": tuple(kind for kind in _PAIRED_WITH_REFERENCE if kind not in ("aot", "aot_unpaired", "sft")),
    "simpo_gamma": ("simpo",),
    "cpo_alpha": ("cpo", "simpo"),
    "alpha": ("cpo", "simpo"),
    "desirable_weight": UNPAIRED,
    "undesirable_weight": UNPAIRED,
    "ref_model": (*_PAIRED_WITH_REFERENCE, *UNPAIRED),
    "precompute_ref_log_probs": (*_PAIRED_WITH_REFERENCE, *UNPAIRED),
    "sync_ref_model": (*_PAIRED_WITH_REFERENCE, *UNPAIRED),
}
"""Field of `dpo` -> losses that read it; a list reads it where one of its losses does."""
_OF_ALL = ("f_divergence_type", "use_weighting")
"""Fields that every loss of a list must be able to read."""


def check_dpo(config: Config) -> None:
    """Sees that the losses go together, and that every field that is set is read by one of them.

    Raises:
      ConfigError: it is not so.
    """
    section, default = config.dpo, DpoConfig()
    kinds, weights = section.loss_type, section.loss_weights
    if weights and len(weights) != len(kinds):
        raise ConfigError(
            f"dpo.loss_weights: {len(weights)} weights for the {len(kinds)} losses of dpo.loss_type",
            "Give every loss a weight, or none.",
        )
    alone = [kind for kind in kinds if kind in ALONE]
    if alone and len(kinds) > 1:
        raise ConfigError(
            f"dpo.loss_type: {list(kinds)}: {alone[0]} can't be combined with others",
            f"Write dpo.loss_type: {alone[0]}.",
        )
    if alone and weights:
        raise ConfigError(f"dpo.loss_weights: {list(weights)} with dpo.loss_type: {alone[0]}", "Leave it out.")
    for field, readers in READ_BY_LOSSES.items():
        value = getattr(section, field)
        reads = [kind in readers for kind in kinds]
        if value != getattr(default, field) and not (all(reads) if field in _OF_ALL else any(reads)):
            named = next(kind for kind, read in zip(kinds, reads, strict=True) if not read)
            raise ConfigError(
                f"dpo.{field}: {value!r} with dpo.loss_type: {named}, which does not read it",
                f"Leave it out; it is for {', '.join(readers)}.",
            )
    if section.f_alpha_divergence_coef != default.f_alpha_divergence_coef and (
        section.f_divergence_type != "alpha_divergence"
    ):
        raise ConfigError(
            f"dpo.f_alpha_divergence_coef: {section.f_alpha_divergence_coef:g} with dpo.f_divergence_type: "
            f"{section.f_divergence_type}",
            "Write dpo.f_divergence_type: alpha_divergence, or leave it out.",
        )
    if section.precompute_ref_batch_size is not None and not section.precompute_ref_log_probs:
        raise ConfigError(
            f"dpo.precompute_ref_batch_size: {section.precompute_ref_batch_size} without precomputing",
            "Write dpo.precompute_ref_log_probs: true, or leave it out.",
        )
    _synchronised(config)
    if "exo_pair" in kinds and not section.label_smoothing:
        raise ConfigError(
            "dpo.label_smoothing: 0 with dpo.loss_type: exo_pair, which takes its logarithm",
            "Write dpo.label_smoothing: 0.001, as its paper does.",
        )
    if "robust" in kinds and section.label_smoothing >= 0.5:
        raise ConfigError(
            f"dpo.label_smoothing: {section.label_smoothing:g} with dpo.loss_type: robust: labels that are wrong as "
            "often as right say nothing",
            "Write a number below 0.5.",
        )
    if config.task in ("dpo", "reward") and config.data.packing != "none":
        raise ConfigError(
            f"data.packing: {config.data.packing} with task: {config.task}, which has a pair in a row",
            "Write data.packing: none, or leave it out.",
        )


def _synchronised(config: Config) -> None:
    """What a reference that moves can't be, and fields that only it reads."""
    section, default, lora = config.dpo, DpoConfig(), config.model.lora
    if not section.sync_ref_model:
        for field in ("ref_model_mixup_alpha", "ref_model_sync_steps"):
            if getattr(section, field) != getattr(default, field):
                raise ConfigError(
                    f"dpo.{field}: {getattr(section, field)} without dpo.sync_ref_model",
                    "Write dpo.sync_ref_model: true, or leave it out.",
                )
        return
    for given, what, why in (
        (lora.rank or lora.path, "adapters (model.lora)", "the policy's own base is the reference"),
        (section.precompute_ref_log_probs, "dpo.precompute_ref_log_probs", "a table is of one reference"),
        (section.ref_model is not None, "dpo.ref_model", "the reference that moves begins as the policy"),
    ):
        if given:
            raise ConfigError(f"dpo.sync_ref_model: true with {what}: {why}", "Leave out one of them.")
