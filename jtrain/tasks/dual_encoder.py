"""Models of images and texts as files: looked at, loaded, imported, exported; and where a run's model comes from."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from jtrain.checkpoint import arrays, layout
from jtrain.checkpoint.hf import placement
from jtrain.checkpoint.hf.companions import Companions
from jtrain.checkpoint.hf.folder import CONFIG, HfFolder, read_companions
from jtrain.checkpoint.hf.weights import match
from jtrain.checkpoint.parameters import load_parameters, saved_dtype
from jtrain.config.paths import is_hub_name
from jtrain.data.captions import CaptionEncoder, caption_encoder
from jtrain.data.hub import hub_folder
from jtrain.data.images import FILE, ImageTransform
from jtrain.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from jtrain.errors import CheckpointError, ConfigError
from jtrain.models.dual_encoder import DualEncoder, DualEncoderConfig, normalised
from jtrain.models.families.dual_encoder import (
    MODEL_TYPES,
    carries_nothing,
    dual_encoder_config,
    dual_encoder_json,
    dual_encoder_tensors,
)
from jtrain.models.vision.config import VisionConfig
from jtrain.parallel.sharding import Rules
from jtrain.tasks.companion_files import has_tokenizer, token_ids, with_tokenizer
from jtrain.tasks.embedding_inputs import texts_of, transformed
from jtrain.tasks.loaded import as_mesh, make_precision, plan_of, rules_for
from jtrain.tasks.model_folder import decoder_of_json, has_model_folder, read_files, write_files
from jtrain.tasks.opened import looking_at, run_of
from jtrain.train.model import FunctionalModel, functional_model
from jtrain.train.precision import Precision
from jtrain.train.state import StatePlan
from jtrain.train.step import make_forward

Leaves = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class DualFiles:
    """What stands beside the weights of a model of images and texts.

    Attributes:
      config: its shape.
      companions: config.json and the small files.
      transform: of images.
      folder: where the files lie; empty: they are not written yet.
      bytes: whether the tokenizer is `bytes`, and the files only stand for it.
    """

    config: DualEncoderConfig
    companions: Companions
    transform: ImageTransform
    folder: str = ""
    bytes: bool = False

    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None where there is none."""
        if self.bytes:
            return ByteTokenizer()
        return load_tokenizer(self.folder) if has_tokenizer(self.companions) else None


class OpenedDual:
    """A model of images and texts, looked at but not loaded: a Hugging Face folder, a run, what `jtrain import` made.

    Args:
      path: of it; a run's checkpoint stands for itself.
      step: of a run.

    Raises:
      ConfigError: there is no such model.
      CheckpointError: it is damaged or not complete.
    """

    def __init__(self, path: str | os.PathLike[str], step: int | None = None):
        text = os.path.expanduser(os.fspath(path))
        if is_hub_name(text) and not os.path.exists(text):
            text = os.fspath(hub_folder(text))
        self.path = text
        self._folder: HfFolder | None = None
        with looking_at(text):
            run = run_of(layout.run_path(text))
            found = has_model_folder(run)
        if found:
            self.files = read_dual_files(run)
            self.path = text if step is None else os.fspath(_step(run, step))
            return
        if step is not None:
            raise ConfigError(f"step={step}: {text} is no run: it has no steps", "leave step out")
        self._folder = folder = HfFolder(text)
        config = dual_encoder_config(folder.companions.config)
        self._pairs = match(folder, dual_encoder_tensors(config), ignores=carries_nothing)
        self.files = DualFiles(config, folder.companions, ImageTransform.from_folder(text), text)

    @property
    def dtype(self) -> str:
        """Type that most of its weights are stored in."""
        if self._folder is None:
            stored = saved_dtype(self.path)
            return stored if stored in ("bfloat16", "float16") else "float32"
        kinds = [entry.dtype for entry in self._folder.entries.values()]
        return {"BF16": "bfloat16", "F16": "float16"}.get(max(set(kinds), key=kinds.count), "float32")

    def fills(self, path: str) -> bool:
        """Whether `load` brings this parameter: all of them."""
        return True

    def load(self, params: Leaves, variables: Leaves) -> tuple[Leaves, Leaves]:
        """Parameters in the types and shardings that are asked for; the variables as they are."""
        if self._folder is not None:
            return placement.load(self._folder, self._pairs, params), variables
        return load_parameters(self.path, params, cast=True), variables


def is_dual(path: str | os.PathLike[str]) -> bool:
    """Whether a model of images and texts lies at a path; False too where nothing does."""
    text = os.path.expanduser(os.fspath(path))
    with looking_at(text):
        run = run_of(layout.run_path(text))
        found = has_model_folder(run)
    if found:
        return bool(read_files(run, lambda text, companions, folder: "dual_encoder" in text))
    if is_hub_name(text) and not os.path.exists(text):
        text = os.fspath(hub_folder(text))
    if not os.path.isfile(os.path.join(text, CONFIG)):
        return False
    return read_companions(Path(text)).config.get("model_type") in MODEL_TYPES


