"""A decoder-only transformer from small parts; its layers are stacked and run by one scan.

Legend: B rows, L tokens, D model, V vocabulary, N layers, E experts. The model knows nothing of the mesh: it names its
axes (`jtrain.ops.logical`) and whoever traces it says where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jtrain.errors import ConfigError
from jtrain.models.attention import Attention, kv_repeats
from jtrain.models.config import DecoderConfig
from jtrain.models.dropout import dropout, dropout_keys
from jtrain.models.feed_forward import FeedForward
from jtrain.models.moe import MixtureOfExperts
from jtrain.models.norm import Norm
from jtrain.models.parameters import normal
from jtrain.models.remat import remat
from jtrain.models.rope import rope_tables
from jtrain.models.router import RouterBias, RouterFigures, RouterLoad, balance_step
from jtrain.ops.context import balanced_ways
from jtrain.ops.logical import constrain, manual_axes, mesh_axis_size
from jtrain.ops.stack import scan_layers
from jtrain.ops.vocabulary import embedding_lookup, pad_vocabulary
from jtrain.ops.zigzag import token_index


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), with dropout on both branches.

    Args:
      config: the decoder.
      key: of the parameters.
      dtype: their type.
      experts: whether the feed-forward is a mixture of experts.
    """

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype: jnp.dtype, *, experts: bool = False):
        # All keys by one split: hashing is what an initial draw takes longest to compile.
        keys = jax.random.split(key, 11 if experts else 7)
        self.dropout = config.dropout
        self.attention_norm = Norm(config, dtype)
        self.attention = Attention(config, keys[:4], dtype)
        self.mlp_norm = Norm(config, dtype)
        self.mlp = (MixtureOfExperts if experts else FeedForward)(config, keys[4:], dtype)

    def __call__(
        self,
        x_BLD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        segment_ids_BL: jax.Array | None,
        keys_2B: jax.Array | None,
        bias_E: jax.Array | None = None,
    ) -> tuple[jax.Array, RouterFigures | None]:
        """Activations after the layer, and what its router did (None without experts)."""

        def branch(y_BLD: jax.Array, place: int) -> jax.Array:
            y_BLD = constrain(y_BLD, "batch", "residual_sequence", None)
            return y_BLD if keys_2B is None else dropout(y_BLD, self.dropout, keys_2B[place])

        h = _whole_sequence(self.attention_norm(x_BLD))
        x_BLD = x_BLD + branch(self.attention(h, rope, segment_ids_BL), 0)
        figures = None
        if isinstance(self.mlp, MixtureOfExperts):  # it gathers what it needs by itself
            h = constrain(self.mlp_norm(x_BLD), "batch", "residual_sequence", None)
            y, figures = self.mlp(h, segment_ids_BL, bias_E)
        else:
            y = self.mlp(_whole_sequence(self.mlp_norm(x_BLD)))
        x_BLD = x_BLD + branch(y, 1)
        return constrain(x_BLD, "batch", "residual_sequence", None), figures


