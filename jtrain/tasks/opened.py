"""A model, looked at but not loaded: a Hugging Face folder, a GGUF file, a run, or what `jtrain import` made."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

from etils import epath

from jtrain.checkpoint import layout
from jtrain.checkpoint.gguf.folder import is_gguf
from jtrain.checkpoint.gguf.weights import GgufWeights
from jtrain.checkpoint.hf import placement
from jtrain.checkpoint.hf.companions import Companions
from jtrain.checkpoint.hf.folder import CONFIG, HfFolder
from jtrain.checkpoint.hf.weights import Weights, match
from jtrain.checkpoint.parameters import load_parameters, load_variables, saved_dtype
from jtrain.config.paths import is_hub_name
from jtrain.data.hub import hub_folder
from jtrain.data.tokenizers import Tokenizer, load_tokenizer
from jtrain.errors import CheckpointError, ConfigError, JtrainError
from jtrain.models.config import DecoderConfig
from jtrain.models.families import family
from jtrain.models.families.dual_encoder import MODEL_TYPES
from jtrain.models.families.translation import SIZES
from jtrain.tasks.adapters import load_merged
from jtrain.tasks.companion_files import has_tokenizer, plain
from jtrain.tasks.model_folder import has_model_folder, read_model_folder

Leaves = dict[str, Any]


class Opened(Protocol):
    """A model that can be loaded.

    Attributes:
      path: where it lies.
      decoder: its shape, without what only says how to train.
      companions: config.json and the small files.
    """

    path: str
    decoder: DecoderConfig
    companions: Companions

    @property
    def dtype(self) -> str:
        """Type that most of its weights are stored in: float32, bfloat16, float16."""
        ...

    def tokenizer(self) -> Tokenizer | None:
        """Its tokenizer; None where there is none."""
        ...

    def fills(self, path: str) -> bool:
        """Whether `load` brings the parameter with this path."""
        ...

    def load(self, params: Leaves, variables: Leaves) -> tuple[Leaves, Leaves]:
        """Reads what it has of the parameters and of the variables, in the types and shardings that are asked for.

        Args:
          params: path -> shape, type and sharding.
          variables: path -> array; those that it has not are given back as they are.

        Raises:
          CheckpointError: something is missing or damaged.
        """
        ...


class HfModel:
    """A folder of Hugging Face's, or any `Weights` with its config.json.

    Raises:
      ConfigError: a family that is not known, or a config.json that asks for what is not done.
      CheckpointError: tensors are missing, left over, or of another shape.
    """

    def __init__(self, weights: Weights):
        self.path, self.companions = weights.path, weights.companions
        self.family, self.decoder = decoder_of(self.companions, weights.path)
        self._weights = weights
        self._pairs = match(
            weights,
            self.family.tensors(self.decoder),
            rename=self.family.rename,
            ignores=lambda key: self.family.ignores(key, self.decoder),
        )
        self._params = {slot.path for pair in self._pairs for slot in pair.tensor.slots if not slot.variable}

    @property
    def dtype(self) -> str:
        stored = Counter(self._weights.entries[pair.name].dtype for pair in self._pairs)
        return {"BF16": "bfloat16", "F16": "float16"}.get(stored.most_common(1)[0][0], "float32")

    def tokenizer(self) -> Tokenizer | None:
        return load_tokenizer(self._weights.folder) if has_tokenizer(self.companions) else None

    def fills(self, path: str) -> bool:
        return path in self._params

    def load(self, params: Leaves, variables: Leaves) -> tuple[Leaves, Leaves]:
        # A reward model that begins with a language model leaves its head alone.
        wanted = [pair for pair in self._pairs if all(s.variable or s.path in params for s in pair.tensor.slots)]
        arrays = placement.load(self._weights, wanted, params, variables)
        loaded = {path: array for path, array in arrays.items() if path in self._params}
        return loaded, variables | {path: array for path, array in arrays.items() if path not in loaded}


class RunModel:
    """A run's newest intact checkpoint, or that of a step. Of a run with adapters: the model with them merged.

    Args:
      path: RUN, or RUN/checkpoints/<step>.
      step: a step of RUN.

    Raises:
      CheckpointError: there is no such step, or RUN/model is missing or damaged.
    """

    def __init__(self, path: epath.Path, step: int | None = None):
        run = run_of(path)
        if step is not None:
            steps = layout.finished_steps(layout.checkpoints_root(run))
            if step not in steps:
                raise CheckpointError(
                    f"{run} holds no finished checkpoint of step {step}", f"there are: {', '.join(map(str, steps))}"
                )
            path = layout.checkpoints_root(run) / str(step)
        self.path = os.fspath(path)
        self._content = read_model_folder(run)
        self.decoder, self.companions = plain(self._content.decoder), self._content.companions
        self.lora = self._content.lora

    @property
    def dtype(self) -> str:
        stored = saved_dtype(self.path)
        return stored if stored in ("bfloat16", "float16") else "float32"

    def tokenizer(self) -> Tokenizer | None:
        return self._content.tokenizer()

    def fills(self, path: str) -> bool:
        return bool(self.decoder.num_labels) or not path.startswith("score/")  # a language model has no score

    def load(self, params: Leaves, variables: Leaves) -> tuple[Leaves, Leaves]:
        if self.lora is not None:
            return load_merged(self.path, self.decoder, self.lora, params), load_variables(self.path, variables)
        # A reward model that begins with a language model leaves its head alone.
        return load_parameters(self.path, params, cast=True, partial=True), load_variables(self.path, variables)


def decoder_of(companions: Companions, where: str) -> tuple[Any, DecoderConfig]:
    """Family and shape that a config.json names.

    Raises:
      ConfigError: it names no family that is known, or lacks a field, or asks for what is not done.
    """
    config = companions.config
    if "model_type" not in config:
        raise ConfigError(f"{where}: {CONFIG} has no model_type", "give the folder of a causal language model")
    if (kind := config["model_type"]) in MODEL_TYPES:
        raise ConfigError(
            f"{where}: {CONFIG}: model_type is {kind!r}: a model of images and texts, not a language model",
            "name a language model; task: contrastive trains such models, jtrain.load_dual_encoder loads them",
        )
    one = family(config["model_type"])
    for key in SIZES:
        if isinstance(config.get(key), str | list | dict):
            raise ConfigError(f"{where}: {CONFIG}: {key} is {config[key]!r}", "write a number")
    try:
        return one, one.decoder_config(dict(config))
    except ConfigError as error:
        raise ConfigError(f"{where}: {CONFIG}: {error.message}", error.remedy) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else f"has a value that can't be: {error}"
        raise ConfigError(
            f"{where}: {CONFIG} {what}", f"see the config.json of another {one.model_type} model"
        ) from error


def open_model(path: str | os.PathLike[str], step: int | None = None) -> Opened:
    """Looks at a model: its shape, its files, and whether all of its tensors are there.

    Args:
      path: a Hugging Face folder, a GGUF file, a run, one of its checkpoints, or what `jtrain import` made.
      step: of a run.

    Raises:
      ConfigError: there is no model at that path.
      CheckpointError: it is damaged or not complete.
    """
    text = os.path.expanduser(os.fspath(path))
    if not text:
        raise ConfigError("the path of the model is empty", "give a folder")
    if os.path.isfile(text) and not is_gguf(text):
        raise ConfigError(f"{text} is a file", "give the folder that holds config.json and model.safetensors")
    place = layout.run_path(text)
    with looking_at(text):
        found = not is_gguf(text) and is_run(place)
    if found:
        return RunModel(place, step)
    if step is not None:
        raise ConfigError(f"step={step}: {text} is no run: it has no steps", "leave step out")
    if "://" in text:
        raise ConfigError(
            f"{text} is a URL: Hugging Face folders are read from a local disk", "copy the folder to this machine"
        )
    if is_gguf(text):
        return HfModel(GgufWeights(text))
    if is_hub_name(text) and not os.path.exists(text):
        return HfModel(HfFolder(hub_folder(text)))
    return HfModel(HfFolder(text))


@contextlib.contextmanager
def looking_at(text: str) -> Iterator[None]:
    """Says what a store answers (a URL's) as an error of the path: stores have error classes of their own."""
    try:
        yield
    except Exception as error:
        if "://" not in text or isinstance(error, JtrainError):
            raise
        raise ConfigError(f"{text} can't be looked at: {error}", "see that its store can be reached") from error


def run_of(path: epath.Path) -> epath.Path:
    """The run of a run, of its folder `checkpoints`, or of one of its checkpoints."""
    for run in (path, path.parent, path.parent.parent):
        if has_model_folder(run):
            return run
    return path


def is_run(path: epath.Path) -> bool:
    """Whether a run, its folder `checkpoints` or one of its checkpoints lies there."""
    if (path / CONFIG).exists():
        return False
    if (path / layout.MANIFEST).exists() or layout.finished_steps(path) or has_model_folder(path):
        return True
    return bool(layout.finished_steps(layout.checkpoints_root(path)))
