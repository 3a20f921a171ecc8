"""What a family of models is: a translation of `config.json`, and a map of its tensors."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from jtrain.models.config import DecoderConfig
from jtrain.models.families.keys import Tensor


class Family(ABC):
    """One `model_type` of Hugging Face. To add one, write a subclass in a file of its own; see docs/models.md.

    Attributes:
      model_type: as in config.json.
      architectures: names of the causal language models that config.json may have; the first is written.
      ignored: patterns (matched whole) of keys on disk that carry nothing: buffers, caches of rotary tables.
    """

    model_type: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]
    ignored: ClassVar[tuple[str, ...]] = (r".*\.rotary_emb\.inv_freq",)

    @abstractmethod
    def decoder_config(self, hf: dict[str, Any]) -> DecoderConfig:
        """Our shape of a config.json of transformers 4 or 5.

        Raises:
          ConfigError: it asks for something that changes the function and that we do not do; the message names it.
        """

    @abstractmethod
    def hf_config(self, config: DecoderConfig) -> dict[str, Any]:
        """The config.json that transformers (4 and 5) loads to the same function."""

    @abstractmethod
    def tensors(self, config: DecoderConfig) -> list[Tensor]:
        """Every tensor of the folder, in the order of the layers. What is tied is there once."""

    def rename(self, key: str) -> str:
        """A key as older or outer models write it, in the spelling of `tensors`."""
        return key

    def ignores(self, key: str, config: DecoderConfig) -> bool:
        """Whether a (renamed) key that `tensors` lacks carries nothing: a buffer, or the copy of a tied table."""
        if config.tie_word_embeddings and key == "lm_head.weight":
            return True
        return any(re.fullmatch(pattern, key) for pattern in self.ignored)
