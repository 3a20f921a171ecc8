"""Ring attention: queries stay, keys and values go round (Liu, Zaharia, Abbeel 2023, arXiv:2310.01889).

Legend: B rows, L tokens, N tokens of one device, H query heads, K key-value heads, G = H / K, Dh size of queries and
keys, Dv size of values, S slots (chunks that a device holds: 2 in zig-zag order, 1 in natural order), T blocks of a
device, C tokens of a block.

Softmax is computed online, block by block: float32 accumulators with the running maximum and sum (Milakov and
Gimelshein 2018), so no scores of more than [B, H, C, C] exist. The backward pass goes round a second time with the
saved logarithm of the sum (Dao 2023): kept are q, k, v, the result and [B, L, H] numbers, whatever the ring's size.
A sink is a key without a value that all queries have seen before the first block: that is all it takes.

In zig-zag order (`jtrain.ops.zigzag`) a device with chunks i and 2c-1-i meets, in every hop, exactly two pairs of
chunks that see each other, and they do so wholly: its late chunk sees the other's early one, and either both chunks
see the other's early chunk (which comes from before) or the late one sees both (from behind). The other pairs are
never computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jtrain.ops.context import RESULT, Places, attention_places
from jtrain.ops.window import Window, WindowChoice, window_size
from jtrain.ops.zigzag import zigzag_ways

BLOCK = 512
"""Queries and keys of a block, at most."""


def ring_attention(
    q_BLHDh: jax.Array,
    k_BLKDh: jax.Array,
    v_BLKDv: jax.Array,
    *,
    segment_ids: jax.Array | None,
    causal: bool,
    window: Window,
    scale: float,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    block: int = BLOCK,
) -> jax.Array:
    """See `jtrain.ops.attention.attention`; tokens are cut over the mesh axes of `sequence`.

    Masks go by the index of a token in its row (`zigzag_order` says where it stands), never by its position id: packed
    documents begin anew.

    Args:
      q_BLHDh: queries.
      k_BLKDh: keys.
      v_BLKDv: values.
      segment_ids: document of each token [B, L].
      causal: whether a token sees only itself and what comes before.
      window: how many tokens it sees, itself included. In natural order keys go as far round as it reaches; of a
        choice, as far as the largest.
      scale: factor on the scores.
      softcap: bound of the scores.
      sinks: logits [H] without a value.
      block: tokens of a block, at most.

    Raises:
      ValueError: rows stand in the zig-zag order of another number of devices.
    """
    places = attention_places(q_BLHDh.shape, k_BLKDh.shape)
    zigzag = zigzag_ways() > 1
    if zigzag and zigzag_ways() != places.ways:
        raise ValueError(f"rows in the zig-zag order of {zigzag_ways()} devices on a ring of {places.ways}")
    slots = 2 if zigzag else 1
    chunk = q_BLHDh.shape[1] // (places.ways * slots)
    hops = places.ways - 1
    sizes = window.sizes if isinstance(window, WindowChoice) else (window,)
    far = max(q_BLHDh.shape[1] if size is None else size for size in sizes)
    if causal and not zigzag:
        hops = min(hops, -(-(far - 1) // chunk))  # what lies further back is out of sight
    blocks = -(-chunk // block)
    ring = _Ring(places, slots, chunk, blocks, -(-chunk // blocks), hops, causal, scale, softcap)
    size = window_size(window, q_BLHDh.shape[1])
    given = _Given(segment_ids, sinks, None if size is None else jnp.asarray(size, jnp.int32))
    return _attention(ring, q_BLHDh, k_BLKDh, v_BLKDv, given)


class _Ring(NamedTuple):
    places: Places
    slots: int
    chunk: int
    """Tokens of a chunk."""
    blocks: int
    """Blocks of a chunk; the last one is filled up with tokens that nobody sees."""
    block: int
    """Tokens of a block."""
    hops: int
    causal: bool
    scale: float
    softcap: float | None

    def places_of_given(self) -> _Given:
        return _Given(self.places.rows, PartitionSpec(self.places.q[2]), PartitionSpec())


class _Given(NamedTuple):
    """What attention may have beside q, k and v; None where it has not."""

    segments: Any
    """[B, L]."""
    sinks: Any
    """[H]."""
    window: Any
    """A number of tokens."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(ring: _Ring, q: jax.Array, k: jax.Array, v: jax.Array, given: _Given) -> jax.Array:
    return _forward(ring, q, k, v, given)[0]


