"""What every section of the config is made of: its base class, and the kinds of values."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]

MAX_STEPS = 2**31
"""Steps are counted in int32 on the devices."""

DURATION = re.compile(
    r"(?P<number>(\d{1,30}(\.\d{0,30})?|\.\d{1,30})([eE][+-]?\d{1,3})?)\s*(?P<unit>%|steps?|epochs?|tokens?)?"
)
"""The text form of a `Duration`: a number that is not negative, and perhaps a unit. Bounded: it is read exactly."""


def duration_value(value: Any) -> Any:
    """Numbers in their one form: `"100"`, `100.0` and `"100 steps"` are the int 100; other units stay text."""
    if isinstance(value, bool):
        raise ValueError("not a length of training")
    if isinstance(value, str):
        match = DURATION.fullmatch(value.strip())
        if match is None:
            raise ValueError("not a length of training")
        number, unit = float(match["number"]), (match["unit"] or "").rstrip("s")
        if unit not in ("", "step"):
            return value.strip()
        value = number
    if isinstance(value, int | float):
        if not 0 <= value < float("inf") or (value >= 1 and value != int(value)):
            raise ValueError("not a length of training")
        if value >= MAX_STEPS:
            raise ValueError("more steps than a counter holds")
        return value if 0 < value < 1 else int(value)
    return value


def one_or_many(value: Any) -> Any:
    """A single text is a list of one."""
    return (str(value),) if isinstance(value, str | os.PathLike) else value


def held_out(value: Any) -> Any:
    """A fraction, also as text; 0 is none; else paths."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return (value,)
    if isinstance(value, os.PathLike):
        return (str(value),)
    return None if not isinstance(value, bool) and value == 0 else value


Duration = Annotated[int | float | str, BeforeValidator(duration_value)]
"""A length of training: steps (`100`), a ratio of the run (`0.05`), or a string: `5%`, `2 epochs`, `1e9 tokens`."""
Strings = Annotated[tuple[str, ...], BeforeValidator(one_or_many)]
Signals = Annotated[
    tuple[Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGXCPU"], ...], BeforeValidator(one_or_many)
]
"""Signals that a program may catch and that job systems send."""


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no NaN."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,
        validate_default=True,
    )
