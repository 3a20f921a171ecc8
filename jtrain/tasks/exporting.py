"""`jtrain.export`: a model as a Hugging Face folder, which is read again and compared before it counts."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrain.checkpoint import arrays, peers
from jtrain.checkpoint.hf.companions import portable, shortened
from jtrain.checkpoint.hf.folder import CONFIG
from jtrain.checkpoint.hf.gather import tensor_of
from jtrain.checkpoint.hf.writer import WORDS, Planned, nbytes, plan_shards, write
from jtrain.checkpoint.staging import staged
from jtrain.errors import CheckpointError, ConfigError
from jtrain.models.families import Tensor
from jtrain.tasks.companion_files import config_json, family_for, has_tokenizer, with_tokenizer
from jtrain.tasks.loaded import LoadedModel
from jtrain.tasks.loading import load_opened
from jtrain.tasks.opened import open_model

SHARD_SIZE = "5GB"
_ROWS, _LENGTH = 2, 48
_TOLERANCE = 1e-4
"""Largest difference of logits between what was written and what is read again, relative to the largest logit."""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Exported(NamedTuple):
    """What an export has made.

    Attributes:
      path: the folder.
      files: number of files with weights.
      size: bytes of the weights.
      dtype: their type.
      difference: largest difference of the logits of a fixed batch, between the model and what was read again.
      scale: largest absolute logit.
      notes: what a reader of the folder should know.
    """

    path: str
    files: int
    size: int
    dtype: str
    difference: float
    scale: float
    notes: tuple[str, ...]


def export(
    model: LoadedModel,
    out: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_size: str | int = SHARD_SIZE,
) -> Exported:
    """Writes a folder that `transformers` loads: safetensors, config.json, tokenizer, chat template, generation config.

    Weights leave the devices tensor by tensor, from any mesh, and give the same bytes on each. The folder is written
    beside `out`, read again, and its logits on a fixed batch compared, before it gets its name. With several processes
    all of them call it, and `out` has to be on a disk that they share.

    Args:
      model: as `load_model` returns it.
      out: a folder that does not exist, or is empty.
      dtype: float32, bfloat16 or float16; by default that of the model.
      max_shard_size: bytes of a file of weights: a number, or `"5GB"`, `"500MB"`.

    Raises:
      ConfigError: `out` holds something, an unknown type or size, a decoder that no family of Hugging Face has.
      StorageError: the disk is full or can't be written; nothing is left behind.
      CheckpointError: what was read again gives other logits, or numbers do not fit into the type.
    """
    dtype = model.precision.name if dtype is None else dtype
    return write_folder(
        out,
        lambda: family_for(model.decoder, model.source).tensors(model.decoder),
        (model.params, model.variables),
        lambda: _companions(model, dtype),
        lambda folder: _compare(model, folder, dtype),
        dtype=dtype,
        max_shard_size=max_shard_size,
        notes=_notes(model),
    )


def write_folder(
    out: str | os.PathLike[str],
    tensors: Callable[[], Sequence[Tensor]],
    state: tuple[Any, Any],
    companions: Callable[[], Mapping[str, bytes]],
    compare: Callable[[Path], tuple[float, float]],
    *,
    dtype: str,
    max_shard_size: str | int,
    notes: Sequence[str] = (),
) -> Exported:
    """Writes the folder of any model, and has it compared before it gets its name; see `export`.

    Args:
      out: the folder.
      tensors: gives what is written.
      state: parameters and variables.
      companions: gives the small files by name.
      compare: reads a folder again: largest difference, largest number; raises where it is another model's.
      dtype: of the weights.
      max_shard_size: of a file of weights.
      notes: for the reader of the folder.
    """
    if dtype not in WORDS:
        raise ConfigError(f"dtype={dtype!r}", f"choose one of {', '.join(WORDS)}")
    limit = shard_size(max_shard_size)
    wanted = {tensor.key: tensor for tensor in tensors()}
    shards = plan_shards([Planned(key, one.shape, _type_of(one, dtype)) for key, one in wanted.items()], limit)
    size = sum(nbytes(planned) for shard in shards for planned in shard)
    main = peers.index() == 0
    with staged(out, size) as folder:
        write(folder, shards, _reader(*state, wanted, dtype), writes=main)
        if main:
            for name, data in companions().items():
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_bytes(data)
        peers.exchange("export_written", None)
        difference, scale = compare(folder)
    return Exported(os.fspath(out), len(shards), size, dtype, difference, scale, tuple(notes))


def shard_size(text: str | int) -> int:
    """Bytes of `5GB`, `500MB`, `1GiB` or a number.

    Raises:
      ConfigError: it is none of these.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([KMG]?i?B|)", str(text).strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS.get(match[2].upper(), 0)) if match else 0
    if size < 1:
        raise ConfigError(f"max_shard_size={text!r}", "write a number of bytes, or e.g. 5GB, 500MB, 2GiB")
    return size


