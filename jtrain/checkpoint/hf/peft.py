"""Adapter folders of PEFT: `adapter_config.json` and `adapter_model.safetensors`, written and read.

PEFT keeps A as [r, in] and B as [out, r] of torch's Linear, for every module by its name in the Hugging Face model.
Which of our rows and columns these are follows from the family's key map: the map is asked where it puts every entry of
a kernel. A fused tensor (Phi-3's qkv_proj, GPT-NeoX's query_key_value) holds several projections: its adapter has their
ranks one after the other, and a B that is zero outside of their own rows.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  numpy knows bfloat16 after it
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save

from jtrain.checkpoint.hf.folder import inside, read_json
from jtrain.checkpoint.hf.tensor_file import open_tensors
from jtrain.errors import CheckpointError, ConfigError
from jtrain.models.families import Tensor
from jtrain.models.lora import Lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A, _B, _M = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"

Adapters = dict[str, np.ndarray]
"""`layers/attention/q_proj/lora_a` [N, *inputs, r], lora_b [N, r, *outputs], lora_magnitude [N, *outputs]."""


class _Part(NamedTuple):
    """A projection inside of a tensor on disk: its path, its layer, and the disk's rows of its outputs in order."""

    path: str
    layer: tuple[int, ...]
    rows: np.ndarray


class Module(NamedTuple):
    """A linear module of the Hugging Face model.

    Attributes:
      name: `model.layers.0.self_attn.q_proj`.
      parts: the projections in it.
      columns: the disk's columns of their inputs, in order.
      outputs: rows of all parts.
      conv1d: whether it keeps [in, out].
    """

    name: str
    parts: tuple[_Part, ...]
    columns: np.ndarray
    outputs: int
    conv1d: bool


def modules(tensors: Iterable[Tensor], shapes: Mapping[str, tuple[tuple[int, ...], int]]) -> list[Module]:
    """The modules that hold projections.

    Args:
      tensors: of the family.
      shapes: path of a projection -> shape of its kernel in one layer, and how many of its axes are inputs.
    """
    found, known = [], {}
    for tensor in tensors:
        paths = [slot.path.removesuffix("/kernel") for slot in tensor.slots]
        if not all(path in shapes for path in paths):
            continue
        if tuple(paths) not in known:  # all layers alike
            known[tuple(paths)] = _places(tensor, [shapes[path] for path in paths])
        rows, columns, conv1d = known[tuple(paths)]
        parts = tuple(_Part(path, slot.index, row) for path, slot, row in zip(paths, tensor.slots, rows, strict=True))
        outputs = tensor.shape[1 if conv1d else 0]
        found.append(Module(tensor.key.removesuffix(".weight"), parts, columns, outputs, conv1d))
    return found


def _places(tensor: Tensor, shapes: list[tuple[tuple[int, ...], int]]) -> tuple[list[np.ndarray], np.ndarray, bool]:
    """Rows of every part and columns on disk, found by sending numbers of entries through `join`."""
    sizes = [(math.prod(shape[:inputs]), math.prod(shape[inputs:])) for shape, inputs in shapes]
    fan_in = sizes[0][0]

    def numbers(of_inputs: bool) -> np.ndarray:
        parts, begin = [], 0
        for (shape, _), (_, width) in zip(shapes, sizes, strict=True):
            line = np.arange(fan_in)[:, None] if of_inputs else np.arange(begin, begin + width)[None]
            parts.append(np.broadcast_to(line, (fan_in, width)).astype(np.int32).reshape(shape))
            begin += width
        return tensor.join(tuple(parts))

    inputs, outputs = numbers(True), numbers(False)
    conv1d = bool(np.any(inputs[:, :1] != inputs[:1, :1]))
    if conv1d:
        inputs, outputs = inputs.T, outputs.T
    column_of, row_of = np.argsort(inputs[0]), np.argsort(outputs[:, 0])
    ends = np.cumsum([width for _, width in sizes])
    return np.split(row_of, ends[:-1].tolist()), column_of, conv1d


# -- out ---------------------------------------------------------------------------------------------------------------


