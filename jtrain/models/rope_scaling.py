"""How rotary frequencies are stretched for rows longer than those of the first training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from jtrain.errors import ConfigError

RopeType = Literal["llama3", "linear", "yarn", "longrope"]


@dataclass(frozen=True)
class RopeScaling:
    """A stretch of the rotary frequencies; see `jtrain.models.rope` for the formulas. Names are Hugging Face's.

    - `llama3` (Llama 3 paper, section 3.4.3, and Meta's reference code): wavelengths longer than
      `original_length / low_freq_factor` are stretched by `factor`, those shorter than
      `original_length / high_freq_factor` are kept, and those between are blended.
    - `linear` (Chen et al. 2023): all are stretched by `factor`.
    - `yarn` (Peng et al. 2023, section 3.2): channels that turn more than `beta_fast` times in `original_length` are
      kept, those that turn less than `beta_slow` times are stretched, those between are blended by channel; `truncate`
      rounds the two bounds to whole channels. Cosine and sine are multiplied by `attention_factor`, by default
      0.1 ln(factor) + 1, with DeepSeek's `mscale` and `mscale_all_dim` their quotient.
    - `longrope` (Ding et al. 2024): every channel has a factor of its own, `long_factor` in rows of more than
      `original_length` tokens and `short_factor` in others; cosine and sine are multiplied by `attention_factor`,
      by default sqrt(1 + ln(factor) / ln(original_length)).

    Raises:
      ConfigError: an unknown type, a number out of range, longrope without its factors.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192
    rope_type: RopeType = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in get_args(RopeType):
            raise ConfigError(
                f"rope_scaling.rope_type is {self.rope_type!r}", f"Choose one of {', '.join(get_args(RopeType))}."
            )
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_length", "beta_fast", "beta_slow"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"rope_scaling.{name} is {getattr(self, name)}", "Write a number above 0.")
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope_scaling.high_freq_factor {self.high_freq_factor} is not above low_freq_factor "
                f"{self.low_freq_factor}",
                "The high one marks the shorter wavelengths: 4.0 and 1.0 in Llama 3.1.",
            )
        if self.rope_type == "longrope" and not (self.short_factor and self.long_factor):
            raise ConfigError(
                "rope_scaling.rope_type is longrope, and short_factor or long_factor is missing",
                "Give both, one number for every turning pair of channels.",
            )


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature (eq. 22), with DeepSeek's weight on it: 0.1 mscale ln(factor) + 1."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