def _forward(ring: _Ring, q: jax.Array, k: jax.Array, v: jax.Array, given: _Given) -> Any:
    region, _, _, _, of_q, of_kv = ring.places
    of_lse = PartitionSpec(*of_q[:3])
    mapped = region.shard_map(
        partial(_forward_local, ring),
        in_specs=(of_q, of_kv, of_kv, ring.places_of_given()),
        out_specs=(of_q, of_lse),
    )
    out, lse = (checkpoint_name(x, RESULT) for x in mapped(q, k, v, given))
    return out, (q, k, v, given, out, lse)


def _backward(ring: _Ring, residuals: Any, d_out: jax.Array) -> Any:
    q, k, v, given, out, lse = residuals
    region, _, _, _, of_q, of_kv = ring.places
    of_lse = PartitionSpec(*of_q[:3])
    delta = jnp.sum(out.astype(lse.dtype) * d_out.astype(lse.dtype), axis=-1)
    mapped = region.shard_map(
        partial(_backward_local, ring),
        in_specs=(of_q, of_kv, of_kv, of_lse, of_lse, of_q, ring.places_of_given()),
        out_specs=(of_q, of_kv, of_kv),
    )
    d_q, d_k, d_v = mapped(q, k, v, delta, lse, d_out, given)
    d_sinks = None
    if given.sinks is not None:  # the weight of a sink, whose value is zero: only the other weights feel it
        weights = jnp.exp(given.sinks.astype(lse.dtype) - lse)
        d_sinks = -jnp.sum(weights * delta, axis=(0, 1)).astype(given.sinks.dtype)
    return d_q, d_k, d_v, _Given(None, d_sinks, None)


_attention.defvjp(_forward, _backward)


# -- on one device ----------------------------------------------------------------------------------------------------


def _forward_local(ring: _Ring, q: jax.Array, k: jax.Array, v: jax.Array, given: _Given) -> Any:
    """[B, N, ...] of this device -> its result [B, N, H, Dv] and log of the softmax's sum [B, N, H]."""
    q, device, given = _tied(ring, q, given)
    b, n, heads, size = q.shape
    kv_heads = k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q_blocks = _blocks(ring, q.reshape(b, n, kv_heads, -1, size))
    own = None if given.segments is None else _blocks(ring, given.segments)
    shape = (ring.slots * ring.blocks, b, kv_heads, heads // kv_heads, ring.block)
    lowest = jnp.finfo(wide).min / 2  # finite: a query that has seen nothing yet must not become NaN
    top, total = jnp.full(shape, lowest, wide), jnp.zeros(shape, wide)
    if given.sinks is not None:
        sinks = given.sinks.astype(wide).reshape(kv_heads, -1)
        top, total = jnp.broadcast_to(sinks[None, None, :, :, None], shape), jnp.ones(shape, wide)
    state = (jnp.zeros((*shape, v.shape[-1]), wide), top, total)

    def visit(state: Any, ahead: Any, hop: Any) -> Any:
        keys, values, theirs = ahead

        def update(state: Any, at: _Pair) -> Any:
            key, value = keys[at.k], values[at.k]
            scores, _ = _scores(ring, q_blocks[at.q], key, at, own, theirs, given.window, wide, lowest)
            out, top, total = (x[at.q] for x in state)
            new_top = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - new_top[..., None])
            kept = jnp.exp(top - new_top)
            seen = jnp.einsum("bkgqs,bskd->bkgqd", weights.astype(q.dtype), value, preferred_element_type=wide)
            new = (out * kept[..., None] + seen, new_top, total * kept + weights.sum(-1))
            return tuple(x.at[at.q].set(y) for x, y in zip(state, new, strict=True))

        return _over_pairs(ring, device, hop, given.window, update, state)

    ahead = (_blocks(ring, k.astype(q.dtype)), _blocks(ring, v.astype(q.dtype)), own)
    out, top, total = _around(ring, ahead, state, visit)
    out = _tokens(ring, jnp.moveaxis(out / total[..., None], 4, 2)).reshape(b, n, heads, -1).astype(q.dtype)
    lse = _tokens(ring, jnp.moveaxis(top + jnp.log(total), 4, 2)).reshape(b, n, heads)
    return out, lse


