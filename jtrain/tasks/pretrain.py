"""Pretraining: the next token of every token, over packed text."""

from __future__ import annotations

from jtrain.config.schema import Config
from jtrain.tasks.language import LanguageTrainer
from jtrain.tasks.language_loss import next_token_loss
from jtrain.train.loss import LossFn


class PretrainTrainer(LanguageTrainer):
    """Trains a decoder on text: records have the field `data.text_field`. The arguments are `LanguageTrainer`'s."""

    task = "pretrain"

    def make_loss(self, config: Config) -> LossFn:
        return pretrain_loss(config.loss.label_smoothing, config.loss.z_loss, config.loss.chunk_size)


def pretrain_loss(label_smoothing: float = 0.0, z_loss: float = 0.0, chunk_size: int | None = None) -> LossFn:
    """The loss of pretraining; see `next_token_loss`."""
    return next_token_loss(label_smoothing, z_loss, chunk_size)
