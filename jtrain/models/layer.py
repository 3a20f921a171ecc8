"""One layer of a decoder: attention and feed-forward, their norms and residuals, and what differs by depth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jtrain.models.attention import Attention
from jtrain.models.config import DecoderConfig
from jtrain.models.dropout import dropout
from jtrain.models.feed_forward import FeedForward
from jtrain.models.mla import LatentAttention
from jtrain.models.moe import MixtureOfExperts
from jtrain.models.norm import Norm
from jtrain.models.projection import adapter_keys
from jtrain.models.rope import Rope, rope_tables
from jtrain.models.router import RouterFigures
from jtrain.ops.attention import WindowChoice
from jtrain.ops.logical import constrain


class Layer(nnx.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), with dropout on both branches.

    `norm_position` moves the norms, `parallel_residual` gives both branches the same x.

    Args:
      config: the decoder.
      key: of the parameters.
      dtype: their type.
      experts: whether the feed-forward is a mixture of experts.
    """

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype: jnp.dtype, *, experts: bool = False):
        # All keys by one split: hashing is what an initial draw takes longest to compile.
        keys = jax.random.split(key, 11 if experts else 7)
        self.config = config
        if config.norm_position != "post":
            self.attention_norm = Norm(config, dtype)
            self.mlp_norm = Norm(config, dtype)
        if config.norm_position != "pre":
            self.post_attention_norm = Norm(config, dtype)
            self.post_mlp_norm = Norm(config, dtype)
        self.attention = (LatentAttention if config.latent else Attention)(config, keys[:4], dtype)
        self.mlp = (MixtureOfExperts if experts else FeedForward)(config, keys[4:], dtype)

    def __call__(
        self,
        x_BLD: jax.Array,
        rope: Rope | None,
        segment_ids_BL: jax.Array | None,
        keys_2B: jax.Array | None,
        bias_E: jax.Array | None = None,
        window: int | WindowChoice | None = None,
    ) -> tuple[jax.Array, RouterFigures | None]:
        """Activations after the layer, and what its router did (None without experts).

        Args:
          x_BLD: activations.
          rope: rotary tables of this layer; None: nothing turns.
          segment_ids_BL: document of each token, 0 for padding.
          keys_2B: keys of the dropout of both branches and of the adapters; None: none.
          bias_E: the router's bias on its choice.
          window: tokens that are seen; None: all before.
        """

        def attend(h_BLD: jax.Array) -> jax.Array:
            return self.attention(h_BLD, rope, segment_ids_BL, window)

        with adapter_keys(None if keys_2B is None else keys_2B[0]):
            return self.block(x_BLD, attend, segment_ids_BL, keys_2B, bias_E)

    def block(
        self,
        x_BLD: jax.Array,
        attend: Callable[[jax.Array], jax.Array],
        segment_ids_BL: jax.Array | None = None,
        keys_2B: jax.Array | None = None,
        bias_E: jax.Array | None = None,
    ) -> tuple[jax.Array, RouterFigures | None]:
        """The layer around any attention, `attend`: [B, L, D] -> [B, L, D] (decoding brings one that has a cache)."""
        config = self.config

        def before(name: str, x: jax.Array) -> jax.Array:
            return x if config.norm_position == "post" else getattr(self, name)(x)

        def branch(y: jax.Array, name: str, place: int) -> jax.Array:
            y = constrain(y, "batch", "residual_sequence", None)
            if config.norm_position != "pre":
                y = getattr(self, name)(y)
            if config.residual_multiplier != 1.0:
                # Rounded once: 0.22 as bfloat16 would be 0.1 % too small.
                wide = jnp.promote_types(y.dtype, jnp.float32)
                y = (y.astype(wide) * config.residual_multiplier).astype(y.dtype)
            return y if keys_2B is None or not config.dropout else dropout(y, config.dropout, keys_2B[place])

        h = whole_sequence(before("attention_norm", x_BLD))
        attended = branch(attend(h), "post_attention_norm", 0)
        reads = x_BLD if config.parallel_residual else x_BLD + attended
        figures = None
        h = before("mlp_norm", reads)
        if isinstance(self.mlp, MixtureOfExperts):  # it gathers what it needs by itself
            y, figures = self.mlp(constrain(h, "batch", "residual_sequence", None), segment_ids_BL, bias_E)
        else:
            y = self.mlp(whole_sequence(h))
        x_BLD = (x_BLD + attended if config.parallel_residual else reads) + branch(y, "post_mlp_norm", 1)
        return constrain(x_BLD, "batch", "residual_sequence", None), figures


def whole_sequence(x_BLD: jax.Array) -> jax.Array:
    """Gathers what `tensor` cut between blocks; pinned before, so that the norm's own type does not travel."""
    x_BLD = constrain(x_BLD, "batch", "residual_sequence", None)
    return constrain(x_BLD, "batch", "sequence", None)


class Kinds(NamedTuple):
    """What differs by depth, as data of a scan over layers: numbers [N] into `LayerKinds`; None: all are equal."""

    window: Any
    rope: Any


class LayerKinds:
    """Windows and rotary tables of all layers; every kind exists once.

    Args:
      config: the decoder.
      position_ids_BL: position of each token.
      dtype: the compute type.
      length: tokens of each row [B], where these are not all of them.
    """

    def __init__(
        self,
        config: DecoderConfig,
        position_ids_BL: jax.Array,
        dtype: jnp.dtype,
        *,
        length: jax.Array | None = None,
    ):
        self.windows, windows = _distinct(config.windows)
        ropes, places = _distinct(config.rope_kinds)
        tables = []
        for kind in ropes if ropes != ("none",) else ():
            table = rope_tables(config, position_ids_BL, dtype, kind=kind, length=length)
            tables.append(Rope(*(constrain(part, "batch", "sequence", None) for part in table)))
        self._tables = tables
        self.data = Kinds(windows, places)
        """Of all layers, to be sliced like their parameters."""

    def window(self, kinds: Kinds) -> int | WindowChoice | None:
        """The window of the layer whose data this is."""
        return self.windows[0] if kinds.window is None else WindowChoice(self.windows, kinds.window)

    def rope(self, kinds: Kinds) -> Rope | None:
        """The rotary tables of the layer whose data this is."""
        if not self._tables:
            return None
        if kinds.rope is None:
            return self._tables[0]
        chosen = self._tables[0]
        for number, table in enumerate(self._tables[1:], start=1):
            chosen = jax.tree.map(lambda a, b, n=number: jnp.where(kinds.rope == n, b, a), chosen, table)
        return chosen


def _distinct(values: tuple[Any, ...]) -> tuple[tuple[Any, ...], jax.Array | None]:
    """The kinds in the order in which they come, and every layer's number; None where there is one kind."""
    kinds = tuple(dict.fromkeys(values))
    return kinds, None if len(kinds) == 1 else jnp.asarray([kinds.index(value) for value in values], jnp.int32)