def _type_of(tensor: Tensor, dtype: str) -> str:
    """What a tensor is written in: what is no parameter (a router's correction bias) keeps its float32 everywhere."""
    return "float32" if any(slot.variable for slot in tensor.slots) else dtype


def _reader(params: Any, variables: Any, tensors: dict[str, Tensor], dtype: str) -> Callable[[str], np.ndarray]:
    params, variables = arrays.flatten(params), arrays.flatten(variables)

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        array = tensor_of(tensor, params, variables, _type_of(tensor, dtype))
        if array.dtype == np.float16 and not np.isfinite(array).all():
            raise CheckpointError(
                f"{name} holds numbers that are not finite in float16 (its largest is 65,504)", "export it in bfloat16"
            )
        return array

    return read


def _companions(model: LoadedModel, dtype: str) -> dict[str, bytes]:
    companions = model.source
    if not has_tokenizer(companions):
        companions = with_tokenizer(companions, model.tokenizer, model.decoder.max_position_embeddings)
    config = config_json(model.decoder, companions, model.tokenizer) | {"dtype": dtype, "torch_dtype": dtype}
    text = json.dumps(shortened(config), indent=2, sort_keys=True) + "\n"
    return {**portable(companions.files), CONFIG: text.encode()}


def _compare(model: LoadedModel, folder: Path, dtype: str) -> tuple[float, float]:
    """Reads the folder again and compares logits.

    Returns:
      The largest difference to the model itself, and the largest absolute logit.

    Raises:
      CheckpointError: they are not those of the model with its weights rounded to what was written.
    """
    seen = 0 if model.decoder.images is None else model.decoder.images.tokens
    length = min(_LENGTH + seen, model.decoder.max_position_embeddings)
    random = np.random.default_rng(0)
    ids, images, pixels = random.integers(0, model.decoder.vocab_size, (_ROWS, length)), model.decoder.images, None
    if images is not None and length > images.tokens:  # every row begins with an image
        token = images.image_token_index
        ids[ids == token] = (token + 1) % model.decoder.vocab_size
        ids[:, : images.tokens] = token
        pixels = random.standard_normal((_ROWS, 1, *images.shape()), np.float32)
    if model.precision.matmul != "highest":
        model = dataclasses.replace(model, precision=dataclasses.replace(model.precision, matmul="highest"))
    before = host(model(ids, pixel_values=pixels))
    rounded = before
    if dtype != model.precision.name:
        rounded = host(model.with_weights(rounded_to(model.params, dtype), model.variables)(ids, pixel_values=pixels))
    again = load_opened(open_model(folder), dtype=model.precision.name, mesh=model.mesh, rules=model.rules)
    after = host(model.with_weights(again.params, again.variables)(ids, pixel_values=pixels))
    return differences(before, rounded, after)


def differences(before: np.ndarray, rounded: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """Largest difference between the logits of a model and of what was read again, and the largest logit.

    Args:
      before: of the model.
      rounded: of the model with its weights rounded to what was written.
      after: of what was read again.

    Raises:
      CheckpointError: the last two differ.
    """
    scale = float(np.abs(rounded).max())
    wrong = float(np.abs(after - rounded).max())
    if not wrong <= _TOLERANCE * scale:
        raise CheckpointError(
            f"what was written gives other logits when it is read again: they differ by {wrong:.3g}, the largest is "
            f"{scale:.3g}",
            "if the model's own logits are finite, this is a bug in jtrain; nothing was left behind",
        )
    return float(np.abs(after - before).max()), scale


def rounded_to(params: Any, dtype: str) -> Any:
    """Every parameter in its own type, with the numbers of a narrower one."""

    def one(leaf: jax.Array) -> jax.Array:
        return jax.jit(lambda x: x.astype(dtype).astype(x.dtype), out_shardings=leaf.sharding)(leaf)

    return jax.tree.map(one, params)


def host(logits: jax.Array) -> np.ndarray:
    from jax.experimental import multihost_utils

    if logits.is_fully_addressable:
        return np.asarray(logits)
    return np.asarray(multihost_utils.process_allgather(logits, tiled=True))


def _notes(model: LoadedModel) -> list[str]:
    if model.tokenizer is None and not has_tokenizer(model.source):
        return ["there is no tokenizer: the model was loaded without one"]
    if model.tokenizer is not None and model.tokenizer.spec == "bytes":
        return ["tokenizer.json stands for the byte tokenizer: the same ids, token b is byte b"]
    return []
