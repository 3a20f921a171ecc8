"""Cross-entropy of a language model without a [tokens, vocabulary] buffer.

Logits exist for a chunk of every row at a time. Where gradients are wanted they are computed in the same pass over
the chunks, so that no matrix product is done twice and nothing of size [tokens, V] is kept for the backward pass.

Legend: B rows, L tokens, N chunks, P parts of a row that lie apart between blocks, C tokens of a chunk and part,
D model, V vocabulary (padded for the mesh), R data ranks, S spans of a row that lie apart inside blocks.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtrain.ops.chunks import IGNORED, Cut, at_use, cut
from jtrain.ops.collectives import sum_over
from jtrain.ops.head_gradients import gradients_of, sums_and_gradients
from jtrain.ops.logical import constrain, manual_axes
from jtrain.ops.vocabulary import pad_vocabulary


def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sum of the loss over all targets, and their number. See `cross_entropy_figures`."""
    figures = cross_entropy_figures(
        hidden, head, targets, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, chunk_size=chunk_size
    )
    return figures.loss, figures.count


def cross_entropy_and_correct(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Loss sum, number of targets, and number of those that are the likeliest token. See `cross_entropy_figures`."""
    return cross_entropy_figures(
        hidden, head, targets, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, chunk_size=chunk_size
    )[:3]


class CrossEntropy(NamedTuple):
    """Sums over the targets, all float32 (float64 where the activations are). Only the loss has a gradient.

    Attributes:
      loss: of the targets.
      count: of the targets.
      correct: how many of them are the likeliest token.
      entropy: of the distributions at their places, in nats; 0 where it was not asked for.
    """

    loss: jax.Array
    count: jax.Array
    correct: jax.Array
    entropy: jax.Array


def cross_entropy_figures(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_size: int | None = None,
    entropy: bool = False,
) -> CrossEntropy:
    """Cross-entropy of `softmax(hidden @ head)` against the targets, and figures of the same logits.

    With Z = sum_v exp(z_v) a target y costs
    `log Z - (1 - s) z_y - s mean_v(z_v) + w log(Z)^2`: s is label smoothing as Hugging Face's LabelSmoother has it
    (Szegedy et al. 2016, section 7), w the weight of the z loss (Chowdhery et al. 2022, section 5).

    Args:
      hidden: [B, L, D]; logits are float32 at least, whatever its type.
      head: [D, V].
      targets: [B, L], already shifted: what hidden[t] must predict. -100 is left out.
      label_smoothing: share of the target that is spread evenly over the vocabulary.
      z_loss: weight of log(Z)^2.
      softcap: logits z become softcap * tanh(z / softcap) first (Gemma 2, arXiv:2408.00118, section 2).
      chunk_size: tokens of a row whose logits exist at a time; rows of two tokens and more make two chunks at least.
      entropy: whether the entropy is wanted.

    Raises:
      ValueError: a soft cap that is not positive.
    """
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap is {softcap}; write a positive number, or None")
    x_NBPCD, t_NBPC, chunks = cut(hidden, targets, head.shape[1], chunk_size)
    options = _Options(label_smoothing, z_loss, softcap, chunks, entropy)
    loss, correct, spread = _chunked(options, x_NBPCD, pad_vocabulary(head, 1), t_NBPC)
    return CrossEntropy(loss, jnp.sum(targets != IGNORED).astype(loss.dtype), correct, spread)


def soft_cap(logits: jax.Array, softcap: float | None) -> jax.Array:
    """softcap * tanh(logits / softcap); None leaves them."""
    return logits if softcap is None else softcap * jnp.tanh(logits / softcap)


class _Options(NamedTuple):
    label_smoothing: float
    z_loss: float
    softcap: float | None
    cut: Cut
    entropy: bool


class _Chunk(NamedTuple):
    logits_BPCV: jax.Array
    """After the soft cap; -inf in the padding."""
    log_z_BPC: jax.Array
    target_BPCV: jax.Array
    """One-hot targets, as booleans (fused, never stored)."""
    live_BPC: jax.Array
    loss: jax.Array
    correct: jax.Array
    entropy: jax.Array


def _chunk(options: _Options, x_BPCD: jax.Array, head_DV: jax.Array, t_BPC: jax.Array) -> _Chunk:
    wide = jnp.promote_types(x_BPCD.dtype, jnp.float32)
    z = jnp.einsum("bpcd,dv->bpcv", x_BPCD, head_DV, preferred_element_type=wide)
    z = constrain(z, "batch", "sequence", None, "vocab")
    z = soft_cap(z, options.softcap)
    # Where manual axes cut the vocabulary, a device has its own tokens only: what runs over all is summed over them.
    parts = manual_axes("vocab")
    token = jnp.arange(z.shape[-1]) + (jax.lax.axis_index(parts) * z.shape[-1] if parts else 0)
    # A comparison instead of a gather: it stays on the device that holds the token when the vocabulary is cut.
    target = token == t_BPC[..., None]
    target_z = jnp.sum(jnp.where(target, z, 0.0), axis=-1)
    mean_z = jnp.sum(z, axis=-1) / options.cut.vocab if options.label_smoothing else jnp.zeros((), wide)
    if parts or z.shape[-1] > options.cut.vocab:
        z = jnp.where(token < options.cut.vocab, z, -jnp.inf)
    top_z = jnp.max(z, axis=-1)
    top_z = jax.lax.pmax(top_z, parts) if parts else top_z
    below = z - top_z[..., None]
    weight = jnp.exp(below)
    sum_z = jnp.sum(weight, axis=-1)
    sum_z, target_z, mean_z = sum_over((sum_z, target_z, mean_z), parts)
    log_z = jnp.log(sum_z) + top_z
    loss = log_z - (1.0 - options.label_smoothing) * target_z - options.label_smoothing * mean_z
    if options.z_loss:
        loss = loss + options.z_loss * jnp.square(log_z)
    live = t_BPC != IGNORED
    correct = jnp.sum(live & (target_z >= top_z)).astype(wide)
    entropy = jnp.zeros((), wide)
    if options.entropy:  # -sum p log p, with log p = below - log sum_z; in the padding 0 times -inf is to be 0
        mean_below = sum_over(jnp.sum(jnp.where(weight > 0, weight * below, 0.0), axis=-1), parts)
        entropy = jnp.sum(jnp.where(live, jnp.log(sum_z) - mean_below / sum_z, 0.0))
    return _Chunk(z, log_z, target, live, jnp.sum(jnp.where(live, loss, 0.0)), correct, entropy)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(
    options: _Options, x_NBPCD: jax.Array, head_DV: jax.Array, t_NBPC: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    zero = jnp.zeros((), jnp.promote_types(x_NBPCD.dtype, jnp.float32))

    def body(carry: tuple[jax.Array, jax.Array, jax.Array], xs: tuple[jax.Array, jax.Array]):
        chunk = _chunk(options, at_use(xs[0]), head_DV, xs[1])
        return (carry[0] + chunk.loss, carry[1] + chunk.correct, carry[2] + chunk.entropy), None

    return jax.lax.scan(body, (zero, zero, zero), (x_NBPCD, t_NBPC))[0]


def _chunked_forward(options: _Options, x_NBPCD: jax.Array, head_DV: jax.Array, t_NBPC: jax.Array):
    def chunk(x: jax.Array, t: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
        found = _chunk(options, x, head_DV, t)
        p = jnp.exp(found.logits_BPCV - found.log_z_BPC[..., None])
        if options.z_loss:
            p = p * (1.0 + 2.0 * options.z_loss * found.log_z_BPC[..., None])
        d_z = p - (1.0 - options.label_smoothing) * found.target_BPCV - options.label_smoothing / options.cut.vocab
        if options.softcap is not None:
            z = found.logits_BPCV
            d_z = d_z * jnp.where(jnp.isneginf(z), 0.0, 1.0 - jnp.square(z / options.softcap))
        return (found.loss, found.correct, found.entropy), jnp.where(found.live_BPC[..., None], d_z, 0.0)

    sums, residuals = sums_and_gradients(options.cut, x_NBPCD, head_DV, t_NBPC, chunk)
    return sums, (residuals, t_NBPC)


def _chunked_backward(options: _Options, residuals, cotangents):
    gradients = gradients_of(options.cut, residuals[0], cotangents[0])
    return *gradients, np.zeros(residuals[1].shape, jax.dtypes.float0)


_chunked.defvjp(_chunked_forward, _chunked_backward)
