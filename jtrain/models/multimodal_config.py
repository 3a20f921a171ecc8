"""The part of a model that sees: a frozen dataclass in plain Python, as `DecoderConfig` is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from jtrain.errors import ConfigError
from jtrain.models.vision.config import VisionConfig

SelectStrategy = Literal["default", "full"]
ProjectorAct = Literal["gelu", "gelu_pytorch_tanh", "relu", "silu"]


@dataclass(frozen=True)
class ImageConfig:
    """How images become embeddings of a decoder (LLaVA, Liu et al. 2023). Field names are transformers'.

    Raises:
      ConfigError: a layer that the encoder has not, or no token left of an image.
    """

    encoder: VisionConfig
    image_token_index: int
    """The token whose places images take."""
    vision_feature_layer: int = -2
    """Layer of the encoder whose activations are read, as of transformers' `hidden_states`."""
    vision_feature_select_strategy: SelectStrategy = "default"
    """default leaves the first token of an image out (the class token); full reads all."""
    projector_hidden_act: ProjectorAct = "gelu"
    multimodal_projector_bias: bool = True

    def __post_init__(self) -> None:
        for name, choices in (
            ("vision_feature_select_strategy", SelectStrategy),
            ("projector_hidden_act", ProjectorAct),
        ):
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(f"{name} is {getattr(self, name)!r}", f"jtrain does {', '.join(get_args(choices))}.")
        layer, layers = self.vision_feature_layer, self.encoder.num_hidden_layers
        if isinstance(layer, bool) or not isinstance(layer, int) or not -layers - 1 <= layer <= layers:
            raise ConfigError(
                f"vision_feature_layer is {layer!r}, and the vision encoder has {layers} layers",
                f"Write one number from {-layers - 1} to {layers}; lists of layers are not done.",
            )
        if self.tokens < 1:
            raise ConfigError("the vision encoder leaves no token of an image", "Write a smaller patch_size.")

    @property
    def tokens(self) -> int:
        """Tokens that an image takes in a row."""
        return self.encoder.tokens - (self.vision_feature_select_strategy == "default")

    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image."""
        return self.encoder.image_size, self.encoder.image_size, self.encoder.num_channels


def image_config(fields: dict[str, Any]) -> ImageConfig:
    """The config of `dataclasses.asdict`."""
    return ImageConfig(**{**fields, "encoder": VisionConfig(**fields["encoder"])})
