"""Generation in one program: prompts are read by the training forward, then tokens follow one by one from a cache.

Legend: B rows, L slots of the longest prompt, M new tokens at most, S slots of a cache, N layers, K key-value heads,
C channels, V vocabulary.

Prompts stand at the right of their slots: row b begins at slot `start[b]`, and every row writes its next token into the
same slot. Positions count from `start`. A row is thus computed as if it were alone.

**Cache.** A tuple of arrays a layer, [B, K, S, C]: keys and values, or with latent attention one array of the latent
and the key that turns (K = 1). Layers that see a window keep a ring of as many slots; the others keep all. While the
layers run it is only read; what they have to add is written behind the last of them, one slot, in place.

**Layers** are run by a scan over their stack; or, where the parameters of every layer are given as arrays of their own
(`views`), one by one: XLA's CPU backend copies a layer's parameters out of the stack before it multiplies with them,
and in decoding that is most of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jtrain.models.config import DecoderConfig
from jtrain.models.decoder import Decoder
from jtrain.models.layer import Layer, LayerKinds
from jtrain.models.multimodal import Images, image_places
from jtrain.ops.cached_attention import cached_attention
from jtrain.ops.logical import constrain
from jtrain.ops.sampling import Sampling, choose, draw_keys

Entry = tuple[jax.Array, ...]
"""What one token adds to the cache of one layer: arrays [B, K, C]."""


class Request(NamedTuple):
    """What a batch of prompts asks for.

    Attributes:
      start: int32 [B], first slot of each row's prompt.
      row: int32 [B], global number of each row, for its draws.
      key: scalar typed key.
      how: how a token is chosen.
      stop: int32 [E], tokens that end a row; -1 is none.
      limit: int32 scalar, new tokens at most; M or less.
      length: int32 [B], tokens of each row with all new ones that it may get: rotary factors may depend on it.
    """

    start: jax.Array
    row: jax.Array
    key: jax.Array
    how: Sampling
    stop: jax.Array
    limit: jax.Array
    length: jax.Array


class State(NamedTuple):
    """Between two tokens.

    Attributes:
      count: int32 scalar, tokens that every row has been given (ended rows: -1).
      ids: int32 [B, M].
      logprobs: [B, M], float32 or wider; see `jtrain.ops.sampling.choose`.
      ended: bool [B].
      seen: bool [B, V], tokens that stand in the row; None without a penalty.
      cache: see above; a list over the stacks of layers.
    """

    count: jax.Array
    ids: jax.Array
    logprobs: jax.Array
    ended: jax.Array
    seen: jax.Array | None
    cache: Any


def generate(
    model: Decoder,
    ids_BL: jax.Array,
    ended_B: jax.Array,
    request: Request,
    *,
    new_tokens: int,
    views: Any = None,
    pixels: jax.Array | None = None,
) -> State:
    """Reads the prompts and draws tokens until all rows have ended, or `request.limit`.

    Args:
      model: the decoder.
      ids_BL: prompts, at the right.
      ended_B: rows that are no prompts.
      request: what is asked for.
      new_tokens: M.
      views: parameters of every layer, see `_Stack`; None scans over them.
      pixels: images of the prompts [B, I, height, width, channels], in the order of their tokens; None: there are none.
    """
    prompt = ids_BL.shape[1]
    run = _Run(model, request, prompt, new_tokens, views)
    logits, cache = run.read(ids_BL, pixels)
    rows = ids_BL.shape[0]
    seen = None
    if request.how.repetition_penalty is not None:
        # Padding is one column more than there are tokens.
        live = jnp.arange(prompt) >= request.start[:, None]
        ids = jnp.where(live, ids_BL, model.config.vocab_size)
        seen = jnp.zeros((rows, model.config.vocab_size), bool)
        seen = seen.at[jnp.arange(rows)[:, None], ids].set(True, mode="drop")
    state = State(
        count=jnp.int32(0),
        ids=jnp.full((rows, new_tokens), -1, jnp.int32),
        logprobs=jnp.zeros((rows, new_tokens), logits.dtype),
        ended=ended_B,
        seen=seen,
        cache=cache,
    )
    return run.until_limit(run.draw(state, logits))


def resume(
    model: Decoder,
    state: State,
    request: Request,
    *,
    prompt: int,
    views: Any = None,
) -> State:
    """Draws further tokens, up to a higher `request.limit`; `state.ended` may name rows that are to end.

    Args:
      model: as for `generate`.
      state: what it returned.
      request: the same but for its limit.
      prompt: L.
      views: as for `generate`.
    """
    return _Run(model, request, prompt, state.ids.shape[1], views).until_limit(state)


class _Run:
    """One trace of a generation."""

    def __init__(self, model: Decoder, request: Request, prompt: int, new_tokens: int, views: Any):
        config = model.config
        self.model, self.request, self.prompt = model, request, prompt
        self.slots = prompt + new_tokens
        leading = config.first_k_dense_replace if config.num_experts else 0
        bias = model.router_bias[...] if config.num_experts and config.router_bias else None
        of_experts = config.num_experts > 0
        if of_experts and config.expert_capacity_factor:
            # One token has always a place, so a whole row must find it as well.
            model.layers.mlp.config = config.replace(expert_capacity_factor=0.0)
        views = views or {}
        self.stacks = []
        if leading:
            self.stacks.append(_Stack(config, model.dense_layers, 0, self.slots, views.get("dense_layers"), None))
        self.stacks.append(_Stack(config, model.layers, leading, self.slots, views.get("layers"), bias))

    def read(self, ids_BL: jax.Array, pixels: jax.Array | None) -> tuple[jax.Array, Any]:
        """Logits behind the prompts [B, V], and the cache."""
        slot = jnp.arange(self.prompt)
        live = (slot >= self.request.start[:, None]).astype(jnp.int32)
        positions = jnp.maximum(slot - self.request.start[:, None], 0)
        images = None
        if pixels is not None:
            assert self.model.config.images is not None
            token = self.model.config.images.image_token_index
            images = Images(pixels, image_places(jnp.where(live > 0, ids_BL, -1), token))
        x = self.model.embed(ids_BL, positions, images)
        kinds = LayerKinds(self.model.config, positions, x.dtype, length=self.request.length)
        cache = []
        for stack in self.stacks:
            x, written = stack.read(x, kinds, live)
            cache.append(written)
        return self.logits(x[:, -1:]), cache

    def logits(self, x_B1D: jax.Array) -> jax.Array:
        return self.model.logits(self.model.finish(x_B1D))[:, 0]

    def draw(self, state: State, logits_BV: jax.Array) -> State:
        """The next token of every row that has not ended."""
        request, count = self.request, state.count
        position = self.prompt - request.start + count
        keys = draw_keys(request.key, request.row, position)
        token, logprob = choose(logits_BV, request.how, keys, state.seen)
        token = jnp.where(state.ended, -1, token)
        logprob = jnp.where(state.ended, 0, logprob)
        seen = state.seen
        if seen is not None:
            at = jnp.where(token < 0, seen.shape[1], token)
            seen = seen.at[jnp.arange(seen.shape[0]), at].set(True, mode="drop")
        stopped = (token[:, None] == request.stop[None, :]).any(1)
        return State(
            count=count + 1,
            ids=jax.lax.dynamic_update_slice(state.ids, token[:, None], (0, count)),
            logprobs=jax.lax.dynamic_update_slice(state.logprobs, logprob[:, None], (0, count)),
            ended=state.ended | stopped,
            seen=seen,
            cache=state.cache,
        )

    def step(self, state: State) -> State:
        """Feeds the last token of every row and draws the next."""
        slot = self.prompt + state.count - 1
        last = jax.lax.dynamic_slice_in_dim(state.ids, state.count - 1, 1, axis=1)
        positions = slot - self.request.start[:, None]
        x = self.model.embed(jnp.maximum(last, 0), positions)
        kinds = LayerKinds(self.model.config, positions, x.dtype, length=self.request.length)
        live = (~state.ended).astype(jnp.int32)[:, None]  # ended rows keep no expert busy
        entries = []
        for stack, cache in zip(self.stacks, state.cache, strict=True):
            x, new = stack.step(x, kinds, live, cache, slot, self.request.start)
            entries.append(new)
        # What is written hangs on the last layer's result: every layer has read its cache by then.
        x, entries = jax.lax.optimization_barrier((x, entries))
        written = [
            stack.write(cache, new, slot) for stack, cache, new in zip(self.stacks, state.cache, entries, strict=True)
        ]
        return self.draw(state._replace(cache=written), self.logits(x))

    def until_limit(self, state: State) -> State:
        def goes_on(state: State) -> jax.Array:
            return (state.count < self.request.limit) & ~state.ended.all()

        return jax.lax.while_loop(goes_on, self.step, state)


class _Stack:
    """Layers of one stack, and their cache: a list over the windows that occur, of arrays [n, B, K, S, C].

    With `views` it is a list over the layers, of arrays [B, K, S, C].

    Args:
      config: the decoder.
      layers: the stacked layers.
      first: number of the first one.
      slots: S of a layer that sees everything.
      views: a list over the layers of their parameters, nested dicts; None scans over the stack.
      bias_NE: of the routers.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layers: Layer,
        first: int,
        slots: int,
        views: Sequence[Any] | None,
        bias_NE: jax.Array | None,
    ):
        self.config = config
        self.graph, state = nnx.split(layers)
        self.parameters = nnx.to_pure_dict(state)
        count = jax.tree.leaves(self.parameters)[0].shape[0]
        self.first, self.count, self.views, self.bias_NE = first, count, views, bias_NE
        windows = config.windows[first : first + count]
        self.windows = tuple(dict.fromkeys(windows))
        self.kind = [self.windows.index(window) for window in windows]
        self.place = [self.kind[:layer].count(kind) for layer, kind in enumerate(self.kind)]
        self.sizes = [slots if window is None else min(window, slots) for window in self.windows]

    def read(self, x_BLD: jax.Array, kinds: LayerKinds, live_BL: jax.Array) -> tuple[jax.Array, Any]:
        """The layers over whole prompts, and the cache that they leave."""

        def body(x: jax.Array, layer: tuple[Any, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            parameters, kind, bias_E = layer
            module, entry = nnx.merge(self.graph, parameters), None

            def attend(h: jax.Array) -> jax.Array:
                nonlocal entry
                y, entry = module.attention.with_entry(h, kinds.rope(kind), live_BL, kinds.window(kind))
                return y

            x, _ = module.block(x, attend, live_BL, bias_E=bias_E)
            assert entry is not None
            return x, entry

        x, entries = jax.lax.scan(body, x_BLD, (self.parameters, self._data(kinds), self.bias_NE))
        entries = tuple(jnp.swapaxes(entry, 2, 3) for entry in entries)  # [n, B, K, L, C]
        cache: list[Any] = []
        for number, size in enumerate(self.sizes):
            layers = [layer for layer in range(self.count) if self.kind[layer] == number]
            chosen = entries if len(layers) == self.count else tuple(entry[jnp.asarray(layers)] for entry in entries)
            cache.append(tuple(_placed(entry, size) for entry in chosen))
        if self.views is None:
            return x, cache
        return x, [
            tuple(part[place] for part in cache[kind]) for kind, place in zip(self.kind, self.place, strict=True)
        ]

    def step(
        self, x_B1D: jax.Array, kinds: LayerKinds, live_B1: jax.Array, cache: Any, slot: jax.Array, start_B: jax.Array
    ) -> tuple[jax.Array, Any]:
        """The layers over one token a row, and what each adds to its cache [n, B, K, C] (with views a list)."""
        seen = [_seen(size, window, slot, start_B) for size, window in zip(self.sizes, self.windows, strict=True)]

        def run(x: jax.Array, parameters: Any, kind: Any, bias_E: Any, attend: Any) -> tuple[jax.Array, Entry]:
            module, entry = nnx.merge(self.graph, parameters), None

            def attention(h: jax.Array) -> jax.Array:
                nonlocal entry
                y, entry = module.attention.step(h, kinds.rope(kind), attend)
                return y

            x, _ = module.block(x, attention, live_B1, bias_E=bias_E)
            assert entry is not None
            return x, entry

        data = self._data(kinds)
        if self.views is not None:
            entries = []
            for layer, parameters in enumerate(self.views):
                kind, bias_E = jax.tree.map(lambda a, at=layer: a[at], (data, self.bias_NE))
                attend = _over(cache[layer], seen[self.kind[layer]])
                x_B1D, entry = run(x_B1D, parameters, kind, bias_E, attend)
                entries.append(entry)
            return x_B1D, entries

        if len(self.windows) == 1:

            def body(x: jax.Array, layer: tuple[Any, ...]) -> tuple[jax.Array, Entry]:
                parameters, kind, bias_E, arrays = layer
                return run(x, parameters, kind, bias_E, _over(arrays, seen[0]))

            return jax.lax.scan(body, x_B1D, (self.parameters, data, self.bias_NE, cache[0]))

        def mixed(x: jax.Array, layer: tuple[Any, ...]) -> tuple[jax.Array, Entry]:
            parameters, kind, bias_E, number, place = layer

            def attend(*heads: Any, **scores: Any) -> jax.Array:
                def of(arrays: Any, seen_BS: jax.Array) -> Callable[[], jax.Array]:
                    return lambda: _over(tuple(part[place] for part in arrays), seen_BS)(*heads, **scores)

                return jax.lax.switch(number, [of(*given) for given in zip(cache, seen, strict=True)])

            return run(x, parameters, kind, bias_E, attend)

        where = jnp.asarray(self.kind, jnp.int32), jnp.asarray(self.place, jnp.int32)
        return jax.lax.scan(mixed, x_B1D, (self.parameters, data, self.bias_NE, *where))

    def write(self, cache: Any, entries: Any, slot: jax.Array) -> Any:
        """The cache with one slot more."""
        if self.views is not None:
            return [
                tuple(_written(part, new, slot, 2) for part, new in zip(arrays, entry, strict=True))
                for arrays, entry in zip(cache, entries, strict=True)
            ]
        written = []
        for number, arrays in enumerate(cache):
            layers = [layer for layer in range(self.count) if self.kind[layer] == number]
            chosen = entries if len(layers) == self.count else tuple(entry[jnp.asarray(layers)] for entry in entries)
            written.append(tuple(_written(part, new, slot, 3) for part, new in zip(arrays, chosen, strict=True)))
        return written

    def _data(self, kinds: LayerKinds) -> Any:
        return jax.tree.map(lambda a: a[self.first : self.first + self.count], kinds.data)


def _over(arrays: Entry, seen_BS: jax.Array) -> Callable[..., jax.Array]:
    """`attend(q, k, v)` of one layer; see `cached_attention`. With a latent, keys are values as well."""

    def attend(q_BHC: jax.Array, k_BKC: jax.Array, v_BKC: jax.Array, **scores: Any) -> jax.Array:
        return cached_attention(q_BHC, k_BKC, v_BKC, arrays[0], arrays[-1], seen_BS, **scores)

    return attend


def _placed(entry: jax.Array, size: int) -> jax.Array:
    """Keys or values of prompts [n, B, K, L, C] in a ring of `size` slots: that of token i is slot i modulo size."""
    length = entry.shape[3]
    if length <= size:
        entry = jnp.pad(entry, ((0, 0), (0, 0), (0, 0), (0, size - length), (0, 0)))
    else:
        entry = jnp.roll(entry[:, :, :, length - size :], (length - size) % size, axis=3)
    return constrain(entry, None, "batch", "kv_heads", None, None)


def _seen(size: int, window: int | None, slot: jax.Array, start_B: jax.Array) -> jax.Array:
    """Which places of a ring the token at `slot` sees [B, size]; its own is not written yet."""
    held = slot - 1 - (slot - 1 - jnp.arange(size)) % size  # the token that stands there; below 0: none
    seen = held >= start_B[:, None]
    return seen if window is None else seen & (slot - held < window)


def _written(cache: jax.Array, new: jax.Array, slot: jax.Array, axis: int) -> jax.Array:
    new = jnp.expand_dims(new, axis).astype(cache.dtype)
    return jax.lax.dynamic_update_slice_in_dim(cache, new, slot % cache.shape[axis], axis)
