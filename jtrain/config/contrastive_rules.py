"""Rules of `task: contrastive`: what it reads of `model`, and what its section needs."""

from __future__ import annotations

from jtrain.config.schema import Config, ModelConfig
from jtrain.errors import ConfigError

_READ = ("preset", "path", "remat", "attention", "dropout", "lora")
"""Fields of `model`; a preset or a folder says the rest of the shape (lora has a rule of its own)."""


def check_contrastive(config: Config) -> None:
    """Sees that the section can be used, and that no field of `model` is set that is not read.

    Raises:
      ConfigError: it is not so.
    """
    section = config.contrastive
    for template in section.templates:
        if "{}" not in template:
            raise ConfigError(
                f"contrastive.templates: {template!r} has no place for the name of a class",
                "Write {} in it, as in a photo of a {}.",
            )
    if len(set(section.classes)) != len(section.classes) or len(section.classes) == 1:
        raise ConfigError(
            f"contrastive.classes: {', '.join(section.classes)}", "Name two classes or more, each of them once."
        )
    if config.task != "contrastive":
        return
    for name in ModelConfig.model_fields:
        value = getattr(config.model, name)
        if name not in _READ and value != ModelConfig.model_fields[name].default:
            raise ConfigError(
                f"model.{name}: {value!r} with task: contrastive, whose towers have a shape each",
                "Leave it out: model.preset or model.path says the shape.",
            )
    if config.data.packing != "none":
        raise ConfigError(
            f"data.packing: {config.data.packing} with task: contrastive, whose rows are an image with its text each",
            "Leave it out.",
        )
    if config.dcn.local_steps > 1:
        raise ConfigError(
            f"dcn.local_steps: {config.dcn.local_steps} with task: contrastive: slices that train by themselves "
            "have no negatives of each other",
            "Leave it out.",
        )
    if config.mesh.context > 1 or config.mesh.expert > 1:
        field = "context" if config.mesh.context > 1 else "expert"
        raise ConfigError(
            f"mesh.{field}: {getattr(config.mesh, field)} with task: contrastive, which divides neither the tokens "
            "of a text nor experts",
            "Write mesh.data or mesh.fsdp in its place.",
        )