def _whole_sequence(x_BLD: jax.Array) -> jax.Array:
    """Gathers what `tensor` cut between blocks; pinned before, so that the norm's own type does not travel."""
    x_BLD = constrain(x_BLD, "batch", "residual_sequence", None)
    return constrain(x_BLD, "batch", "sequence", None)


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

    With experts, the loads of a step's experts and the balancing bias are variables beside the parameters; see
    `end_step`. Leading dense layers (`first_k_dense_replace`) stand in a stack of their own and run before the others.
    """

    vocabulary_parallel = True
    """Tokens are looked up and scored by `jtrain.ops` only, which take a part of the vocabulary as well."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, *, param_dtype: DTypeLike = "float32"):
        self.config = config
        dtype = jnp.dtype(param_dtype)
        embedding_key, head_key, layers_key = jax.random.split(rngs.params(), 3)
        self.embed_tokens = Embedding(config, embedding_key, dtype)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(layers_key, jnp.arange(config.num_hidden_layers))

        def stacked(keys: jax.Array, experts: bool) -> Layer:
            @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
            def stack(key: jax.Array) -> Layer:
                return Layer(config, key, dtype, experts=experts)

            return stack(keys)

        leading = config.first_k_dense_replace
        if leading:
            self.dense_layers = stacked(keys[:leading], experts=False)
        self.layers = stacked(keys[leading:], experts=config.num_experts > 0)
        if config.num_experts:
            loads = (config.num_expert_layers, config.num_experts)
            self.router_load = RouterLoad(jnp.zeros(loads, jnp.int32))
            if config.router_bias_update_rate:
                self.router_bias = RouterBias(jnp.zeros(loads, jnp.float32))
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
        """Activations after the final norm; the arguments are those of `hidden_and_router`.

        Returns:
          [B, L, D] in the compute type.
        """
        return self.hidden_and_router(
            input_ids,
            position_ids=position_ids,
            segment_ids=segment_ids,
            rng=rng,
            row=row,
            deterministic=deterministic,
        )[0]

    def hidden_and_router(
        self,
        input_ids: jax.Array,
        *,
        position_ids: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        rng: jax.Array | None = None,
        row: jax.Array | None = None,
        deterministic: bool = True,
    ) -> tuple[jax.Array, RouterFigures | None]:
        """Activations after the final norm, and what the routers did.

        Args:
          input_ids: tokens [B, L].
          position_ids: positions [B, L]; by default 0, 1, 2...
          segment_ids: document of each token [B, L], 0 for padding; by default a row is one document.
          rng: scalar typed key of the step, for dropout.
          row: global number of each row within the step [B]; a row's dropout depends on (rng, layer, row).
          deterministic: True switches dropout off, and leaves the loads of the experts uncounted.

        Returns:
          [B, L, D] in the compute type; sums over the layers of what their routers did, per row (None without experts).

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

        def dense(stack: Layer) -> tuple[Callable[..., jax.Array], dict]:
            graph, layers = nnx.split(stack)

            def body(x_BLD: jax.Array, layer: tuple[dict, jax.Array | None]) -> jax.Array:
                parameters, keys_2B = layer
                return nnx.merge(graph, parameters)(x_BLD, rope, segment_ids, keys_2B)[0]

            return remat(body, config.remat), nnx.to_pure_dict(layers)

        figures = None
        if not config.num_experts:
            body, parameters = dense(self.layers)
            x = scan_layers(body, x, parameters, keys)
        else:
            leading = config.first_k_dense_replace
            if leading:
                body, parameters = dense(self.dense_layers)
                data = None if keys is None else keys[:leading]
                x = jax.lax.scan(lambda x, layer: (body(x, layer), None), x, (parameters, data))[0]
            x, figures = self._experts(x, rope, segment_ids, None if keys is None else keys[leading:])
            if not deterministic:
                added = jax.lax.stop_gradient(figures.load).astype(jnp.int32).sum(0, dtype=jnp.int32)
                self.router_load[...] += added
        return constrain(self.final_norm(x), "batch", "residual_sequence", None), figures

    def _experts(
        self, x_BLD: jax.Array, rope: Any, segment_ids_BL: jax.Array | None, keys_N2B: jax.Array | None
    ) -> tuple[jax.Array, RouterFigures]:
        """The stack of layers with experts: what their routers do is summed up in the carry."""
        config = self.config
        graph, layers = nnx.split(self.layers)
        bias_NE = self.router_bias[...] if config.router_bias_update_rate else None

        def body(carry: tuple[jax.Array, RouterFigures], layer: tuple[dict, Any]) -> tuple[jax.Array, RouterFigures]:
            (x, figures), (parameters, (keys_2B, number, bias_E)) = carry, layer
            x, added = nnx.merge(graph, parameters)(x, rope, segment_ids_BL, keys_2B, bias_E)
            return x, figures.add(number, added)

        wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
        carry = x_BLD, RouterFigures.zeros(config, x_BLD.shape[0], wide)
        data = keys_N2B, jnp.arange(config.num_expert_layers), bias_NE
        return scan_layers(remat(body, config.remat), carry, nnx.to_pure_dict(layers), data)

    def end_step(self) -> dict[str, jax.Array]:
        """Ends an update, after all of its micro-batches: the bias moves, the loads begin anew.

        Returns:
          `expert_load_max`: load of the fullest expert of any layer in this step, 1.0 being an even share.
        """
        if not self.config.num_experts:
            return {}
        bias = self.router_bias if self.config.router_bias_update_rate else None
        moved, figures = balance_step(
            None if bias is None else bias[...], self.router_load[...], self.config.router_bias_update_rate
        )
        if bias is not None:
            bias[...] = moved
        self.router_load[...] = jnp.zeros_like(self.router_load[...])
        return figures

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

        Raises:
          ConfigError: in the step of a pipeline, whose stages have a part of the vocabulary each.
        """
        if manual_axes("vocab"):
            raise ConfigError(
                "the loss takes whole logits, and under mesh.pipeline a stage has a part of the vocabulary",
                "use model.hidden and model.head() with jtrain.ops.cross_entropy, or sharding.rules: {vocab: [tensor]}",
            )
        segments = None if attention_mask is None else attention_mask.astype(jnp.int32)
        x = self.hidden(input_ids, position_ids=position_ids, segment_ids=segments)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        head = pad_vocabulary(self.head(), 1)
        logits = jnp.einsum("bld,dv->blv", _whole_sequence(x), head, preferred_element_type=wide)
        return constrain(logits, "batch", "sequence", "vocab")[..., : self.config.vocab_size]