def adapter_files(lora: Lora, adapters: Adapters, found: list[Module], base: str | None) -> dict[str, bytes]:
    """Name -> content of the files of an adapter folder.

    Args:
      lora: the adapters' settings.
      adapters: their numbers, float32.
      found: the model's modules.
      base: what the adapter is of, for `base_model_name_or_path`.

    Raises:
      ConfigError: DoRA on a part of a fused module: its lengths are those of the whole.
    """
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    used: list[Module] = []
    for module in found:
        own = [part for part in module.parts if f"{part.path}/lora_a" in adapters]
        if not own:
            continue
        used.append(module)
        ranks[module.name] = lora.rank * len(own)
        fan_in = module.columns.size
        a, b = (
            np.zeros((ranks[module.name], fan_in), np.float32),
            np.zeros((module.outputs, ranks[module.name]), np.float32),
        )
        magnitude = np.zeros(module.outputs, np.float32)
        for place, part in enumerate(own):
            span = slice(place * lora.rank, (place + 1) * lora.rank)
            a[span, module.columns] = adapters[f"{part.path}/lora_a"][part.layer].reshape(fan_in, lora.rank).T
            b[part.rows, span] = adapters[f"{part.path}/lora_b"][part.layer].reshape(lora.rank, -1).T
            if lora.dora:
                magnitude[part.rows] = adapters[f"{part.path}/lora_magnitude"][part.layer].ravel()
        key = _PREFIX + module.name
        tensors |= {key + _A: a, key + _B: b}
        if lora.dora:
            if len(own) < len(module.parts):
                missing = ", ".join(part.path for part in module.parts if part not in own)
                raise ConfigError(
                    f"{module.name} of this family holds {missing} as well, which have no adapter: PEFT's DoRA has the "
                    "lengths of whole modules",
                    "export it merged, or train with all of these as targets",
                )
            tensors[key + _M] = magnitude
    config = _config(lora, used, found, ranks, base)
    return {CONFIG: (json.dumps(config, indent=2) + "\n").encode(), WEIGHTS: save(tensors, {"format": "pt"})}