def _step(run: epath.Path, step: int) -> epath.Path:
    steps = layout.finished_steps(layout.checkpoints_root(run))
    if step not in steps:
        raise CheckpointError(
            f"{run} holds no finished checkpoint of step {step}", f"there are: {', '.join(map(str, steps))}"
        )
    return layout.checkpoints_root(run) / str(step)


def write_dual_files(run: epath.Path, files: DualFiles) -> None:
    """Writes RUN/model."""
    text = {"dual_encoder": dataclasses.asdict(files.config), "tokenizer": "bytes" if files.bytes else "files"}
    write_files(run, files.companions, text | {"images": dataclasses.asdict(files.transform)})


def read_dual_files(run: epath.Path) -> DualFiles:
    """Reads RUN/model.

    Raises:
      ConfigError: it is of a language model.
      CheckpointError: it is missing or damaged.
    """

    def content(text: dict[str, Any], companions: Companions, folder: str) -> DualFiles:
        if "dual_encoder" not in text:
            raise ConfigError(f"{run} holds a language model, not one of images and texts", "give a run of contrastive")
        fields: dict[str, Any] = dict(text["dual_encoder"])
        parts: dict[str, Any] = {
            "text": decoder_of_json(fields.pop("text")),
            "vision": VisionConfig(**fields.pop("vision")),
        }
        images: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in text["images"].items()}
        config, transform = DualEncoderConfig(**fields, **parts), ImageTransform(**images)
        return DualFiles(config, companions, transform, folder, text["tokenizer"] == "bytes")

    return read_files(run, content)


def dual_files(
    config: DualEncoderConfig, transform: ImageTransform, tokenizer: Tokenizer, before: Companions
) -> DualFiles:
    """The files of a model that is trained here.

    Args:
      config: its shape.
      transform: of images.
      tokenizer: of texts.
      before: of the model that it began with; empty: it was born here.
    """
    companions = before
    if not has_tokenizer(before):
        companions = with_tokenizer(before, tokenizer, config.text.max_position_embeddings)
        files = dict(companions.files)
        files["tokenizer.json"] = _with_ends(files.get("tokenizer.json", b""), config, tokenizer)
        companions = dataclasses.replace(companions, files={name: data for name, data in files.items() if data})
    if FILE not in companions.files and "processor_config.json" not in companions.files:
        kind = "CLIPImageProcessor" if config.kind == "clip" else "SiglipImageProcessor"
        text = transform.to_dict() | {"image_processor_type": kind}
        files = {**companions.files, FILE: (json.dumps(text, indent=2, sort_keys=True) + "\n").encode()}
        companions = dataclasses.replace(companions, files=files)
    hf = dual_encoder_json(config)
    old = dict(before.config)
    for name in ("text_config", "vision_config"):
        hf[name] = {**(old.pop(name, None) or {}), **hf[name]}
    hf["text_config"] = {**token_ids(tokenizer), **hf["text_config"]}
    companions = dataclasses.replace(companions, config={**old, **hf})
    return DualFiles(config, companions, transform, bytes=tokenizer.spec == "bytes")


def _with_ends(content: bytes, config: DualEncoderConfig, tokenizer: Tokenizer) -> bytes:
    """A tokenizer.json that puts the same tokens around a text as `CaptionEncoder`, where it puts none."""
    if not content or (found := json.loads(content)).get("post_processor") not in (None, {}):
        return content
    ids = [tokenizer.bos_id] if config.kind == "clip" else []
    begin, end = ([token for token in one if token is not None] for one in (ids, [tokenizer.eos_id]))
    names = {token["id"]: token["content"] for token in found.get("added_tokens", [])}

    def special(tokens: Sequence[int]) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": names[token], "type_id": 0}} for token in tokens]

    if not all(token in names for token in (*begin, *end)):
        return content
    around = [*special(begin), {"Sequence": {"id": "A", "type_id": 0}}, *special(end)]
    found["post_processor"] = {
        "type": "TemplateProcessing",
        "single": around,
        "pair": [*around, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            names[token]: {"id": names[token], "ids": [token], "tokens": [names[token]]} for token in (*begin, *end)
        },
    }
    return (json.dumps(found, indent=2, ensure_ascii=False) + "\n").encode()


def encoder_of(config: DualEncoderConfig, tokenizer: Tokenizer, length: int | None = None) -> CaptionEncoder:
    """The encoder of a model's texts.

    Raises:
      DataError: the tokenizer does not fit.
    """
    legacy = config.kind == "siglip" or config.eos_token_id == 2
    return caption_encoder(
        tokenizer,
        length or config.text.max_position_embeddings,
        begins=config.kind == "clip",
        end=None if legacy else config.eos_token_id,
        vocab_size=config.text.vocab_size,
    )


