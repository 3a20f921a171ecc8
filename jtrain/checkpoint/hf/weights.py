"""Named tensors on disk, whatever file holds them, and how they are matched with what a family expects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from jtrain.checkpoint.hf.companions import Companions
from jtrain.errors import CheckpointError
from jtrain.models.families.keys import Tensor

READ = ("F64", "F32", "F16", "BF16")
"""Types that are read."""
_SHOWN = 40
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


class Entry(NamedTuple):
    """dtype (safetensors' word: F32, BF16, ...) and shape of a tensor on disk."""

    dtype: str
    shape: tuple[int, ...]


class Weights(Protocol):
    """Tensors that are read one at a time.

    Attributes:
      path: folder or file, for messages.
      folder: where the small files lie, tokenizer.json among them.
      companions: config.json and the small files beside it.
      entries: name -> type and shape, in the order in which reading is cheapest.
    """

    path: str
    companions: Companions
    entries: Mapping[str, Entry]

    @property
    def folder(self) -> str: ...

    def read(self, name: str) -> np.ndarray:
        """One tensor; `ml_dtypes.bfloat16` where it is BF16."""
        ...


class Match(NamedTuple):
    """A tensor that a family expects, and its name on disk."""

    name: str
    tensor: Tensor


def match(
    weights: Weights,
    tensors: Iterable[Tensor],
    *,
    rename: Callable[[str], str] = lambda key: key,
    ignores: Callable[[str], bool] = lambda key: False,
) -> list[Match]:
    """Accounts for every tensor: what is expected and missing, or there and not expected, is an error.

    Args:
      weights: what is on disk.
      tensors: what the model needs.
      rename: a name on disk in the family's spelling.
      ignores: whether a name that is not expected carries nothing (buffers, the copy of a tied table).

    Returns:
      The pairs, in the order of the disk.

    Raises:
      CheckpointError: lists the missing and the unused names; or the tensor whose shape is another one, or whose
        type is none of `READ`.
    """
    expected = {tensor.key: tensor for tensor in tensors}
    found: dict[str, str] = {}
    unused: list[str] = []
    for name in weights.entries:
        key = rename(name)
        if key in found:
            raise CheckpointError(f"{weights.path}: {found[key]} and {name} are the same tensor {key}", "remove one")
        if key in expected:
            found[key] = name
        elif not ignores(key):
            unused.append(name)
    missing = [key for key in expected if key not in found]
    if missing or unused:
        raise _unaccounted(weights, missing, unused)
    for key, tensor in expected.items():
        if weights.entries[found[key]].shape != tuple(tensor.shape):
            raise _misshapen(weights, found[key], tensor)
        if (dtype := weights.entries[found[key]].dtype) not in READ:
            kind = "8-bit floats" if dtype.startswith("F8") else "no floating-point numbers: quantised?"
            raise CheckpointError(
                f"{weights.path}: {found[key]} is {dtype} ({kind})",
                f"jtrain reads {', '.join(READ)}: load the model with transformers in bfloat16 and save_pretrained it",
            )
    order = {name: place for place, name in enumerate(weights.entries)}
    return sorted((Match(found[key], tensor) for key, tensor in expected.items()), key=lambda pair: order[pair.name])


def _unaccounted(weights: Weights, missing: list[str], unused: list[str]) -> CheckpointError:
    lines = []
    for title, names in (("missing", missing), ("there, and not used", unused)):
        if names:
            more = f"\n    … and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"  {title} ({len(names)}):\n    " + "\n    ".join(names[:_SHOWN]) + more)
    model_type = weights.companions.config.get("model_type")
    return CheckpointError(
        f"{weights.path}: the tensors are not those of a {model_type!r} model with this config.json:\n"
        + "\n".join(lines),
        _cause(weights.companions.config, missing, unused),
    )


def _cause(config: Mapping[str, Any], missing: list[str], unused: list[str]) -> str:
    if any("lora_" in name for name in unused):
        return "these are the weights of a PEFT adapter: load the base model, or merge the adapter first"
    if any(name.endswith(("qweight", "qzeros", "SCB", "absmax", "_blocks", "_scales", "scale_inv")) for name in unused):
        return "the weights are quantised: save the model again in bfloat16 or float32 (dequantised)"
    if missing == ["lm_head.weight"]:
        return "if the head is the embedding table, config.json should say tie_word_embeddings: true"
    depth = config.get("num_hidden_layers", config.get("n_layer"))
    there, absent = _depth(unused), _depth(missing)
    if there and not missing:
        return f"there are {there} layers, and config.json says {depth}: one of the two is of another model"
    if absent and not unused:
        return f"layers are missing of the {depth} that config.json says: a shard may not have been downloaded"
    return "config.json and the weights are of different models, or the folder is not complete"


def _depth(names: list[str]) -> int:
    layers = [int(found[1]) for name in names if (found := _LAYER.search(name))]
    return max(layers) + 1 if layers else 0


def _misshapen(weights: Weights, name: str, tensor: Tensor) -> CheckpointError:
    shape, wanted = weights.entries[name].shape, tuple(tensor.shape)
    config = weights.companions.config
    if len(shape) == 2 and shape == wanted[::-1]:
        cause = "it is stored transposed: another program wrote it"
    elif len(shape) != len(wanted):
        cause = "it is of another kind of model, or packed (quantised)"
    else:
        wrong = next(b for a, b in zip(shape, wanted, strict=True) if a != b)
        fields = [field for field, value in config.items() if type(value) is int and value == wrong]
        cause = f"config.json has {' and '.join(f'{f}: {wrong}' for f in fields)}" if fields else "see config.json"
    return CheckpointError(
        f"{weights.path}: {name} has the shape {list(shape)}, and a model with this config.json has {list(wanted)}",
        cause,
    )