def _config(
    lora: Lora, used: list[Module], found: list[Module], ranks: dict[str, int], base: str | None
) -> dict[str, Any]:
    names = sorted({module.name.rpartition(".")[2] for module in used})
    alike = all(module in used for module in found if module.name.rpartition(".")[2] in names)
    factors = {module.name.rpartition(".")[2]: ranks[module.name] // lora.rank for module in used}
    power = 0.5 if lora.rslora else 1.0  # of the rank that PEFT divides by
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": names if alike else sorted(module.name for module in used),
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": "none",
        "fan_in_fan_out": any(module.conv1d for module in used),
        "rank_pattern": {name: lora.rank * n for name, n in factors.items() if n > 1},
        "alpha_pattern": {name: lora.alpha * n**power for name, n in factors.items() if n > 1},
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


# -- in ----------------------------------------------------------------------------------------------------------------


class AdapterFolder:
    """An adapter folder of PEFT.

    Args:
      path: the folder.

    Raises:
      ConfigError: there is no adapter there, or one of a kind that is not read.
      CheckpointError: a file is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        root = Path(self.path).expanduser()
        if not (root / CONFIG).is_file():
            raise ConfigError(f"{self.path} holds no {CONFIG}", "give a folder that PEFT or jtrain export wrote")
        self.config = read_json(root, CONFIG)
        self._check()
        if not (root / WEIGHTS).is_file():
            pickled = (root / "adapter_model.bin").exists()
            raise ConfigError(
                f"{self.path} holds no {WEIGHTS}" + (", only a pickle, which may run any code" if pickled else ""),
                "save the adapter again where you trust it: PeftModel.save_pretrained(DIR, safe_serialization=True)",
            )
        try:
            with open_tensors(inside(root, WEIGHTS)) as file:
                self.tensors = {name: np.asarray(file.get_tensor(name), np.float32) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{root / WEIGHTS} is damaged: {error}", "bring it back from a copy") from error

    def _check(self) -> None:
        config = self.config
        wanted: dict[str, tuple[Any, ...]] = {
            "peft_type": ("LORA",), "bias": ("none", None), "modules_to_save": (None, []), "layer_replication": (None,),
        }  # fmt: skip
        for field, values in wanted.items():
            if config.get(field, values[0]) not in values:
                raise ConfigError(
                    f"{self.path}: {CONFIG} has {field}: {config[field]!r}, and jtrain reads {values[0]!r}",
                    "merge the adapter with PEFT (merge_and_unload) and load the result",
                )
        for field in ("r", "lora_alpha"):
            value = config.get(field)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"{self.path}: {CONFIG} has {field}: {value!r}", "write a number above 0")
        try:
            for pattern, value in (config.get("alpha_pattern") or {}).items():
                re.compile(pattern)
                float(value)
        except (AttributeError, TypeError, ValueError, re.error) as error:
            raise ConfigError(
                f"{self.path}: {CONFIG} has alpha_pattern: {config['alpha_pattern']!r}",
                "write {pattern of a module's name: number}",
            ) from error

    def lora(self, **changes: Any) -> Lora:
        """The settings: the largest rank of any module, with the scale of that rank."""
        config = self.config
        rank = max((t.shape[0] for name, t in self.tensors.items() if name.endswith(_A)), default=0)
        scale = self._scale("", int(config["r"]))
        rslora = bool(config.get("use_rslora"))
        fields: dict[str, Any] = {
            "rank": rank,
            "alpha": scale * (math.sqrt(rank) if rslora else rank),
            "dropout": float(config.get("lora_dropout") or 0.0),
            "rslora": rslora,
            "dora": bool(config.get("use_dora")),
        }
        return Lora(**(fields | changes))

    def _scale(self, module: str, rank: int) -> float:
        """Of A B in a module: alpha over its rank, with what `alpha_pattern` says about it."""
        alpha = float(self.config["lora_alpha"])
        for pattern, value in (self.config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):  # as PEFT's get_pattern_key: the first that matches
                alpha = float(value)
                break
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def adapters(
        self,
        lora: Lora,
        found: list[Module],
        shapes: Mapping[str, tuple[tuple[int, ...], int]],
        layers: Mapping[str, int],
    ) -> Adapters:
        """The adapters as ours: every projection has one of `lora.rank`, those of lesser rank filled up with zeros.

        Args:
          lora: as `lora` returns it.
          found: the model's modules.
          shapes: path of a projection -> shape of its kernel in one layer, and how many of its axes are inputs.
          layers: path -> N.

        Raises:
          CheckpointError: a tensor of a module that the model has not, or of another shape.
        """
        arrays: Adapters = {}
        left = set(self.tensors)
        for module in found:
            key = next((k for k in (_PREFIX + module.name, module.name) if k + _A in self.tensors), None)
            if key is None:
                continue
            a, b = self.tensors[key + _A], self.tensors.get(key + _B)
            rank, fan_in = a.shape[0], module.columns.size
            if b is None or a.shape != (rank, fan_in) or b.shape != (module.outputs, rank):
                other = None if b is None else list(b.shape)
                raise CheckpointError(
                    f"{self.path}: {key}: A {list(a.shape)}, B {other} are not those of {fan_in} to {module.outputs}",
                    "give an adapter of this model",
                )
            left -= {key + _A, key + _B, key + _M}
            share = self._scale(module.name, rank) / lora.scale
            for part in module.parts:
                shape, inputs = shapes[part.path]
                for name, size in (("lora_a", (*shape[:inputs], lora.rank)), ("lora_b", (lora.rank, *shape[inputs:]))):
                    arrays.setdefault(f"{part.path}/{name}", np.zeros((layers[part.path], *size), np.float32))
                mine_a = arrays[f"{part.path}/lora_a"][part.layer].reshape(fan_in, lora.rank)
                mine_b = arrays[f"{part.path}/lora_b"][part.layer].reshape(lora.rank, -1)
                mine_a[:, :rank] = a[:, module.columns].T
                mine_b[:rank] = b[part.rows].T * np.float32(share)
                if lora.dora:
                    if key + _M not in self.tensors:
                        raise CheckpointError(
                            f"{self.path}: use_dora, and {key} has no magnitude", "give the adapter as PEFT wrote it"
                        )
                    lengths = self.tensors[key + _M].ravel()[part.rows].reshape(shape[inputs:])
                    whole = (layers[part.path], *shape[inputs:])
                    arrays.setdefault(f"{part.path}/lora_magnitude", np.zeros(whole, np.float32))[part.layer] = lengths
        if left:
            raise CheckpointError(
                f"{self.path}: {len(left)} tensors are of no projection of this model: {', '.join(sorted(left)[:4])}",
                "give an adapter of this model, on attention and feed-forward projections only",
            )
        return arrays