def _backward_local(
    ring: _Ring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    delta: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    given: _Given,
) -> Any:
    """The gradients of q, k and v of this device. Those of the keys and values follow them round, and come home."""
    q, device, given = _tied(ring, q, given)
    b, n, heads, size = q.shape
    kv_heads = k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    grouped = (b, n, kv_heads, heads // kv_heads)
    q_blocks = _blocks(ring, q.reshape(*grouped, size))
    d_blocks = _blocks(ring, d_out.astype(q.dtype).reshape(*grouped, -1))
    delta_blocks, lse_blocks = (jnp.moveaxis(_blocks(ring, x.reshape(grouped)), 2, 4) for x in (delta, lse))
    own = None if given.segments is None else _blocks(ring, given.segments)
    lowest = jnp.finfo(wide).min / 2
    ahead = (_blocks(ring, k.astype(q.dtype)), _blocks(ring, v.astype(q.dtype)), own)
    nothing = tuple(jnp.zeros(x.shape, wide) for x in ahead[:2])

    def visit(state: Any, ahead: Any, hop: Any) -> Any:
        d_q, behind = state
        keys, values, theirs = ahead
        if behind is not None:  # what others have added to the gradients of these keys: it arrives meanwhile
            behind = _pass_on(ring, behind)

        def update(state: Any, at: _Pair) -> Any:
            d_q, d_k, d_v = state
            query, key, value, d = q_blocks[at.q], keys[at.k], values[at.k], d_blocks[at.q]
            scores, slope = _scores(ring, query, key, at, own, theirs, given.window, wide, lowest)
            weights = jnp.exp(scores - lse_blocks[at.q][..., None])
            d_weights = jnp.einsum("bqkgd,bskd->bkgqs", d, value, preferred_element_type=wide)
            d_scores = weights * (d_weights - delta_blocks[at.q][..., None]) * ring.scale
            d_scores = (d_scores if slope is None else d_scores * slope).astype(q.dtype)
            weights = weights.astype(q.dtype)
            more_q = jnp.einsum("bkgqs,bskd->bqkgd", d_scores, key, preferred_element_type=wide)
            more_k = jnp.einsum("bkgqs,bqkgd->bskd", d_scores, query, preferred_element_type=wide)
            more_v = jnp.einsum("bkgqs,bqkgd->bskd", weights, d, preferred_element_type=wide)
            return d_q.at[at.q].add(more_q), d_k.at[at.k].add(more_k), d_v.at[at.k].add(more_v)

        d_q, *added = _over_pairs(ring, device, hop, given.window, update, (d_q, *nothing))
        return d_q, tuple(added) if behind is None else tuple(x + y for x, y in zip(behind, added, strict=True))

    state: Any = (jnp.zeros(q_blocks.shape, wide), None)
    d_q, d_kv = _around(ring, ahead, state, visit)
    d_kv = _pass_on(ring, d_kv, -ring.hops)
    d_q = _tokens(ring, d_q).reshape(q.shape).astype(q.dtype)
    return d_q, *(_tokens(ring, x).astype(like.dtype) for x, like in zip(d_kv, (k, v), strict=True))


def _tied(ring: _Ring, q: jax.Array, given: _Given) -> tuple[jax.Array, jax.Array, _Given]:
    """Queries, this device's number and what else is given, such that the masks depend on the queries, too.

    Masks are the same in every layer, and a scan over layers that is differentiated takes what is the same out of the
    loop: the masks of all pairs of blocks at once, [N, N] booleans a head.
    """
    return jax.lax.optimization_barrier((q, jax.lax.axis_index(ring.places.axes), given))


def _around(ring: _Ring, ahead: Any, state: Any, visit: Callable[[Any, Any, Any], Any]) -> Any:
    """Visits the own keys and values, then those of the devices before: `visit(state, ahead, hop) -> state`.

    What comes next is on its way while a visit computes; the last visit sends nothing on.
    """
    if not ring.hops:
        return visit(state, ahead, 0)
    following = _pass_on(ring, ahead)
    state = visit(state, ahead, 0)

    def body(carry: Any, hop: jax.Array) -> Any:
        state, ahead = carry
        following = _pass_on(ring, ahead)
        return (visit(state, ahead, hop), following), None

    if ring.hops > 1:
        (state, following), _ = jax.lax.scan(body, (state, following), jnp.arange(1, ring.hops))
    return visit(state, following, ring.hops)


def _pass_on(ring: _Ring, tree: Any, steps: int = 1) -> Any:
    ways = ring.places.ways
    if steps % ways == 0:
        return tree
    targets = [(device, (device + steps) % ways) for device in range(ways)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.places.axes, targets), tree)


# -- pairs of blocks --------------------------------------------------------------------------------------------------


class _Pair(NamedTuple):
    q: jax.Array
    """Which of this device's blocks of queries, and, in `k`, which of the visited blocks of keys."""
    k: jax.Array
    q_start: jax.Array
    """Index in its row of the block's first token."""
    k_start: jax.Array


