"""Rules of the section `distill`: which options read a field."""

from __future__ import annotations

from jtrain.config.schema import Config, DistillConfig
from jtrain.errors import ConfigError


def check_distill(config: Config) -> None:
    """Sees that every field that is set is read.

    Raises:
      ConfigError: it is not so.
    """
    section, default = config.distill, DistillConfig()
    read = {
        "beta": (section.loss == "jsd", "distill.loss: jsd"),
        "tail": (section.top_k > 0, "distill.top_k: 64 (or another)"),
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
