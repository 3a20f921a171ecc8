"""Two towers, of images and of texts, into one space: CLIP (Radford et al. 2021) and SigLIP (Zhai et al. 2023).

| | CLIP | SigLIP |
|---|---|---|
| text tower | causal; the end token stands for the text | every token sees every other; the last token stands for it |
| text, image projection | a product each | a product with a bias; none |
| score of a pair | scale x cosine | scale x cosine + bias |

Legend: B pairs, L tokens of a text, D size of an embedding.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jtrain.errors import ConfigError
from jtrain.models.config import DecoderConfig
from jtrain.models.decoder import Decoder
from jtrain.models.parameters import constant
from jtrain.models.projection import Projection
from jtrain.models.vision.config import ACTIVATIONS, VisionConfig
from jtrain.models.vision.encoder import VisionEncoder
from jtrain.ops.logical import constrain

Kind = Literal["clip", "siglip"]


@dataclass(frozen=True)
class DualEncoderConfig:
    """Shape of both towers and of what joins them.

    Raises:
      ConfigError: parts that do not fit the kind.
    """

    kind: Kind
    text: DecoderConfig
    """A decoder without a head."""
    vision: VisionConfig
    projection_dim: int
    """Size of an embedding; with SigLIP that of the vision tower."""
    eos_token_id: int = 2
    """clip: the token that ends a text and stands for it; 2: the largest token of a row does (the first CLIPs)."""
    logit_scale_init: float = 2.6592
    """Initial logarithm of the scale."""
    logit_bias_init: float = -10.0
    """siglip: initial bias."""

    def __post_init__(self) -> None:
        if self.projection_dim < 1:
            raise ConfigError(f"projection_dim is {self.projection_dim}", "Write a number of at least 1.")
        if self.kind == "siglip" and self.projection_dim != self.vision.hidden_size:
            raise ConfigError(
                f"projection_dim {self.projection_dim}, and SigLIP's images come with {self.vision.hidden_size}",
                f"Write projection_size: {self.vision.hidden_size} in the text tower.",
            )
        if self.vision.pooling == "none":
            raise ConfigError("the vision tower has no pooling: no vector stands for an image", "Give one with a head.")
        if self.text.causal != (self.kind == "clip"):
            raise ConfigError(f"the text tower's causal is {self.text.causal}", f"It is not so in {self.kind}.")

    def replace(self, **changes: Any) -> DualEncoderConfig:
        """A copy with some fields changed, checked anew."""
        return dataclasses.replace(self, **changes)

    def trained_with(self, **changes: Any) -> DualEncoderConfig:
        """A copy with fields of both towers changed that say how to train (dropout, remat, attention)."""
        return self.replace(text=self.text.replace(**changes), vision=self.vision.replace(**changes))


def text_tower(
    kind: Kind,
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    max_position_embeddings: int,
    hidden_act: str,
    layer_norm_eps: float,
    **more: Any,
) -> DecoderConfig:
    """The text tower as a decoder without a head; arguments are transformers' words."""
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        max_position_embeddings=max_position_embeddings,
        position_embedding="learned",
        causal=kind == "clip",
        tie_word_embeddings=True,
        norm="layernorm",
        norm_eps=layer_norm_eps,
        activation=ACTIVATIONS[hidden_act],
        attention_bias=True,
        mlp_bias=True,
        **more,
    )


