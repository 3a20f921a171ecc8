"""Divergence of a model's distributions from a teacher's, over chunks of logits, with the gradients in the same pass.

With p of the teacher and q of the model, both softmaxes of logits / temperature:
  beta 0      KL(p || q), forward
  beta 1      KL(q || p), reverse
  in between  beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q: the generalised Jensen-Shannon
              divergence (Agarwal et al. 2024, arXiv:2306.13649, eq. 1). It goes to 0 at both ends: 0 and 1 are the
              divergences above by convention (TRL's too), not limits.

Of the teacher the log-probabilities of all tokens are known, or those of its k likeliest and of the rest together.

Legend: K tokens of the teacher that are known; for the others see `jtrain.ops.chunks`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jtrain.ops.chunks import IGNORED, Cut, at_use, cut, cut_alike
from jtrain.ops.collectives import sum_over
from jtrain.ops.cross_entropy import soft_cap
from jtrain.ops.head_gradients import gradients_of, sums_and_gradients
from jtrain.ops.logical import axis_sizes, constrain, logical_spec, manual_axes
from jtrain.ops.region import axes_of, free_region
from jtrain.ops.vocabulary import pad_vocabulary

Tail = Literal["bucket", "renormalise"]


class TeacherTokens(NamedTuple):
    """What is known of a teacher's distributions at the temperature of the loss.

    Attributes:
      logps: log-probabilities [B, L, K]; of all tokens in turn (K = V), or of `ids`.
      ids: which tokens [B, L, K], each once; None: all.
      rest: log-probability of all others together [B, L]; None with `ids` None.
    """

    logps: jax.Array
    ids: jax.Array | None = None
    rest: jax.Array | None = None


class Divergence(NamedTuple):
    """Sums over the targets, all float32 (float64 where the activations are). Only the loss has a gradient.

    Attributes:
      loss: (1 - w) divergence + w cross-entropy, w of each row.
      count: of the targets.
      kl: KL(p || q).
      nll: cross-entropy of the targets at temperature 1.
      entropy: of the model's distributions at temperature 1, in nats.
      correct: how many targets are the model's likeliest token.
      agreement: at how many places the teacher's likeliest token is the model's.
    """

    loss: jax.Array
    count: jax.Array
    kl: jax.Array
    nll: jax.Array
    entropy: jax.Array
    correct: jax.Array
    agreement: jax.Array


def divergence(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    teacher: TeacherTokens,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    ce_weight: jax.Array | float = 0.0,
    tail: Tail = "bucket",
    softcap: float | None = None,
    chunk_size: int | None = None,
) -> Divergence:
    """Divergence of `softmax(hidden @ head / temperature)` from the teacher at the places that have a target.

    Args:
      hidden: [B, L, D]; logits are float32 at least, whatever its type.
      head: [D, V].
      targets: [B, L], already shifted; -100: the place is left out.
      teacher: its distributions at these places.
      beta: which divergence, see above.
      temperature: divides the logits (not those of the cross-entropy). The loss is not multiplied by its square.
      ce_weight: w, the share of the cross-entropy in the loss; a number, or one a row [B].
      tail: of a teacher of which k tokens are known. bucket: all others are one outcome, for both models; renormalise:
        both distributions are those of the k tokens alone.
      softcap: logits z become softcap * tanh(z / softcap) first.
      chunk_size: tokens of a row whose logits exist at a time.

    Raises:
      ValueError: beta outside of [0, 1], a temperature or soft cap that is not positive.
    """
    for name, value, legal in (
        ("beta", beta, 0 <= beta <= 1),
        ("temperature", temperature, temperature > 0),
        ("softcap", softcap, softcap is None or softcap > 0),
    ):
        if not legal:
            raise ValueError(f"{name} is {value}")
    x_NBPCD, t_NBPC, chunks = cut(hidden, targets, head.shape[1], chunk_size)
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    logps = teacher.logps.astype(wide)
    if teacher.ids is not None and tail == "renormalise":
        logps = jax.nn.log_softmax(logps)
    known = TeacherTokens(logps, teacher.ids, None if teacher.rest is None else teacher.rest.astype(wide))
    known = jax.tree.map(lambda x: cut_alike(jax.lax.stop_gradient(x), t_NBPC), known)
    weight = jnp.broadcast_to(jnp.asarray(ce_weight, wide), (hidden.shape[0],))
    weight_NBPC = jnp.broadcast_to(weight[:, None, None], t_NBPC.shape)
    options = _Options(beta, temperature, tail, softcap, chunks)
    sums = _chunked(options, x_NBPCD, pad_vocabulary(head, 1), (t_NBPC, weight_NBPC, known))
    return Divergence(sums[0], jnp.sum(targets != IGNORED).astype(wide), *sums[1:])


class _Options(NamedTuple):
    beta: float
    temperature: float
    tail: Tail
    softcap: float | None
    cut: Cut


_Tokens = tuple[jax.Array, jax.Array, TeacherTokens]
"""Targets, weights of the cross-entropy [N, B, P, C] and the teacher."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(options: _Options, x_NBPCD: jax.Array, head_DV: jax.Array, tokens: _Tokens) -> tuple[jax.Array, ...]:
    def body(carry: tuple[jax.Array, ...], xs: tuple[jax.Array, _Tokens]) -> tuple[tuple[jax.Array, ...], None]:
        sums, _ = _chunk(options, at_use(xs[0]), head_DV, xs[1])
        return tuple(a + b for a, b in zip(carry, sums, strict=True)), None

    zero = jnp.zeros((), jnp.promote_types(x_NBPCD.dtype, jnp.float32))
    return jax.lax.scan(body, (zero,) * 6, (x_NBPCD, tokens))[0]


