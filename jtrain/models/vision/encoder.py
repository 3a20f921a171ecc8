"""A vision transformer (Dosovitskiy et al. 2021) from the decoder's parts, as CLIP and SigLIP have it.

Legend: B images, P tokens of one (its patches, and the class token before them), D model, H heads, Dh head, N layers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jtrain.errors import ConfigError
from jtrain.models.decoder import Positions
from jtrain.models.dropout import dropout, dropout_keys
from jtrain.models.feed_forward import FeedForward
from jtrain.models.layer import Layer
from jtrain.models.norm import Norm
from jtrain.models.parameters import normal
from jtrain.models.projection import Projection, project
from jtrain.models.remat import remat
from jtrain.models.vision.config import VisionConfig
from jtrain.ops.logical import constrain, gathered


class VisionEncoder(nnx.Module):
    """Pixels to tokens, or to one vector an image.

    Patches are cut out and embedded by one product, learned positions are added, and pre-norm layers follow, stacked
    along a leading axis and run by one scan. That scan is never divided into the stages of a pipeline: beside a text
    model every stage has the whole encoder while it computes, and its part of the parameters at rest.

    Args:
      config: shape and parts.
      rngs: its `params` stream draws the parameters; see `jtrain.models.decoder.Decoder`.
      param_dtype: type in which parameters are stored. Computes in the type of the patches' kernel.
    """

    def __init__(self, config: VisionConfig, rngs: nnx.Rngs, *, param_dtype: DTypeLike = "float32"):
        self.config = config
        blocks, dtype = config.blocks, jnp.dtype(param_dtype)
        keys = jax.random.split(rngs.params(), 5)
        patch = (("patch", config.patch_size**2 * config.num_channels),)
        self.patch_embed = Projection(
            keys[0],
            config.initializer_range,
            patch,
            (("embed", config.hidden_size),),
            bias=config.patch_bias,
            dtype=dtype,
        )
        if config.class_token:
            self.class_token = normal(keys[1], config.initializer_range, (config.hidden_size,), ("embed",), dtype)
        self.embed_positions = Positions(blocks, keys[2], dtype)
        if config.pre_norm:
            self.pre_norm = Norm(blocks, dtype)

        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stack(key: jax.Array) -> Layer:
            return Layer(blocks, key, dtype)

        numbers = jnp.arange(config.num_hidden_layers)
        self.layers = stack(jax.vmap(jax.random.fold_in, in_axes=(None, 0))(keys[3], numbers))
        self.post_norm = Norm(blocks, dtype)
        if config.pooling == "attention":
            self.head = AttentionPooling(config, keys[4], dtype)

    def features(
        self,
        pixels: jax.Array,
        *,
        layer: int = -1,
        rng: jax.Array | None = None,
        row: jax.Array | None = None,
    ) -> jax.Array:
        """Activations of all tokens after a layer, as transformers' `hidden_states[layer]`.

        Args:
          pixels: transformed images [B, height, width, channels], any floating type.
          layer: 0: what the first layer reads, 1: after the first layer...; negative numbers count from the last.
          rng: scalar typed key of the step, for dropout; None switches it off.
          row: global number of each row within the step [B]; an image's dropout depends on (rng, layer, row).

        Returns:
          [B, P, D], not normalised after the last layer, in the compute type.

        Raises:
          ConfigError: images of another shape, or a layer that there is not.
        """
        config = self.config
        depth = layer + 1 + config.num_hidden_layers if layer < 0 else layer
        if not 0 <= depth <= config.num_hidden_layers:
            raise ConfigError(
                f"layer {layer} of a vision encoder with {config.num_hidden_layers} layers",
                f"Write a number from {-config.num_hidden_layers - 1} to {config.num_hidden_layers}.",
            )
        x, keys = self.embed(pixels), None
        if config.dropout and rng is not None:
            if row is None:
                raise ValueError("dropout needs row beside rng")
            embedding_keys, keys = dropout_keys(rng, config.num_hidden_layers, row)
            x = dropout(x, config.dropout, embedding_keys)
        graph, layers = nnx.split(self.layers)

        def body(x_BPD: jax.Array, layer: tuple[dict, jax.Array | None]) -> tuple[jax.Array, None]:
            parameters, keys_2B = layer
            return nnx.merge(graph, parameters)(x_BPD, None, None, keys_2B)[0], None

        data: Any = nnx.to_pure_dict(layers), keys
        if depth < config.num_hidden_layers:
            data = jax.tree.map(lambda a: a[:depth], data)
        return jax.lax.scan(remat(body, config.remat), x, data)[0]

    def embed(self, pixels: jax.Array) -> jax.Array:
        """What the first layer reads [B, P, D], without dropout."""
        config, size = self.config, self.config.patch_size
        wanted = (config.image_size, config.image_size, config.num_channels)
        if pixels.ndim != 4 or pixels.shape[1:] != wanted:
            raise ConfigError(
                f"images of shape {tuple(pixels.shape)}, and this encoder takes {wanted} of each",
                "Give [rows, height, width, channels], transformed by the model's own preprocessor_config.json.",
            )
        b, side = pixels.shape[0], config.side
        x = pixels[:, : side * size, : side * size].astype(self.patch_embed.kernel[...].dtype)
        x = x.reshape(b, side, size, side, size, config.num_channels).transpose(0, 1, 3, 2, 4, 5)
        x = constrain(self.patch_embed(x.reshape(b, side * side, -1)), "batch", "sequence", None)
        if config.class_token:
            token = gathered(self.class_token[...].astype(x.dtype), (None,), ("embed",))
            x = jnp.concatenate([jnp.broadcast_to(token, (b, 1, token.size)), x], axis=1)
        x = x + self.embed_positions(jnp.arange(config.tokens)[None], x.dtype)
        if config.pre_norm:
            x = self.pre_norm(x)
        return constrain(x, "batch", "residual_sequence", None)

    def pooled(self, pixels: jax.Array, *, rng: jax.Array | None = None, row: jax.Array | None = None) -> jax.Array:
        """One vector an image; the arguments are those of `features`.

        Returns:
          [B, D] in the compute type: the normalised class token, the mean of the normalised patches, or what the
          attention head reads off them.

        Raises:
          ConfigError: the encoder has no pooling.
        """
        pooling, first = self.config.pooling, int(self.config.class_token)
        if pooling == "none":
            raise ConfigError("vision.pooling is 'none': there is no vector of an image", "Read features(pixels).")
        x = self.features(pixels, rng=rng, row=row)
        if pooling == "class":
            return constrain(self.post_norm(constrain(x, "batch", "sequence", None)[:, :1])[:, 0], "batch", None)
        x = constrain(self.post_norm(x), "batch", "sequence", None)
        return constrain(self.head(x) if pooling == "attention" else x[:, first:].mean(1), "batch", None)


class AttentionPooling(nnx.Module):
    """SigLIP's head: a learned query attends to all tokens, and a feed-forward follows (Zhai et al. 2022).

    Args:
      config: the encoder.
      key: of the parameters.
      dtype: their type.
    """

    def __init__(self, config: VisionConfig, key: jax.Array, dtype: jnp.dtype):
        blocks = config.blocks
        keys = jax.random.split(key, 8)
        std, embed = config.initializer_range, (("embed", config.hidden_size),)
        heads = (("heads", config.num_attention_heads), ("head_dim", blocks.head_size))
        self.probe = normal(keys[0], std, (config.hidden_size,), ("embed",), dtype)
        self.q_proj = Projection(keys[1], std, embed, heads, bias=True, dtype=dtype)
        self.k_proj = Projection(keys[2], std, embed, heads, bias=True, dtype=dtype)
        self.v_proj = Projection(keys[3], std, embed, heads, bias=True, dtype=dtype)
        self.o_proj = Projection(keys[4], std, heads, embed, bias=True, dtype=dtype)
        self.mlp_norm = Norm(blocks, dtype)
        self.mlp = FeedForward(blocks, keys[5:], dtype)

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        """[B, P, D] -> [B, D]."""
        wide = jnp.promote_types(x_BPD.dtype, jnp.float32)
        probe = gathered(self.probe[...].astype(x_BPD.dtype), (None,), ("embed",))
        q = self.q_proj(jnp.broadcast_to(probe, (x_BPD.shape[0], 1, probe.size)))
        k, v = (constrain(y, "batch", "sequence", "heads", None) for y in project((self.k_proj, self.v_proj), x_BPD))
        scores = jnp.einsum("bqhd,bphd->bhqp", q, k, preferred_element_type=wide) * q.shape[-1] ** -0.5
        y = jnp.einsum("bhqp,bphd->bqhd", jax.nn.softmax(scores, axis=-1).astype(x_BPD.dtype), v)
        y = self.o_proj(constrain(y, "batch", None, "heads", None))
        return (y + self.mlp(self.mlp_norm(y)))[:, 0]