def _over_pairs(
    ring: _Ring, device: jax.Array, hop: Any, window: Any, update: Callable[[Any, _Pair], Any], state: Any
) -> Any:
    """Folds `update` over the pairs of blocks, of those here and those visited, that can see each other."""
    ways = ring.places.ways
    source = (device - hop) % ways
    behind = source > device  # the visited chunks come after this device's own (in zig-zag order: its early one)
    rows, columns = (x.reshape(-1).astype(np.int32) for x in np.indices((ring.blocks, ring.blocks)))
    below = columns <= rows

    def pairs(q_slot: Any, k_slot: Any, chosen: Any = slice(None)) -> tuple[Any, Any]:
        return q_slot * ring.blocks + rows[chosen], k_slot * ring.blocks + columns[chosen]

    if not ring.causal:
        visited = [pairs(i, j) for i in range(ring.slots) for j in range(ring.slots)]
    elif isinstance(hop, int) and hop == 0:
        visited = [pairs(i, i, below) for i in range(ring.slots)] + [pairs(1, 0)] * (ring.slots - 1)
    elif ring.slots == 1:
        visited = [pairs(0, 0)]
    else:
        either = jnp.where(behind, 1, 0)
        visited = [pairs(1, 0), pairs(either, either)]

    def starts(of: jax.Array) -> jax.Array:
        chunks = [of] if ring.slots == 1 else [of, 2 * ways - 1 - of]
        return jnp.stack(chunks) * ring.chunk

    q_starts, k_starts = starts(device), starts(source)

    def one(state: Any, pair: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        q, k = pair
        q_start = q_starts[q // ring.blocks] + q % ring.blocks * ring.block
        k_start = k_starts[k // ring.blocks] + k % ring.blocks * ring.block
        at = _Pair(q, k, q_start, k_start)
        if window is None:
            return update(state, at), None
        # Inside a window most blocks of a long row do not see each other.
        near = (q_start - k_start < window + ring.block) & (q_start + ring.block > k_start)
        return jax.lax.cond(near, lambda x: update(x, at), lambda x: x, state), None

    def fold(state: Any) -> Any:
        every = tuple(jnp.concatenate([jnp.asarray(x[i]) for x in visited]) for i in range(2))
        return jax.lax.scan(one, state, every)[0]

    if ring.causal and ring.slots == 1 and not (isinstance(hop, int) and hop == 0):
        return jax.lax.cond(behind, lambda x: x, fold, state)
    return fold(state)


def _scores(
    ring: _Ring, q: jax.Array, k: jax.Array, at: _Pair, own: Any, theirs: Any, window: Any, wide: Any, lowest: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Masked scores [B, K, G, C, C] of one pair of blocks, and how steep the soft cap is there."""
    scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k, preferred_element_type=wide) * ring.scale
    slope = None
    if ring.softcap is not None:
        part = jnp.tanh(scores / ring.softcap)
        scores, slope = ring.softcap * part, 1 - part * part
    within = jnp.arange(ring.block)
    distance = (at.q_start + within)[:, None] - (at.k_start + within)[None, :]
    seen = jnp.ones(distance.shape, bool)
    if ring.causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance < window
    if ring.blocks * ring.block > ring.chunk:
        seen &= at.k % ring.blocks * ring.block + within < ring.chunk
    mask = seen[None]
    if own is not None:
        mask = mask & (own[at.q][:, :, None] == theirs[at.k][:, None, :])
    return jnp.where(mask[:, None, None], scores, lowest), slope


def _blocks(ring: _Ring, x: jax.Array) -> jax.Array:
    """[B, N, ...] -> [T, B, C, ...], every chunk filled up to whole blocks."""
    b, rest = x.shape[0], x.shape[2:]
    missing = ring.blocks * ring.block - ring.chunk
    x = x.reshape(b, ring.slots, ring.chunk, *rest)
    x = jnp.pad(x, [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * len(rest))
    return jnp.moveaxis(x.reshape(b, ring.slots * ring.blocks, ring.block, *rest), 1, 0)


def _tokens(ring: _Ring, x: jax.Array) -> jax.Array:
    """The way back: [T, B, C, ...] -> [B, N, ...]."""
    x = jnp.moveaxis(x, 0, 1)
    b, rest = x.shape[0], x.shape[3:]
    x = x.reshape(b, ring.slots, ring.blocks * ring.block, *rest)[:, :, : ring.chunk]
    return x.reshape(b, ring.slots * ring.chunk, *rest)
