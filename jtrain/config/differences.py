"""What may change when a run is resumed, and what would make it another run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from jtrain.config import names, paths
from jtrain.config.export import to_dict
from jtrain.config.schema import Config

_REFUSED = (
    "task",
    "seed",
    "max_length",
    "global_batch_size",
    "model",
    "data",
    "optimizer.name",
    "optimizer.freeze",
    "contrastive",
    # The other side of a loss: who the reference or teacher is, and which of its numbers are kept.
    "dpo.ref_model",
    "dpo.ld_alpha",
    "dpo.precompute_ref_log_probs",
    "dpo.sync_ref_model",
    "distill.teacher",
    "distill.temperature",
    "distill.top_k",
    "distill.precompute_dtype",
)
_HARMLESS = (
    "model.remat",
    "model.attention",
    "data.cache_dir",
    "data.num_workers",
    "data.prefetch",
    "data.on_bad_record",
    "data.max_bad_records",
)
"""Exceptions within the refused sections: they change how something is computed or read, not what."""
_FILLED_IN = ("max_length", "data.tokenizer", "optimizer.freeze", "model.vocab_size", "model.lora")
"""What a trainer fills in where nobody sets it: from the model, the teacher, or the adapter at `model.lora.path`."""

_PARAMETER_DTYPE = {"bf16-true": "bfloat16", "64-true": "float64"}


class Difference(NamedTuple):
    """A field that two configs disagree about."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.field}: {self.old!r} -> {self.new!r}"


def differences(
    old: Config | Mapping[str, Any], new: Config | Mapping[str, Any]
) -> tuple[list[Difference], list[Difference]]:
    """Fields that differ between a run's config and the one it is resumed with.

    The global batch is compared where both configs give it: fill it in from `resolve_batch` first.

    Args:
      old: the config of the checkpoint; a mapping may come from an older version, with other fields.
      new: the config of this start.

    Returns:
      (harmless, refused): what may change and is logged; and what needs a new run.
    """
    before, after = _comparable(old), _comparable(new)
    # Where the processes meet is another place at every start.
    for flat in (before, after):
        for field in [field for field in flat if field.startswith("distributed.")]:
            del flat[field]
    changed = [
        Difference(field, before.get(field), after.get(field))
        for field in dict.fromkeys([*names.fields(), *before])
        if before.get(field) != after.get(field)
    ]
    refused = [difference for difference in changed if _is_refused(difference)]
    if max(before["dcn.local_steps"], after["dcn.local_steps"]) > 1:  # one optimizer state a slice
        refused += [difference for difference in changed if difference.field == "mesh.slices"]
    return [difference for difference in changed if difference not in refused], refused


def may_be_filled_in(difference: Difference) -> bool:
    """Whether the new config, as it was given, leaves this field to the trainer, which fills it in.

    Args:
      difference: of a checkpoint's config, in which everything is filled in, and of one that no trainer has seen.
    """
    field, _, new = difference
    filled = any(field == name or field.startswith(f"{name}.") for name in _FILLED_IN)
    return filled and new == _comparable(Config())[field]


def _is_refused(difference: Difference) -> bool:
    field, old, new = difference
    if field in _HARMLESS:
        return False
    if field == "global_batch_size":
        return old is not None and new is not None
    if field == "precision":  # whoever asks for 16-mixed gets float32 parameters too
        return _PARAMETER_DTYPE.get(str(old), "float32") != _PARAMETER_DTYPE.get(str(new), "float32")
    if field == "dcn.local_steps":  # every slice has its own optimizer state, or all share one
        return (old == 1) != (new == 1)
    if field == "optimizer.ema_decay":  # the average is part of the state: there from the start, or not at all
        return bool(old) != bool(new)
    if field == "data.eval":  # a fraction is taken from the training data
        return any(isinstance(value, float) for value in (old, new))
    return field in _REFUSED or field.partition(".")[0] in _REFUSED


def _comparable(config: Config | Mapping[str, Any]) -> dict[str, Any]:
    """Dotted field -> value, as JSON has it, with absolute paths and masked secrets."""
    tree = to_dict(config) if isinstance(config, Config) else to_dict(_filled(config))
    flat: dict[str, Any] = {}

    def walk(branch: Mapping[str, Any], prefix: str) -> None:
        for name, value in branch.items():
            if prefix + name in names.sections() and isinstance(value, Mapping):
                walk(value, f"{prefix}{name}.")
            else:
                flat[prefix + name] = value

    walk(tree, "")
    if flat.get("data.tokenizer") is None and flat.get("model.path") is None:
        flat["data.tokenizer"] = "bytes"  # which is what it means, and what older versions wrote
    return {path: paths.map_paths(path, value, os.path.abspath) for path, value in flat.items()}


def _filled(old: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping of an older version, with the defaults of fields that it does not know."""

    def over(known: Mapping[str, Any], given: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        filled = dict(known)
        for name, value in given.items():
            section = prefix + name in names.sections() and isinstance(value, Mapping)
            filled[name] = over(filled[name], value, f"{prefix}{name}.") if section else value
        return filled

    return over(Config().model_dump(mode="json"), old, "")
