"""The folders of fixtures/, read by way of the families: what the tests here compare."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from jtrain.models.config import DecoderConfig
from jtrain.models.decoder import Decoder
from jtrain.models.families import Family, Slot, Tensor, family
from jtrain.ops.cross_entropy import cross_entropy

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(folder.name for folder in FIXTURES.iterdir() if folder.is_dir())
Arrays = dict[str, np.ndarray]


@dataclass
class Folder:
    """A folder: its family, our config of it, its tensors on disk and transformers' results."""

    hf: dict[str, Any]
    family: Family
    config: DecoderConfig
    disk: Arrays
    oracle: Arrays

    @property
    def tensors(self) -> list[Tensor]:
        return self.family.tensors(self.config)

    @property
    def batch(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, mask and targets, the labels moved one to the left."""
        ids, mask, labels = (self.oracle[key].astype(np.int32) for key in ("input_ids", "attention_mask", "labels"))
        return ids, mask, np.concatenate([labels[:, 1:], np.full_like(labels[:, :1], -100)], axis=1)


def folder(name: str) -> Folder:
    hf = json.loads((FIXTURES / name / "config.json").read_text())
    one = family(hf["model_type"])
    config = one.decoder_config(hf).replace(remat="none")
    disk = {one.rename(key): value for key, value in load_file(FIXTURES / name / "model.safetensors").items()}
    return Folder(hf, one, config, disk, load_file(FIXTURES / name / "oracle.safetensors"))


@dataclass
class Model:
    """A decoder's structure, and the trees of its parameters and of its variables as flat names of arrays."""

    config: DecoderConfig
    graph: Any
    params: dict
    variables: dict


def flat(tree: dict, prefix: str = "") -> Arrays:
    out = {}
    for key, value in tree.items():
        out |= flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def nested(arrays: Arrays) -> dict:
    tree: dict = {}
    for path, value in arrays.items():
        *above, last = path.split("/")
        functools.reduce(lambda at, key: at.setdefault(key, {}), above, tree)[last] = value
    return tree


def model(one: Folder, dtype: str = "float32") -> Model:
    """The decoder with the folder's weights. Every number is written: what no tensor names stays NaN."""
    with nnx.use_eager_sharding(False):
        graph, params, variables = nnx.split(
            nnx.eval_shape(lambda: Decoder(one.config, nnx.Rngs(0), param_dtype=dtype)), nnx.Param, ...
        )
    ours = {False: flat(nnx.to_pure_dict(params)), True: flat(nnx.to_pure_dict(variables))}
    filled = {
        kind: {path: np.full(a.shape, 0 if a.dtype.kind == "i" else np.nan, a.dtype) for path, a in leaves.items()}
        for kind, leaves in ours.items()
    }
    for tensor in one.tensors:
        for slot, part in zip(tensor.slots, tensor.split(one.disk[tensor.key]), strict=True):
            place(filled[slot.variable], slot)[...] = part
    return Model(one.config, graph, nested(filled[False]), nested(filled[True]))


def place(arrays: Arrays, slot: Slot) -> np.ndarray:
    array = arrays[slot.path]
    return array[slot.index] if slot.index else array


def forward(model: Model, batch: tuple[np.ndarray, ...], jit: Callable = jax.jit) -> tuple[jax.Array, jax.Array]:
    """Logits, and the loss: a mean."""
    return jit(lambda params: _logits_and_loss(model, params, batch))(jax.tree.map(jnp.asarray, model.params))


def run(model: Model, batch: tuple[np.ndarray, ...], jit: Callable = jax.jit) -> tuple[jax.Array, jax.Array, dict]:
    """Logits, loss and its gradients: one program."""

    def program(params: dict) -> tuple[jax.Array, jax.Array, dict]:
        def loss(params: dict) -> tuple[jax.Array, jax.Array]:
            logits, value = _logits_and_loss(model, params, batch)
            return value, logits

        (value, logits), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return logits, value, gradients

    return jit(program)(jax.tree.map(jnp.asarray, model.params))


def _logits_and_loss(model: Model, params: dict, batch: tuple[np.ndarray, ...]) -> tuple[jax.Array, jax.Array]:
    ids, mask, targets = batch
    module = nnx.merge(model.graph, params, model.variables)
    hidden = module.hidden(ids, segment_ids=mask)
    cap = model.config.final_logit_softcapping
    total, count = cross_entropy(hidden, module.head(), targets, softcap=cap)
    return module.logits(hidden), total / count


def gradient_norms(one: Folder, gradients: dict) -> dict[str, float]:
    """Norms under transformers' names in memory, where the kernels of all experts are one parameter."""
    ours = {path: np.asarray(value, np.float64) for path, value in flat(gradients).items()}
    squares: dict[str, float] = {}
    for tensor in one.tensors:
        if any(slot.variable for slot in tensor.slots):
            continue
        joined = tensor.join(tuple(place(ours, slot) for slot in tensor.slots))
        assert joined.shape == tensor.shape
        name = in_memory(tensor.key)
        squares[name] = squares.get(name, 0.0) + float((joined**2).sum())
    return {name: square**0.5 for name, square in squares.items()}


def in_memory(key: str) -> str:
    key = key.replace(".block_sparse_moe.", ".mlp.").replace("embed_out.", "lm_head.")
    key = re.sub(r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.weight", ".experts.gate_up_proj", key)
    return re.sub(r"\.experts\.\d+\.(down_proj|w2)\.weight", ".experts.down_proj", key)
