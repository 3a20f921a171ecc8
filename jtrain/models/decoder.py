"""A decoder-only transformer from small parts; its layers are stacked and run by one scan.

Legend: B rows, L tokens, D model, V vocabulary. The model knows nothing of the mesh: it names its axes
(`jtrain.ops.logical`) and whoever traces it says where they lie.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jtrain.models.attention import Attention, kv_repeats
from jtrain.models.config import DecoderConfig
from jtrain.models.dropout import dropout, dropout_keys
from jtrain.models.feed_forward import FeedForward
from jtrain.models.norm import Norm
from jtrain.models.parameters import normal
from jtrain.models.remat import remat
from jtrain.models.rope import rope_tables
from jtrain.ops.context import balanced_ways
from jtrain.ops.logical import constrain, mesh_axis_size
from jtrain.ops.stack import scan_layers
from jtrain.ops.vocabulary import embedding_lookup, pad_vocabulary
from jtrain.ops.zigzag import token_index


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), with dropout on both branches."""

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype: jnp.dtype):
        # All keys by one split: hashing is what an initial draw takes longest to compile.
        keys = jax.random.split(key, 7)
        self.dropout = config.dropout
        self.attention_norm = Norm(config, dtype)
        self.attention = Attention(config, keys[:4], dtype)
        self.mlp_norm = Norm(config, dtype)
        self.mlp = FeedForward(config, keys[4:], dtype)

    def __call__(
        self,
        x_BLD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        segment_ids_BL: jax.Array | None,
        keys_2B: jax.Array | None,
    ) -> jax.Array:
        def branch(y_BLD: jax.Array, place: int) -> jax.Array:
            y_BLD = constrain(y_BLD, "batch", "residual_sequence", None)
            return y_BLD if keys_2B is None else dropout(y_BLD, self.dropout, keys_2B[place])

        h = constrain(self.attention_norm(x_BLD), "batch", "sequence", None)
        x_BLD = x_BLD + branch(self.attention(h, rope, segment_ids_BL), 0)
        h = constrain(self.mlp_norm(x_BLD), "batch", "sequence", None)
        x_BLD = x_BLD + branch(self.mlp(h), 1)
        return constrain(x_BLD, "batch", "residual_sequence", None)


class Embedding(nnx.Module):
    """The token table [V, D]."""

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype: jnp.dtype):
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = normal(key, config.initializer_range, shape, ("vocab", "embed"), dtype)


class Head(nnx.Module):
    """The untied output kernel [D, V]."""

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype: jnp.dtype):
        shape = (config.hidden_size, config.vocab_size)
        self.kernel = normal(key, config.initializer_range, shape, ("embed", "vocab"), dtype)


class Decoder(nnx.Module):
    """Decoder-only language model.

    Computes in the type of the embedding table: whoever wants bfloat16 casts the parameters first. Norms, softmax,
    rotary tables and logits are float32 at least.

    Args:
      config: shape and parts.
      rngs: its `params` stream draws the parameters, in float32. A layer's numbers depend on the key and its
        index alone, so neither the number of layers nor the mesh changes them. Parameters carry the logical names of
        their axes; make the model under `nnx.use_eager_sharding(False)`, or under jit with `out_shardings`.
      param_dtype: type in which parameters are stored.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, *, param_dtype: DTypeLike = "float32"):
        self.config = config
        dtype = jnp.dtype(param_dtype)
        embedding_key, head_key, layers_key = jax.random.split(rngs.params(), 3)
        self.embed_tokens = Embedding(config, embedding_key, dtype)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(layers_key, jnp.arange(config.num_hidden_layers))

        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stacked(key: jax.Array) -> Layer:
            return Layer(config, key, dtype)

        self.layers = stacked(keys)
        self.final_norm = Norm(config, dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Head(config, head_key, dtype)

    def hidden(
        self,
        input_ids: jax.Array,
        *,
        position_ids: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rng: jax.Array | None = None,
        row: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Activations after the final norm.

        Args:
          input_ids: tokens [B, L].
          position_ids: positions [B, L]; by default 0, 1, 2...
          segment_ids: document of each token [B, L], 0 for padding; by default a row is one document.
          rng: scalar typed key of the step, for dropout.
          row: global number of each row within the step [B]; a row's dropout depends on (rng, layer, row).
          deterministic: True switches dropout off.

        Returns:
          [B, L, D] in the compute type.

        Raises:
          ValueError: dropout is on, and `rng` or `row` is missing.
        """
        config = self.config
        if deterministic or config.dropout == 0.0:
            rng = row = None
        elif rng is None or row is None:
            raise ValueError("dropout needs rng and row; pass deterministic=True to switch it off")
        if position_ids is None:
            position_ids = jnp.broadcast_to(token_index(input_ids.shape[1]), input_ids.shape)
        table = self.embed_tokens.embedding[...]
        x = constrain(embedding_lookup(table, input_ids), "batch", "sequence", None)
        x = constrain(x, "batch", "residual_sequence", None)
        keys = None
        if rng is not None and row is not None:
            embedding_keys, keys = dropout_keys(rng, config.num_hidden_layers, row)
            x = dropout(x, config.dropout, embedding_keys)
        cos, sin = rope_tables(config, position_ids, table.dtype)
        rope = (constrain(cos, "batch", "sequence", None), constrain(sin, "batch", "sequence", None))
        graph, layers = nnx.split(self.layers)

        def body(x_BLD: jax.Array, layer: tuple[dict, jax.Array | None]) -> jax.Array:
            parameters, keys_2B = layer
            return nnx.merge(graph, parameters)(x_BLD, rope, segment_ids, keys_2B)

        x = scan_layers(remat(body, config.remat), x, nnx.to_pure_dict(layers), keys)
        return constrain(self.final_norm(x), "batch", "sequence", None)

    def balanced_ways(self, length: int) -> int:
        """For how many devices a loss puts rows of this length into the order of `jtrain.ops.zigzag`; 1: natural order.

        `hidden` takes the tokens as they come: who permutes its arrays calls it under `zigzag_order`.
        """
        config = self.config
        kv_heads = config.kv_heads * kv_repeats(config, mesh_axis_size("kv_heads"))
        return balanced_ways(config.attention, length=length, heads=config.num_attention_heads, kv_heads=kv_heads)

    def head(self) -> jax.Array:
        """The output kernel [D, V]; the embedding table transposed where they are tied."""
        if self.config.tie_word_embeddings:
            return self.embed_tokens.embedding[...].T
        return self.lm_head.kernel[...]

    def __call__(
        self,
        input_ids: jax.Array,
        attention_mask: jax.Array | None = None,
        position_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Logits of the next token.

        Args:
          input_ids: tokens [B, L].
          attention_mask: 1 for tokens, 0 for padding [B, L]; by default all are tokens.
          position_ids: positions [B, L]; by default 0, 1, 2... in every row, whatever the mask.

        Returns:
          [B, L, V] float32 (float64 where the parameters are).
        """
        segments = None if attention_mask is None else attention_mask.astype(jnp.int32)
        x = self.hidden(input_ids, position_ids=position_ids, segment_ids=segments)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        head = pad_vocabulary(self.head(), 1)
        logits = jnp.einsum("bld,dv->blv", x, head, preferred_element_type=wide)
        return constrain(logits, "batch", "sequence", "vocab")[..., : self.config.vocab_size]