def _chunked_forward(options: _Options, x_NBPCD: jax.Array, head_DV: jax.Array, tokens: _Tokens):
    def chunk(x: jax.Array, tokens: _Tokens) -> tuple[tuple[jax.Array, ...], jax.Array]:
        return _chunk(options, x, head_DV, tokens)

    return sums_and_gradients(options.cut, x_NBPCD, head_DV, tokens, chunk)


def _chunked_backward(options: _Options, residuals, cotangents):
    return *gradients_of(options.cut, residuals, cotangents[0]), None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _chunk(
    options: _Options, x_BPCD: jax.Array, head_DV: jax.Array, tokens: _Tokens
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Sums over a chunk (loss, kl, nll, entropy, correct, agreement), and the loss's gradient by the logits."""
    t_BPC, weight_BPC, teacher = tokens
    temperature, beta = options.temperature, options.beta
    wide = jnp.promote_types(x_BPCD.dtype, jnp.float32)
    z = jnp.einsum("bpcd,dv->bpcv", x_BPCD, head_DV, preferred_element_type=wide)
    z = soft_cap(constrain(z, "batch", "sequence", None, "vocab"), options.softcap)
    # Where manual axes cut the vocabulary, a device has its own tokens only: what runs over all is summed over them.
    parts = manual_axes("vocab")
    token = jnp.arange(z.shape[-1]) + (jax.lax.axis_index(parts) * z.shape[-1] if parts else 0)
    target = token == t_BPC[..., None]
    z = jnp.where(token < options.cut.vocab, z, -jnp.inf)

    def total(*terms: jax.Array) -> list[jax.Array]:
        return sum_over([jnp.sum(x, axis=-1) for x in terms], parts)

    def largest(x: jax.Array) -> jax.Array:
        top = jnp.max(x, axis=-1)
        return jax.lax.pmax(top, parts) if parts else top

    log_p = _by_token(teacher, z.shape)
    known = ~jnp.isneginf(log_p)
    bucket = teacher.ids is not None and options.tail == "bucket"
    y = z / temperature
    if teacher.ids is not None and not bucket:
        y = jnp.where(known, y, -jnp.inf)
    top_y = largest(y)
    weight_y = jnp.exp(y - top_y[..., None])
    sum_y, sum_rest = total(weight_y, jnp.where(known, 0.0, weight_y))
    log_q = y - (jnp.log(sum_y) + top_y)[..., None]
    terms, slopes = _terms(log_p, log_q, beta)
    forward = terms if beta == 0 else _terms(log_p, log_q, 0.0)[0]
    if bucket:
        terms, slopes, forward = (jnp.where(known, x, 0.0) for x in (terms, slopes, forward))
    apart, slope, kl = total(terms, slopes, forward)
    if bucket:
        assert teacher.rest is not None
        sum_rest = jnp.maximum(sum_rest, jnp.finfo(wide).tiny)
        log_q_rest = jnp.log(sum_rest) - jnp.log(sum_y)
        rest_term, rest_slope = _terms(teacher.rest, log_q_rest, beta)
        apart, slope = apart + rest_term, slope + rest_slope
        kl = kl + _terms(teacher.rest, log_q_rest, 0.0)[0]
        # The slope of the rest is that of each of its tokens, by their shares of it.
        slopes = jnp.where(known, slopes, weight_y * (rest_slope / sum_rest)[..., None])
    d_y = slopes - jnp.exp(log_q) * slope[..., None]

    top_z = largest(z)
    below = z - top_z[..., None]
    weight_z = jnp.exp(below)
    sum_z, target_z, mean_below = total(
        weight_z, jnp.where(target, z, 0.0), jnp.where(weight_z > 0, weight_z * below, 0.0)
    )
    nll = jnp.log(sum_z) + top_z - target_z
    entropy = jnp.log(sum_z) - mean_below / sum_z
    top_p = jnp.max(teacher.logps, axis=-1)
    agrees = largest(jnp.where(log_p >= top_p[..., None], z, -jnp.inf)) >= top_z

    live = t_BPC != IGNORED
    loss = (1.0 - weight_BPC) * apart + weight_BPC * nll
    figures = (loss, kl, nll, entropy, target_z >= top_z, agrees)
    sums = tuple(jnp.sum(jnp.where(live, x, 0.0)).astype(wide) for x in figures)
    weight = weight_BPC[..., None]
    d_z = (1.0 - weight) / temperature * d_y + weight * (weight_z / sum_z[..., None] - target)
    if options.softcap is not None:
        d_z = d_z * jnp.where(jnp.isneginf(z), 0.0, 1.0 - jnp.square(z / options.softcap))
    return sums, jnp.where(live[..., None], d_z, 0.0)


def _terms(log_p: jax.Array, log_q: jax.Array, beta: float) -> tuple[jax.Array, jax.Array]:
    """What each outcome adds to the divergence, and q times the divergence's derivative by q (up to a constant)."""

    def product(log_weight: jax.Array, log_ratio: jax.Array) -> jax.Array:
        return jnp.where(jnp.isneginf(log_weight), 0.0, jnp.exp(log_weight) * log_ratio)

    if beta == 0:
        return product(log_p, log_p - log_q), -jnp.exp(log_p)
    if beta == 1:
        both = product(log_q, log_q - log_p)
        return both, both
    log_m = jnp.logaddexp(log_p + np.log(beta), log_q + np.log1p(-beta))
    of_q = (1.0 - beta) * product(log_q, log_q - log_m)
    return beta * product(log_p, log_p - log_m) + of_q, of_q


def _by_token(teacher: TeacherTokens, shape: tuple[int, ...]) -> jax.Array:
    """The teacher's log-probabilities by token as the logits lie [B, P, C, V]; -inf where none is known."""
    parts, size = manual_axes("vocab"), shape[-1]
    if teacher.ids is not None:
        return _spread(teacher.ids, teacher.logps, shape)
    log_p = teacher.logps
    whole = size * (jax.lax.axis_size(parts) if parts else 1)
    log_p = jnp.pad(log_p, [(0, 0)] * 3 + [(0, whole - log_p.shape[-1])], constant_values=-jnp.inf)
    if parts:
        log_p = jax.lax.dynamic_slice_in_dim(log_p, jax.lax.axis_index(parts) * size, size, axis=-1)
    return constrain(log_p, "batch", "sequence", None, "vocab")


def _spread(ids_BPCK: jax.Array, values_BPCK: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Values at their tokens [B, P, C, V], -inf elsewhere: every device keeps those of its part of the vocabulary.

    By hand on whatever axes are still automatic here: the partitioner would gather the whole vocabulary.
    """
    held = manual_axes("vocab")

    def local(ids: jax.Array, values: jax.Array, size: int, axes: tuple[str, ...]) -> jax.Array:
        places = ids - (jax.lax.axis_index(axes) * size if axes else 0)
        places = jnp.where(places < 0, size, places)  # out of range: dropped
        lead, k = ids.shape[:-1], ids.shape[-1]
        rows = jnp.arange(math.prod(lead))[:, None]
        empty = jnp.full((len(rows), size), -jnp.inf, values.dtype)
        return empty.at[rows, places.reshape(-1, k)].set(values.reshape(-1, k), mode="drop").reshape(*lead, size)

    region = free_region()
    if region is None:
        return local(ids_BPCK, values_BPCK, shape[-1], held)
    out = logical_spec(shape, "batch", "sequence", None, "vocab")
    given, free = PartitionSpec(*tuple(out)[:3], None), axes_of(out[3])
    size = shape[-1] // math.prod(axis_sizes(free))
    mapped = region.shard_map(
        lambda ids, values: local(ids, values, size, (*held, *free)), in_specs=(given, given), out_specs=out
    )
    return mapped(ids_BPCK, values_BPCK)
