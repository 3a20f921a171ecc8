"""A decoder-only transformer from small parts; its layers are stacked and run by one scan.

Legend: B rows, L tokens, D model, V vocabulary, N layers, E experts. The model knows nothing of the mesh: it names its
axes (`jtrain.ops.logical`) and whoever traces it says where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jtrain.errors import ConfigError
from jtrain.models.attention import kv_repeats
from jtrain.models.config import DecoderConfig
from jtrain.models.dropout import dropout, dropout_keys, embedding_noise
from jtrain.models.layer import Kinds, Layer, LayerKinds, whole_sequence
from jtrain.models.norm import Norm
from jtrain.models.parameters import normal
from jtrain.models.remat import remat
from jtrain.models.router import RouterBias, RouterFigures, RouterLoad, balance_step
from jtrain.ops.context import balanced_ways
from jtrain.ops.logical import constrain, gathered, manual_axes, mesh_axis_size
from jtrain.ops.stack import scan_layers
from jtrain.ops.vocabulary import embedding_lookup, pad_vocabulary
from jtrain.ops.zigzag import token_index

if TYPE_CHECKING:
    from jtrain.models.multimodal import Images


class Embedding(nnx.Module):
    """The token table [V, D]."""

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype: jnp.dtype):
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = normal(key, config.initializer_range, shape, ("vocab", "embed"), dtype)


class Positions(nnx.Module):
    """The table of learned positions [P, D]."""

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype: jnp.dtype):
        shape = (config.max_position_embeddings, config.hidden_size)
        self.embedding = normal(key, config.initializer_range, shape, _POSITION_AXES, dtype)

    def __call__(self, position_ids_BL: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """[B, L] -> [B, L, D]. Looked up in float32 at least: every row adds to the gradient of position 0."""
        table = self.embedding[...].astype(jnp.promote_types(dtype, jnp.float32))
        table = gathered(table, (None, None), _POSITION_AXES)
        return jnp.take(table, position_ids_BL, axis=0, mode="clip").astype(dtype)


_POSITION_AXES = ("positions", "embed")


class Head(nnx.Module):
    """The untied output kernel [D, V]."""

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype: jnp.dtype):
        shape = (config.hidden_size, config.vocab_size)
        self.kernel = normal(key, config.initializer_range, shape, ("embed", "vocab"), dtype)


class Score(nnx.Module):
    """The kernel of a sequence classifier's scores [D, labels]."""

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype: jnp.dtype):
        shape = (config.hidden_size, config.num_labels)
        self.kernel = normal(key, config.initializer_range, shape, ("embed", "labels"), dtype)
        self.kernel.set_metadata(trained=True)  # also beside adapters: it begins with nothing learned


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

    adapter_dropout: float = 0.0
    """Rate of the adapters that `jtrain.models.lora.add_lora` put beside the projections."""

    without_adapters = ("vision_tower/", "multi_modal_projector/")
    """Begin of the paths that get none: adapters belong to the language part."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, *, param_dtype: DTypeLike = "float32"):
        self.config = config
        dtype = jnp.dtype(param_dtype)
        embedding_key, head_key, layers_key = jax.random.split(rngs.params(), 3)
        self.embed_tokens = Embedding(config, embedding_key, dtype)
        if config.position_embedding == "learned":
            self.embed_positions = Positions(config, jax.random.fold_in(embedding_key, 1), dtype)
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
            if config.router_bias:
                self.router_bias = RouterBias(jnp.zeros(loads, jnp.float32))
        if config.images is not None:
            from jtrain.models.multimodal import image_modules  # made of parts of this module

            std, key = config.initializer_range, jax.random.fold_in(embedding_key, 2)
            modules = image_modules(config.images, config.hidden_size, key, std, dtype)
            self.vision_tower, self.multi_modal_projector = modules
        self.final_norm = Norm(config, dtype)
        if config.num_labels:
            self.score = Score(config, head_key, dtype)
        elif not config.tie_word_embeddings:
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
        images: Images | None = None,
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
            images=images,
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
        noise_alpha: float = 0.0,
        images: Images | None = None,
    ) -> tuple[jax.Array, RouterFigures | None]:
        """Activations after the final norm, and what the routers did.

        Args:
          input_ids: tokens [B, L].
          position_ids: positions [B, L]; by default 0, 1, 2...
          segment_ids: document of each token [B, L], 0 for padding; by default a row is one document.
          rng: scalar typed key of the step, for dropout.
          row: global number of each row within the step [B]; a row's dropout depends on (rng, layer, row).
          deterministic: True switches dropout off, and leaves the loads of the experts uncounted.
          noise_alpha: of the noise on the embeddings (`embedding_noise`); 0: none. Needs `rng` and `row`.
          images: of the rows, of a model with `config.images`; None: the rows have none.

        Returns:
          [B, L, D] in the compute type; sums over the layers of what their routers did, per row (None without experts).

        Raises:
          ValueError: dropout or noise is on, and `rng` or `row` is missing.
        """
        config = self.config
        noise = (rng, row) if noise_alpha else (None, None)
        if deterministic or not (config.dropout or self.adapter_dropout):
            rng = row = None
        elif rng is None or row is None:
            raise ValueError("dropout needs rng and row; pass deterministic=True to switch it off")
        if position_ids is None:
            position_ids = jnp.broadcast_to(token_index(input_ids.shape[1]), input_ids.shape)
        x = self.embed(input_ids, position_ids, images)
        if noise_alpha:
            if noise[0] is None or noise[1] is None:
                raise ValueError("noise on the embeddings needs rng and row; pass noise_alpha=0 to switch it off")
            x = embedding_noise(x, noise_alpha, noise[0], noise[1], segment_ids)
        keys = None
        if rng is not None and row is not None:
            embedding_keys, keys = dropout_keys(rng, config.num_hidden_layers, row)
            if config.dropout:
                x = dropout(x, config.dropout, embedding_keys)
        kinds = LayerKinds(config, position_ids, x.dtype)
        leading = config.first_k_dense_replace
        figures = None
        if not config.num_experts:
            x = scan_layers(*self._dense(self.layers, x, kinds, segment_ids), (keys, kinds.data))
        else:
            if leading:
                body, x, parameters = self._dense(self.dense_layers, x, kinds, segment_ids)
                data = jax.tree.map(lambda a: a[:leading], (keys, kinds.data))
                x = jax.lax.scan(lambda x, layer: (body(x, layer), None), x, (parameters, data))[0]
            x, figures = self._experts(x, kinds, segment_ids, None if keys is None else keys[leading:])
            if not deterministic:
                added = jax.lax.stop_gradient(figures.load).astype(jnp.int32).sum(0, dtype=jnp.int32)
                self.router_load[...] += added
        return self.finish(x), figures

    def embed(self, input_ids_BL: jax.Array, position_ids_BL: jax.Array, images: Images | None = None) -> jax.Array:
        """What the first layer reads [B, L, D], without dropout."""
        config = self.config
        x = constrain(embedding_lookup(self.embed_tokens.embedding[...], input_ids_BL), "batch", "sequence", None)
        if images is not None:
            from jtrain.models.multimodal import image_features, with_images

            features = image_features(self.vision_tower, self.multi_modal_projector, images.pixels)
            x = with_images(x, images.places, features)
        if config.embedding_multiplier != 1.0:
            x = x * jnp.asarray(config.embedding_multiplier, x.dtype)
        if config.position_embedding == "learned":
            x = x + constrain(self.embed_positions(position_ids_BL, x.dtype), "batch", "sequence", None)
        return constrain(x, "batch", "residual_sequence", None)

    def finish(self, x_BLD: jax.Array) -> jax.Array:
        """What the head reads, of the last layer's activations: normalised, and divided by `logits_scaling`."""
        x = self.final_norm(x_BLD)
        if self.config.logits_scaling != 1.0:
            x = x / jnp.asarray(self.config.logits_scaling, x.dtype)
        return constrain(x, "batch", "residual_sequence", None)

    def _dense(
        self, stack: Layer, x_BLD: jax.Array, kinds: LayerKinds, segment_ids_BL: jax.Array | None
    ) -> tuple[Callable[..., jax.Array], jax.Array, dict]:
        """Body, carry and parameters of a scan over layers without experts; its data are (dropout keys, kinds)."""
        graph, layers = nnx.split(stack)

        def body(x_BLD: jax.Array, layer: tuple[dict, tuple[jax.Array | None, Kinds]]) -> jax.Array:
            parameters, (keys_2B, kind) = layer
            module = nnx.merge(graph, parameters)
            return module(x_BLD, kinds.rope(kind), segment_ids_BL, keys_2B, window=kinds.window(kind))[0]

        return remat(body, self.config.remat), x_BLD, nnx.to_pure_dict(layers)

    def _experts(
        self, x_BLD: jax.Array, kinds: LayerKinds, segment_ids_BL: jax.Array | None, keys_N2B: jax.Array | None
    ) -> tuple[jax.Array, RouterFigures]:
        """The stack of layers with experts: what their routers do is summed up in the carry."""
        config = self.config
        graph, layers = nnx.split(self.layers)
        bias_NE = self.router_bias[...] if config.router_bias else None

        def body(carry: tuple[jax.Array, RouterFigures], layer: tuple[dict, Any]) -> tuple[jax.Array, RouterFigures]:
            (x, figures), (parameters, (keys_2B, number, bias_E, kind)) = carry, layer
            module = nnx.merge(graph, parameters)
            x, added = module(x, kinds.rope(kind), segment_ids_BL, keys_2B, bias_E, kinds.window(kind))
            return x, figures.add(number, added)

        wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
        carry = x_BLD, RouterFigures.zeros(config, x_BLD.shape[0], wide)
        of_experts = jax.tree.map(lambda a: a[config.first_k_dense_replace :], kinds.data)
        data = keys_N2B, jnp.arange(config.num_expert_layers), bias_NE, of_experts
        return scan_layers(remat(body, config.remat), carry, nnx.to_pure_dict(layers), data)

    def end_step(self) -> dict[str, jax.Array]:
        """Ends an update, after all of its micro-batches: the bias moves, the loads begin anew.

        Returns:
          `expert_load_max`: load of the fullest expert of any layer in this step, 1.0 being an even share.
        """
        if not self.config.num_experts:
            return {}
        bias = self.router_bias if self.config.router_bias else None
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
        images: Images | None = None,
    ) -> jax.Array:
        """Logits of the next token.

        Args:
          input_ids: tokens [B, L].
          attention_mask: 1 for tokens, 0 for padding [B, L]; by default all are tokens.
          position_ids: positions [B, L]; by default 0, 1, 2... in every row, whatever the mask.
          images: of the rows; None: there are none.

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
        hidden = self.hidden(input_ids, position_ids=position_ids, segment_ids=segments, images=images)
        return self.logits(hidden)

    def scores(self, x_BLD: jax.Array) -> jax.Array:
        """Scores of a sequence classifier at every token [B, L, labels], of what `hidden` returns; float32 at least."""
        wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
        kernel = gathered(self.score.kernel[...], (None, None), ("embed", None))
        scores = jnp.einsum("bld,dn->bln", whole_sequence(x_BLD), kernel, preferred_element_type=wide)
        return constrain(scores, "batch", "sequence", None)

    def logits(self, x_BLD: jax.Array) -> jax.Array:
        """Logits of the next token [B, L, V], of what `hidden` returns; float32 at least."""
        if self.config.num_labels:
            return self.scores(x_BLD)
        wide = jnp.promote_types(x_BLD.dtype, jnp.float32)
        head = pad_vocabulary(self.head(), 1)
        logits = jnp.einsum("bld,dv->blv", whole_sequence(x_BLD), head, preferred_element_type=wide)
        if self.config.final_logit_softcapping is not None:
            cap = self.config.final_logit_softcapping
            logits = jnp.tanh(logits / cap) * cap
        return constrain(logits, "batch", "sequence", "vocab")[..., : self.config.vocab_size]
