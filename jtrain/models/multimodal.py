"""Images in a decoder's rows, as LLaVA has them: encoder, projector, and the features in place of embeddings.

Legend: B rows, I images of a row, L tokens, P tokens of an image, D model, V width of the encoder.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jtrain.models.multimodal_config import ImageConfig
from jtrain.models.projection import Projection
from jtrain.models.vision.encoder import VisionEncoder
from jtrain.ops.logical import constrain

_ACTIVATIONS = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


class Images(NamedTuple):
    """The images of some rows.

    Attributes:
      pixels: [B, I, height, width, channels], transformed; what fills up a row's images may be anything.
      places: int32 [B, L]: which token of the row's images stands at each place, counted from 0; -1: a text token.
    """

    pixels: jax.Array
    places: jax.Array


def image_places(input_ids_BL: jax.Array, image_token: int) -> jax.Array:
    """`Images.places` of rows whose image tokens stand in the order of their images."""
    held = input_ids_BL == image_token
    return jnp.where(held, jnp.cumsum(held, axis=1, dtype=jnp.int32) - 1, -1)


class MultiModalProjector(nnx.Module):
    """Two linear layers from the encoder's features to embeddings."""

    def __init__(self, config: ImageConfig, hidden_size: int, key: jax.Array, std: float, dtype: jnp.dtype):
        self.config = config
        first, second = jax.random.split(key)
        bias, width = config.multimodal_projector_bias, (("mlp", hidden_size),)
        features, embeddings = (("embed", config.encoder.hidden_size),), (("embed", hidden_size),)
        self.linear_1 = Projection(first, std, features, width, bias=bias, dtype=dtype)
        self.linear_2 = Projection(second, std, width, embeddings, bias=bias, dtype=dtype)
        for linear in (self.linear_1, self.linear_2):
            for parameter in (linear.kernel, linear.bias):
                if isinstance(parameter, nnx.Param):
                    parameter.set_metadata(trained=True)  # also beside adapters: a new one has learned nothing

    def __call__(self, x_BPV: jax.Array) -> jax.Array:
        """[B, P, V] -> [B, P, D]."""
        x = constrain(self.linear_1(x_BPV), "batch", "sequence", "mlp")
        x = _ACTIVATIONS[self.config.projector_hidden_act](x)
        return constrain(self.linear_2(x), "batch", "sequence", None)


def image_modules(
    config: ImageConfig, hidden_size: int, key: jax.Array, std: float, dtype: jnp.dtype
) -> tuple[VisionEncoder, MultiModalProjector]:
    """Encoder and projector of a decoder with this width."""
    tower, projector = jax.random.split(key)
    encoder = VisionEncoder(config.encoder, nnx.Rngs(params=tower), param_dtype=dtype)
    return encoder, MultiModalProjector(config, hidden_size, projector, std, dtype)


def image_features(tower: VisionEncoder, projector: MultiModalProjector, pixels_BIHWC: jax.Array) -> jax.Array:
    """The tokens of all images of a row, one behind the other: [B, I * P, D]."""
    config, (b, i, *shape) = projector.config, pixels_BIHWC.shape
    pixels = constrain(pixels_BIHWC.reshape(b * i, *shape), "batch", None, None, None)
    x = constrain(tower.features(pixels, layer=config.vision_feature_layer), "batch", None, None)
    if config.vision_feature_select_strategy == "default":
        x = x[:, 1:]
    x = projector(x)
    return constrain(x.reshape(b, i * config.tokens, -1), "batch", None, None)


def with_images(x_BLD: jax.Array, places_BL: jax.Array, features_BKD: jax.Array) -> jax.Array:
    """Embedded tokens with the features of images at their places (`Images.places`)."""
    places = constrain(places_BL, "batch", "sequence")
    seen = jnp.take_along_axis(features_BKD.astype(x_BLD.dtype), jnp.maximum(places, 0)[..., None], axis=1)
    return jnp.where(places[..., None] >= 0, constrain(seen, "batch", "sequence", None), x_BLD)
