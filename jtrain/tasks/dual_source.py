"""Where the model of images and texts of a run comes from: a preset, the model that `model.path` names, or the run."""

from __future__ import annotations

from typing import Any

from jtrain.checkpoint import layout
from jtrain.checkpoint.hf.companions import Companions
from jtrain.config.schema import Config
from jtrain.data.images import ImageTransform
from jtrain.data.tokenizers import Tokenizer, load_tokenizer
from jtrain.errors import ConfigError, DataError
from jtrain.models.dual_encoder import DualEncoderConfig
from jtrain.models.dual_presets import dual_preset
from jtrain.tasks.dual_encoder import DualFiles, OpenedDual, dual_files, read_dual_files, write_dual_files
from jtrain.tasks.source import resumes

Leaves = dict[str, Any]


class DualSource:
    """The model of a run, and the weights that a new run begins with.

    On a resume everything comes from the run's own folder.

    Args:
      config: the run's.

    Attributes:
      config: the run's, with what follows from the model filled in (`max_length`).
      shape: of the model.
      tokenizer: of `data.tokenizer`; by default that of the model, else bytes.
      transform: of images.

    Raises:
      ConfigError: there is no such model, or the config contradicts it.
      DataError: the tokenizer is missing, or does not fit.
      CheckpointError: the model is damaged or not complete.
    """

    def __init__(self, config: Config):
        self._opened: OpenedDual | None = None
        section, files = config.model, None
        if section.path is not None:
            files = read_dual_files(layout.run_path(config.run_dir)) if resumes(config) else self.opened(config).files
        tokenizer: Tokenizer | None = None
        if config.data.tokenizer is not None or files is None:
            tokenizer = load_tokenizer(config.data.tokenizer or "bytes")
        else:
            tokenizer = files.tokenizer()
        if tokenizer is None:
            raise DataError(f"model.path: {section.path} holds no tokenizer", "write data.tokenizer: with a path")
        self._companions = Companions() if files is None else files.companions
        shape = _drawn_shape(section.preset, tokenizer) if files is None else files.config
        self.transform = _transform_of(shape) if files is None else files.transform
        options = {"remat": section.remat, "attention": section.attention, "dropout": section.dropout}
        self.shape: DualEncoderConfig = shape.trained_with(**options)
        self.tokenizer = tokenizer
        limit = shape.text.max_position_embeddings
        if "max_length" not in config.model_fields_set:
            config = config.model_copy(update={"max_length": min(config.max_length, limit)})
        if not 3 <= config.max_length <= limit:
            raise ConfigError(
                f"max_length: {config.max_length}, and the text tower takes 3 to {limit} tokens",
                f"Write max_length: {limit}, or leave it out.",
            )
        self.config = config

    def opened(self, config: Config | None = None) -> OpenedDual:
        """The model that `model.path` names."""
        if self._opened is None:
            path = (config or self.config).model.path
            assert path is not None
            self._opened = OpenedDual(path)
        return self._opened

    @property
    def pretrained(self) -> bool:
        """Whether a new run begins with weights that are loaded, and not drawn."""
        return self.config.model.path is not None

    def fills(self, path: str) -> bool:
        """Whether `load` brings the parameter with this path."""
        return self.opened().fills(path)

    def load(self, params: Leaves, variables: Leaves) -> tuple[Leaves, Leaves]:
        """The weights, as `OpenedDual.load` gives them."""
        return self.opened().load(params, variables)

    def files(self) -> DualFiles:
        """What stands beside the weights: config.json, tokenizer, preprocessor_config.json."""
        plain = self.shape.trained_with(remat="full", attention="auto", dropout=0.0)
        return dual_files(plain, self.transform, self.tokenizer, self._companions)

    def keep(self, run_dir: str) -> None:
        """Writes RUN/model."""
        write_dual_files(layout.run_path(run_dir), self.files())


def _drawn_shape(name: str, tokenizer: Tokenizer) -> DualEncoderConfig:
    """A preset with the tokenizer's vocabulary and end token.

    Raises:
      ConfigError: there is no such preset.
      DataError: the tokenizer has no end token.
    """
    shape = dual_preset(name)
    if tokenizer.eos_id is None:
        raise DataError(f"data.tokenizer: {tokenizer.spec} has no end token", "name one in a tokenizer_config.json")
    text = shape.text.replace(vocab_size=tokenizer.vocab_size)
    return shape.replace(text=text, eos_token_id=tokenizer.eos_id)


def _transform_of(shape: DualEncoderConfig) -> ImageTransform:
    """The published transform of the kind, at the size of the vision tower."""
    size = shape.vision.image_size
    if shape.kind == "clip":
        return ImageTransform(size=size, crop_size=(size, size))
    half = (0.5, 0.5, 0.5)
    return ImageTransform(size=(size, size), do_center_crop=False, image_mean=half, image_std=half)