def dual_encoder_model(config: DualEncoderConfig) -> FunctionalModel:
    """The model of this shape, split into structure and values."""
    return functional_model(lambda rngs: DualEncoder(config, rngs))


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedDualEncoder:
    """A model of images and texts with its weights on a mesh: what `jtrain.load_dual_encoder` returns.

    Attributes:
      files: shape, transform of images, small files.
      model: structure and parameter shapes.
      params, variables: nested dicts of arrays, in their shards.
      mesh: the devices.
      rules: logical axis -> mesh axes.
      precision: the type that parameters are stored and computed in.
      tokenizer: of texts; None where there is none.
    """

    files: DualFiles
    model: FunctionalModel
    params: Any
    variables: Any
    mesh: Mesh
    rules: Rules
    precision: Precision
    tokenizer: Tokenizer | None = None

    @property
    def config(self) -> DualEncoderConfig:
        """The shape."""
        return self.files.config

    @property
    def plan(self) -> StatePlan:
        """Shapes and places of the parameters; there is no optimizer."""
        return plan_of(self.model, self.mesh, self.rules, self.precision)

    def jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Jits `function(module, *arguments)`, traced on this mesh, as `jitted(*arguments)`."""
        forward = make_forward(self.model, self.plan, function)
        return lambda *arguments: forward(self.params, self.variables, *arguments)

    def embed_images(self, images: Any) -> np.ndarray:
        """Vectors of length one, float32 [images, D].

        Args:
          images: paths, bytes, PIL images, arrays: what `jtrain.data.images.read_image` takes; or one of them.

        Raises:
          DataError: one of them can't be read, or there is none.
        """
        vision = self.config.vision
        shape = (vision.image_size, vision.image_size, vision.num_channels)
        pixels = transformed(images, self.files.transform, shape)
        return host(self.jit(_embed_images)(pixels))

    def embed_texts(self, texts: str | Sequence[str]) -> np.ndarray:
        """Vectors of length one, float32 [texts, D].

        Args:
          texts: several, or one.

        Raises:
          ConfigError: the model came without a tokenizer.
          DataError: one of them is no text, or there is none.
        """
        if self.tokenizer is None:
            raise ConfigError("the model has no tokenizer", "put its tokenizer.json beside its weights")
        return host(self.jit(_embed_texts)(encoder_of(self.config, self.tokenizer)(texts_of(texts))))

    def __call__(self, pixels: Any, input_ids: Any) -> jax.Array:
        """Scores [images, texts] of transformed images [images, height, width, channels] and tokens [texts, L]."""
        return self.jit(_scores)(pixels, input_ids)


def _embed_images(module: DualEncoder, pixels: jax.Array) -> jax.Array:
    return normalised(module.encode_image(pixels))


def _embed_texts(module: DualEncoder, input_ids: jax.Array) -> jax.Array:
    return normalised(module.encode_text(input_ids))


def _scores(module: DualEncoder, pixels: jax.Array, input_ids: jax.Array) -> jax.Array:
    return module(pixels, input_ids)


def load_dual_encoder(
    model: str | os.PathLike[str],
    dtype: str = "float32",
    mesh: Any = None,
    step: int | None = None,
    rules: Rules | None = None,
) -> LoadedDualEncoder:
    """A model of images and texts with its weights, ready to be called.

    Args:
      model: a Hugging Face folder of CLIP or SigLIP, a run of `task: contrastive`, or what `jtrain import` made.
      dtype: float32, bfloat16 or float16: of the weights and of the computation.
      mesh: `"fsdp=2"`, a dict, or a mesh; by default the first device.
      step: of a run; by default its newest intact checkpoint.
      rules: logical axis -> mesh axes, in place of the usual table.

    Raises:
      ConfigError: there is no such model, or a dtype or mesh that can't be.
      CheckpointError: weights are missing, damaged, or those of another model.
    """
    precision = make_precision(dtype)
    opened = OpenedDual(model, step)
    mesh = as_mesh(mesh)
    rules = rules_for(mesh) if rules is None else rules
    split = dual_encoder_model(opened.files.config)
    plan = plan_of(split, mesh, rules, precision)
    loaded, variables = opened.load(arrays.flatten(plan.abstract.params), {})
    params = arrays.unflatten(plan.abstract.params, loaded)
    return LoadedDualEncoder(opened.files, split, params, variables, mesh, rules, precision, opened.files.tokenizer())


def host(x: jax.Array) -> np.ndarray:
    """An array on the host of every process."""
    from jax.experimental import multihost_utils

    return np.asarray(x) if x.is_fully_addressable else np.asarray(multihost_utils.process_allgather(x, tiled=True))
