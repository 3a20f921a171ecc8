"""Where a run's decoder and tokenizer come from: a preset, the model that `model.path` names, or the run itself.

On a resume everything comes from the run's own folder (its checkpoint and RUN/model): what the run began with need not
be there any more.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from jtrain.checkpoint import layout
from jtrain.checkpoint.hf.companions import Companions
from jtrain.config.schema import Config, LoraConfig, ModelConfig
from jtrain.data.chat import load_chat_template
from jtrain.data.tokenizers import Tokenizer, load_tokenizer
from jtrain.errors import ConfigError, DataError
from jtrain.models.config import DecoderConfig
from jtrain.models.presets import PRESETS
from jtrain.tasks.adapter_export import read_adapter
from jtrain.tasks.adapters import lora_of
from jtrain.tasks.companion_files import config_json, family_for, with_tokenizer
from jtrain.tasks.decoder import decoder_config
from jtrain.tasks.model_folder import ModelFolder, has_model_folder, read_model_folder, write_model_folder
from jtrain.tasks.opened import Leaves, Opened, open_model


class ModelSource:
    """The decoder and tokenizer of a run, and the weights that a new run begins with.

    Args:
      config: the run's.

    Attributes:
      config: the run's, with what follows from the model filled in (`max_length`).
      decoder: the shape.
      tokenizer: of `data.tokenizer`; by default that of the model, else bytes.
      adapters: path -> numbers of the adapters that a new run begins with (`model.lora.path`); the others are drawn.

    Raises:
      ConfigError: there is no such model, or the config contradicts it.
      DataError: the tokenizer is missing, or has more tokens than the model.
      CheckpointError: the model is damaged or not complete.
    """

    def __init__(self, config: Config):
        self._opened: Opened | None = None
        self._companions = Companions()
        base, tokenizer = self._from_run(config) if resumes(config) else (None, None)
        if base is None and config.model.path is not None:
            base = self.opened(config).decoder
            self._companions = self.opened(config).companions
        if config.data.tokenizer is not None or config.model.path is None:
            tokenizer = load_tokenizer(config.data.tokenizer or "bytes")
        elif tokenizer is None:
            tokenizer = self.opened(config).tokenizer()
        if tokenizer is None:
            raise DataError(
                f"model.path: {config.model.path} holds no tokenizer", "write data.tokenizer: with a path, or bytes"
            )
        if base is not None and "max_length" not in config.model_fields_set:
            limit = config.model.max_position_embeddings or base.max_position_embeddings
            config = config.model_copy(update={"max_length": min(config.max_length, limit)})
        self.config, self.tokenizer = config, tokenizer
        self.decoder = decoder_config(config, tokenizer, base)
        self.adapters: Leaves = {}
        if config.model.lora.path is not None:
            self.config = self._with_adapter(config)

    def _with_adapter(self, config: Config) -> Config:
        """The config with the settings of the adapter folder; and its numbers, where the run begins anew.

        Raises:
          ConfigError: there is no such adapter, or the config says something else.
          CheckpointError: it is damaged, or of another model.
        """
        section, default = config.model.lora, LoraConfig()
        assert section.path is not None
        kept = read_model_folder(layout.run_path(config.run_dir)).lora if resumes(config) else None
        if kept is None:
            kept, self.adapters = read_adapter(section.path, self.decoder, family_for(self.decoder, self._companions))
        own = {name: getattr(kept, name) for name in ("rank", "alpha", "targets", "rslora", "dora")}
        for name, value in own.items():
            if getattr(section, name) not in (getattr(default, name), value):
                raise ConfigError(
                    f"model.lora.{name}: {getattr(section, name)!r}, and the adapter at model.lora.path has {value!r}",
                    f"leave model.lora.{name} out",
                )
        lora = section.model_copy(update=own)
        return config.model_copy(update={"model": config.model.model_copy(update={"lora": lora})})

    def _from_run(self, config: Config) -> tuple[DecoderConfig | None, Tokenizer | None]:
        content = read_model_folder(layout.run_path(config.run_dir))
        self._companions = content.companions
        if config.model.path is None:  # the config says it all
            return None, None
        return content.decoder, content.tokenizer()

    def opened(self, config: Config | None = None) -> Opened:
        """The model that `model.path` names."""
        if self._opened is None:
            path = (config or self.config).model.path
            assert path is not None
            self._opened = open_model(path)
        return self._opened

    @property
    def pretrained(self) -> bool:
        """Whether a new run begins with weights that are loaded, and not drawn."""
        return self.config.model.path is not None

    def fills(self, path: str) -> bool:
        """Whether `load` brings the parameter with this path."""
        return self.opened().fills(path)

    def load(self, params: Leaves, variables: Leaves) -> tuple[Leaves, Leaves]:
        """The weights, as `Opened.load` gives them."""
        return self.opened().load(params, variables)

    def keep(self, run_dir: str) -> None:
        """Writes RUN/model."""
        limit = self.decoder.max_position_embeddings
        companions = self._companions
        if self.config.data.tokenizer is not None or self.config.model.path is None:
            companions = with_tokenizer(companions, self.tokenizer, limit)
        if (given := self.config.data.chat_template) is not None:
            template = load_chat_template(self.tokenizer, given).source.encode()
            companions = dataclasses.replace(companions, files={**companions.files, "chat_template.jinja": template})
        try:
            companions = dataclasses.replace(companions, config=config_json(self.decoder, companions, self.tokenizer))
        except ConfigError:  # no family has this shape: the run can't be exported, and jtrain goes on without
            companions = dataclasses.replace(companions, config={})
        content = ModelFolder(
            self.decoder, companions, bytes=self.tokenizer.spec == "bytes", lora=lora_of(self.config.model.lora)
        )
        write_model_folder(layout.run_path(run_dir), content)


def resumes(config: Config) -> bool:
    """Whether a start of this config goes on from a checkpoint of its run directory that has RUN/model beside it."""
    if config.fast_dev_run or config.checkpoint.resume == "never":
        return False
    run = layout.run_path(config.run_dir)
    return has_model_folder(run) and bool(layout.finished_steps(layout.checkpoints_root(run)))


def with_model(section: ModelConfig, model: Any) -> dict[str, Any]:
    """The fields of the `model` section with the argument `model` of a trainer over them.

    Args:
      section: the config's.
      model: a preset's name, the path of a model, or a dict of fields.

    Raises:
      ConfigError: it is something else.
    """
    before = section.model_dump()
    if isinstance(model, dict):
        return before | model
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(
            f"model: a {type(model).__name__}", "name a preset or a folder, or use Trainer for your own module"
        )
    text, fields = os.fspath(model), type(section).model_fields
    is_path = text not in PRESETS and (os.sep in text or os.path.exists(os.path.expanduser(text)))
    return before | ({"path": text, "preset": fields["preset"].default} if is_path else {"preset": text, "path": None})


def tokenizer_of(config: Config) -> Tokenizer:
    """The tokenizer of a config: `data.tokenizer`, else that of `model.path`, else bytes.

    Raises:
      DataError: there is none, or it can't be read.
    """
    if config.data.tokenizer is not None or config.model.path is None:
        return load_tokenizer(config.data.tokenizer or "bytes")
    found = open_model(os.fspath(config.model.path)).tokenizer()
    if found is None:
        raise DataError(
            f"model.path: {config.model.path} holds no tokenizer", "write data.tokenizer: with a path, or bytes"
        )
    return found
