"""What a teacher says of every token: its log-probabilities, all of them or the largest, chunk by chunk.

Without gradients, and outside of manual regions: it is a forward pass of its own.

Legend: K tokens that are kept; for the others see `jtrain.ops.chunks`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jtrain.ops.chunks import IGNORED, at_use, cut, joined
from jtrain.ops.cross_entropy import soft_cap
from jtrain.ops.logical import constrain, mesh_axis_size
from jtrain.ops.vocabulary import pad_vocabulary


class TeacherScores(NamedTuple):
    """Figures of every token, float32 at least; what stands at places without a target counts for nothing.

    Attributes:
      logps: log-probabilities at the temperature [B, L, K], the largest first; with top_k 0 of all tokens in turn.
      ids: the tokens that they are of, int32 [B, L, K]; None with top_k 0.
      rest: log-probability of all other tokens together [B, L]; None with top_k 0.
      nll: cross-entropy of the targets at temperature 1 [B, L], 0 where there is none.
      entropy: of the distributions at temperature 1 [B, L], in nats, 0 where there is no target.
    """

    logps: jax.Array
    ids: jax.Array | None
    rest: jax.Array | None
    nll: jax.Array
    entropy: jax.Array


def teacher_scores(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    top_k: int = 0,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
) -> TeacherScores:
    """Scores of `softmax(hidden @ head / temperature)`.

    Args:
      hidden: [B, L, D]; logits are float32 at least, whatever its type.
      head: [D, V].
      targets: [B, L], already shifted; -100: none.
      top_k: how many tokens are kept; 0, or V and more: all.
      temperature: divides the logits.
      softcap: logits z become softcap * tanh(z / softcap) first.
      chunk_size: tokens of a row whose logits exist at a time.
    """
    vocab, length = head.shape[1], targets.shape[1]
    x_NBPCD, t_NBPC, _ = cut(hidden, targets, vocab, chunk_size)
    head_DV = pad_vocabulary(head, 1)
    k = 0 if top_k >= vocab else top_k

    def body(_: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, TeacherScores]:
        x, t = at_use(xs[0]), xs[1]
        z = jnp.einsum("bpcd,dv->bpcv", x, head_DV, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))
        z = soft_cap(constrain(z, "batch", "sequence", None, "vocab"), softcap)
        token = jnp.arange(z.shape[-1])
        z = jnp.where(token < vocab, z, -jnp.inf)
        log_z = jax.nn.logsumexp(z, axis=-1)
        live = t != IGNORED
        target_z = jnp.sum(jnp.where(token == t[..., None], z, 0.0), axis=-1)
        mean_z = jnp.sum(jnp.where(token < vocab, jnp.exp(z - log_z[..., None]) * z, 0.0), axis=-1)
        y = z / temperature
        log_y = jax.nn.logsumexp(y, axis=-1)[..., None]
        ids = rest = None
        if k:
            largest, ids = _top_k(y, k)
            logps = largest - log_y
            rest = _rest(y, largest, k) - log_y[..., 0]
        else:
            logps = (y - log_y)[..., :vocab]
        found = (jnp.where(live, value, 0.0) for value in (log_z - target_z, log_z - mean_z))
        return None, TeacherScores(logps, ids, rest, *found)

    scores = jax.lax.scan(body, None, (x_NBPCD, t_NBPC))[1]
    return jax.tree.map(lambda x: joined(x, length), scores)


def _top_k(y_BPCV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The largest of every row and their tokens [B, P, C, K]; of equals the first tokens.

    First on every part of the vocabulary by itself, then of what they found: the vocabulary stays where it is.
    """
    parts = mesh_axis_size("vocab")
    y = y_BPCV.reshape(*y_BPCV.shape[:-1], parts, -1)
    y = constrain(y, "batch", "sequence", None, "vocab", None)
    values, ids = jax.lax.top_k(y, min(k, y.shape[-1]))
    ids = ids.astype(jnp.int32) + jnp.arange(parts, dtype=jnp.int32)[:, None] * y.shape[-1]
    values, ids = (x.reshape(*x.shape[:-2], -1) for x in (values, ids))
    values, places = jax.lax.top_k(values, k)
    return values, jnp.take_along_axis(ids, places, axis=-1)


def _rest(y_BPCV: jax.Array, largest_BPCK: jax.Array, k: int) -> jax.Array:
    """Log of the sum of exp(y) over the tokens that are not among the largest: not 1 minus theirs, which cancels."""
    least = largest_BPCK[..., -1]
    smaller = jax.nn.logsumexp(jnp.where(y_BPCV < least[..., None], y_BPCV, -jnp.inf), axis=-1)
    equal = jnp.sum(y_BPCV >= least[..., None], axis=-1) - k  # equals of the least one that found no place
    return jnp.logaddexp(smaller, jnp.where(equal > 0, jnp.log(jnp.maximum(equal, 1)) + least, -jnp.inf))
