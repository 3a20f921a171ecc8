"""Rotary positions as config.json says them: `rope_theta` and `rope_scaling` in transformers 4, `rope_parameters` in 5.

Both are read, and both are written, so that either version loads the folder to the same function.
"""

from __future__ import annotations

from typing import Any

from jtrain.errors import ConfigError
from jtrain.models.config import DecoderConfig
from jtrain.models.families.fields import Fields, log
from jtrain.models.rope_scaling import RopeScaling

_OURS = {"original_max_position_embeddings": "original_length"}
_KEYS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim",
        "original_max_position_embeddings",
    ),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor", "original_max_position_embeddings"),
}  # fmt: skip
"""What counts for each type, in config.json's names."""
_ALIASES = {"su": "longrope"}
_GENERAL = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_NESTED = ("full_attention", "sliding_attention")


def read_rope(
    fields: Fields, *, theta: str = "rope_theta", partial: str | None = None, aliases: dict | None = None
) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and `partial_rotary_factor` of our config.

    Args:
      fields: the config.json.
      theta: transformers 4's key of the base.
      partial: its key of the share of channels that turn; None: the family turns all of them.
      aliases: further names of types.

    Raises:
      ConfigError: a type that we do not do; two schemas in one file that contradict each other.
    """
    new, old = fields.get("rope_parameters"), fields.get("rope_scaling")
    for given in (new, old):
        nested = [key for key in _NESTED if key in (given or {})]
        if nested:
            raise ConfigError(
                f"config.json: rope_parameters has one entry a kind of layer ({', '.join(nested)})",
                f"jtrain does that for gemma3_text only, not for {fields.hf.get('model_type')}.",
            )
    parameters = dict(old or new or {})
    base = _agreed(fields, new or parameters, theta, "rope_theta")
    share = _agreed(fields, new or parameters, partial or "partial_rotary_factor", "partial_rotary_factor")
    if partial is None and share not in (None, 1.0):
        raise ConfigError(
            f"config.json: partial_rotary_factor is {share}, and {fields.hf.get('model_type')} turns whole heads",
            "Leave it out: transformers does not read it for this family.",
        )
    return {
        "rope_theta": base,
        "rope_scaling": read_scaling(fields, parameters, aliases or {}),
        "partial_rotary_factor": 1.0 if share is None else share,
    }


def _agreed(fields: Fields, parameters: dict[str, Any], outer: str, inner: str) -> Any:
    """A value that stands within the parameters (5), beside them (4), or in both."""
    within = parameters.get(inner)
    if within is not None and fields.hf.get(outer) is not None and fields.hf[outer] != within:
        raise ConfigError(
            f"config.json: {outer} is {fields.hf[outer]}, and rope_parameters.{inner} is {within}",
            "transformers 4 reads the first and 5 the second: make them equal.",
        )
    beside = fields.get(outer)
    return within if within is not None else beside


def read_scaling(fields: Fields, parameters: dict[str, Any], aliases: dict[str, str]) -> RopeScaling | None:
    """The stretch that one dict of parameters describes; None for the plain one."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = (_ALIASES | aliases).get(kind, kind)
    if kind == "default":
        return None
    if kind not in _KEYS:
        raise ConfigError(
            f"config.json: the type of the rotary scaling is {kind!r}, which jtrain does not do",
            f"Types: default, {', '.join(_KEYS)}. ('dynamic' changes with the length of the row; for training at a "
            "fixed length, 'yarn' or a larger rope_theta is the usual choice.)",
        )
    unknown = sorted(set(parameters) - set(_KEYS[kind]) - set(_GENERAL))
    if unknown:
        log.warning("config.json: rotary scaling %s does not use %s", kind, ", ".join(unknown))
    longest = fields.get("max_position_embeddings")
    values = {key: parameters[key] for key in _KEYS[kind] if parameters.get(key) is not None}
    if kind != "linear":
        # A length beside the dict goes before one within it, in transformers 4 and 5.
        original = fields.get("original_max_position_embeddings")
        values["original_max_position_embeddings"] = original or values.get("original_max_position_embeddings", longest)
        values.setdefault("factor", longest / values["original_max_position_embeddings"])
    missing = [key for key in ("factor", "low_freq_factor", "high_freq_factor") if key in _KEYS[kind]]
    missing = [key for key in missing if key not in values]
    if missing:
        raise ConfigError(f"config.json: rotary scaling {kind} has no {missing[0]}", f"Add {missing[0]} to it.")
    ours: dict[str, Any] = {
        _OURS.get(key, key): tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }
    return RopeScaling(**ours, rope_type=kind)  # type: ignore[arg-type]


def write_scaling(config: DecoderConfig) -> dict[str, Any] | None:
    """The dict of `rope_scaling`, without the base."""
    scaling = config.rope_scaling
    if scaling is None:
        return None
    out: dict[str, Any] = {"rope_type": scaling.rope_type}
    for key in _KEYS[scaling.rope_type]:
        value = getattr(scaling, _OURS.get(key, key))
        if value is not None:
            out[key] = list(value) if isinstance(value, tuple) else value
    return out


def write_rope(config: DecoderConfig, *, theta: str = "rope_theta", partial: str | None = None) -> dict[str, Any]:
    """Both schemas; the arguments are those of `read_rope`."""
    scaling = write_scaling(config)
    new = {"rope_type": "default", **(scaling or {}), "rope_theta": config.rope_theta}
    out: dict[str, Any] = {theta: config.rope_theta, "rope_scaling": scaling, "rope_parameters": new}
    if partial is not None:
        out[partial] = new["partial_rotary_factor"] = config.partial_rotary_factor
    if scaling is not None and scaling["rope_type"] == "longrope":
        out["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return out


def plain_scaling(scaling: RopeScaling | None) -> RopeScaling | None:
    """The same stretch with everything that its type does not use at its default."""
    if scaling is None:
        return None
    used = {name: getattr(scaling, name) for key in _KEYS[scaling.rope_type] for name in (_OURS.get(key, key),)}
    return RopeScaling(rope_type=scaling.rope_type, **used)
