"""Rules of the section `distill`: what its options can be combined with, and which of them read a field."""

from __future__ import annotations

from jtrain.config.schema import Config, DistillConfig
from jtrain.errors import ConfigError

COLDEST = 0.01
"""Below it the differences of usual logits overflow (1e-30), or both distributions are one token alone."""


def check_distill(config: Config) -> None:
    """Sees that every field that is set is read, and that completions can be drawn where they are wanted.

    Raises:
      ConfigError: it is not so.
    """
    section, default = config.distill, DistillConfig()
    if section.temperature < COLDEST:
        raise ConfigError(
            f"distill.temperature: {section.temperature:g}: logits divided by it are beyond what float32 can compare",
            f"Write {COLDEST:g} or more; 1 leaves the distributions as they are.",
        )
    generates = bool(section.on_policy_fraction) or section.seq_kd
    read = {
        "beta": (section.loss == "jsd", "distill.loss: jsd"),
        "tail": (section.top_k > 0, "distill.top_k: 64 (or another)"),
        "precompute_dtype": (section.precompute_teacher, "distill.precompute_teacher: true"),
        "max_completion_length": (generates, "distill.on_policy_fraction: 0.5 (or another), or distill.seq_kd: true"),
        "sampling_temperature": (generates, "distill.on_policy_fraction: 0.5 (or another), or distill.seq_kd: true"),
    }
    for field, (reads, remedy) in read.items():
        value = getattr(section, field)
        if value != getattr(default, field) and not reads:
            raise ConfigError(
                f"distill.{field}: {value!r} without {remedy.partition(':')[0]}, which alone reads it"
                if field != "beta"
                else f"distill.beta: {value:g} with distill.loss: {section.loss}, which does not read it",
                f"Write {remedy}, or leave distill.{field} out.",
            )
    if not generates or config.task != "distill":
        return
    named = "distill.seq_kd: true" if section.seq_kd else f"distill.on_policy_fraction: {section.on_policy_fraction:g}"
    if section.precompute_teacher:
        raise ConfigError(
            f"distill.precompute_teacher: true with {named}: completions that are not drawn yet can't be scored before",
            "Leave one of them out.",
        )
    if config.data.packing != "none":
        raise ConfigError(
            f"data.packing: {config.data.packing} with {named}: a completion needs the rest of its row",
            "Write data.packing: none, or leave it out.",
        )
    if section.max_completion_length >= config.max_length:
        raise ConfigError(
            f"distill.max_completion_length: {section.max_completion_length} leaves rows of max_length: "
            f"{config.max_length} no place for a prompt",
            f"Write distill.max_completion_length: {max(1, config.max_length // 2)} (or another), or a larger "
            "max_length.",
        )