class DualEncoder(nnx.Module):
    """Images and texts as vectors of one space.

    The layers of the text tower are those that a pipeline divides into stages; the vision tower runs as a whole beside
    its last stage.

    Args:
      config: shape and parts.
      rngs: its `params` stream draws the parameters; see `jtrain.models.decoder.Decoder`.
      param_dtype: type in which parameters are stored.
    """

    vocabulary_parallel = True
    """The text tower looks tokens up by `jtrain.ops` only."""

    def __init__(self, config: DualEncoderConfig, rngs: nnx.Rngs, *, param_dtype: DTypeLike = "float32"):
        self.config = config
        dtype = jnp.dtype(param_dtype)
        keys = jax.random.split(rngs.params(), 4)
        self.text = Decoder(config.text, nnx.Rngs(params=keys[0]), param_dtype=dtype)
        self.vision = VisionEncoder(config.vision, nnx.Rngs(params=keys[1]), param_dtype=dtype)
        biased, out = config.kind == "siglip", (("projection", config.projection_dim),)

        def projection(key: jax.Array, size: int) -> Projection:
            return Projection(key, size**-0.5, (("embed", size),), out, bias=biased, dtype=dtype)

        self.text_projection = projection(keys[2], config.text.hidden_size)
        if config.kind == "clip":
            self.image_projection = projection(keys[3], config.vision.hidden_size)
        self.logit_scale = constant(config.logit_scale_init, (1,), ("logit",), dtype)
        if config.kind == "siglip":
            self.logit_bias = constant(config.logit_bias_init, (1,), ("logit",), dtype)

    def encode_image(
        self, pixels: jax.Array, *, rng: jax.Array | None = None, row: jax.Array | None = None
    ) -> jax.Array:
        """Transformed images [B, height, width, channels] as vectors [B, D], not normalised, in the compute type.

        Args:
          pixels: images.
          rng: scalar typed key of the step, for dropout; None switches it off.
          row: global number of each row within the step [B].
        """
        rng = None if rng is None else jax.random.fold_in(rng, _OF_IMAGES)
        x = self.vision.pooled(pixels, rng=rng, row=row)
        return self.image_projection(x[:, None])[:, 0] if self.config.kind == "clip" else x

    def encode_text(
        self, input_ids: jax.Array, *, rng: jax.Array | None = None, row: jax.Array | None = None
    ) -> jax.Array:
        """Texts [B, L] as vectors [B, D], not normalised; the other arguments are those of `encode_image`.

        Padding is not masked, as in transformers: CLIP's end token sees nothing behind it, SigLIP has learned with it.
        """
        hidden = self.text.hidden(input_ids, rng=rng, row=row, deterministic=rng is None)
        hidden = constrain(hidden, "batch", "sequence", None)
        length = input_ids.shape[1]
        if self.config.kind == "siglip":
            last = jnp.full(input_ids.shape[:1], length - 1)
        elif self.config.eos_token_id == 2:
            last = input_ids.argmax(1)
        else:
            last = (input_ids == self.config.eos_token_id).argmax(1)
        # A sum over one place instead of a gather: it stays on the device that holds the token.
        at_last = jnp.arange(length) == last[:, None]
        x = jnp.where(at_last[..., None], hidden, 0).sum(1)
        return self.text_projection(x[:, None])[:, 0]

    def embed(
        self,
        pixels: jax.Array,
        input_ids: jax.Array,
        *,
        rng: jax.Array | None = None,
        row: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Images and texts as vectors of length one [B, D], float32 at least; arguments as of the two above."""
        text = self.encode_text(input_ids, rng=rng, row=row)
        return normalised(self.encode_image(pixels, rng=rng, row=row)), normalised(text)

    def scale_and_bias(self) -> tuple[jax.Array, jax.Array]:
        """Logarithm of the scale, and the bias (0 in CLIP), float32 at least."""
        scale = self.logit_scale[...][0]
        scale = scale.astype(jnp.promote_types(scale.dtype, jnp.float32))
        if self.config.kind == "clip":
            return scale, jnp.zeros_like(scale)
        return scale, self.logit_bias[...][0].astype(scale.dtype)

    def __call__(self, pixels: jax.Array, input_ids: jax.Array) -> jax.Array:
        """Scores of every image with every text [images, texts], transformers' `logits_per_image`."""
        image = normalised(self.encode_image(pixels))
        text = normalised(self.encode_text(input_ids))
        scale, bias = self.scale_and_bias()
        return jnp.einsum("id,td->it", image, text, precision="highest") * jnp.exp(scale) + bias


_OF_IMAGES = 0x696D6167
"""Keeps the vision tower's keys apart from the text tower's."""


def normalised(x_BD: jax.Array) -> jax.Array:
    """Vectors of length one, float32 at least."""
    x = x_BD.astype(jnp.promote_types(x_BD.dtype, jnp.float32))
    return constrain(x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(-1, keepdims=True), 1e-24)), "batch", None)
