"""Contrastive losses of images and texts over a whole batch, in chunks, with their gradients in closed form.

| kind | loss | source |
|---|---|---|
| clip | mean of the softmax over all texts of an image and over all images of a text | Radford et al. 2021, fig. 3 |
| siglip | every pair by itself: is it one or not? | Zhai et al. 2023, eq. 1 |

Every image meets every text of the batch, wherever they lie: rows of images stay on their devices, texts are gathered
and met chunk after chunk, so that a device holds scores [B / devices, C] and never [B, B].

Legend: B pairs, D size of an embedding, C texts of a chunk.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jtrain.ops.logical import constrain

Kind = Literal["clip", "siglip"]
CHUNK = 1024
"""Texts of a chunk."""
MAX_LOG_SCALE = 4.605170185988092
"""ln 100: CLIP's scores are never scaled by more (Radford et al. 2021, section 2.5)."""


class Pairs(NamedTuple):
    """What a batch of pairs has given.

    Attributes:
      loss: of every pair [B].
      image_to_text: whether the text that is nearest to an image is its own, or an equal one [B].
      text_to_image: whether the image that is nearest to a text has this text, or an equal one [B].
    """

    loss: jax.Array
    image_to_text: jax.Array
    text_to_image: jax.Array


class Gradients(NamedTuple):
    """Derivatives of the summed loss.

    Attributes:
      image: by the embeddings of the images [B, D].
      text: the same of the texts.
      log_scale: by the logarithm of the scale [].
      bias: by the bias [].
    """

    image: jax.Array
    text: jax.Array
    log_scale: jax.Array
    bias: jax.Array


def contrastive(
    kind: Kind,
    image: jax.Array,
    text: jax.Array,
    log_scale: jax.Array,
    bias: jax.Array,
    text_key: jax.Array,
    *,
    equal_texts: bool = False,
    chunk: int = CHUNK,
) -> tuple[Pairs, Gradients]:
    """Losses of pairs, and the derivatives of their sum.

    Args:
      kind: which loss.
      image: normalised embeddings [B, D], float32 at least.
      text: the same; row i is the text of image i.
      log_scale: logarithm of what cosines are multiplied by [].
      bias: added to the scores [] (siglip; it changes nothing in a softmax).
      text_key: [B, 2] integers that are equal where texts are.
      equal_texts: whether the images of equal texts are partners of each other's texts: targets of the softmax in
        equal shares (Yang et al. 2022, UniCL, eq. 3), pairs that are ones for siglip. False: negatives, as in both
        papers.
      chunk: texts that meet all images at one time.
    """
    size = image.shape[0]
    image = constrain(image, "batch", None)
    text, keys = constrain(text, None, None), constrain(jnp.asarray(text_key), None, None)
    own = jnp.stack([jnp.arange(size), jnp.zeros(size, jnp.int32)], axis=1)
    partner = keys if equal_texts else own.astype(keys.dtype)
    scale = used_scale(kind, log_scale).astype(image.dtype)
    chunk = min(chunk, size)
    count = -(-size // chunk)

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, count * chunk - size), *[(0, 0)] * (x.ndim - 1)])
        return x.reshape(count, chunk, *x.shape[1:])

    columns = cut(text), cut(partner), cut(keys), cut(jnp.ones(size, bool))
    run = _Chunks(image, partner, keys, scale, bias.astype(image.dtype), columns)
    return run.clip(log_scale) if kind == "clip" else run.siglip()


class _Chunks:
    """All images against one chunk of texts after the other."""

    def __init__(self, image: jax.Array, partner: jax.Array, keys: jax.Array, scale: Any, bias: Any, columns: Any):
        self.image, self.partner, self.keys = image, partner, keys
        self.scale, self.bias, self.columns = scale, bias, columns
        self.size = image.shape[0]

    def scores(self, text_CD: jax.Array) -> jax.Array:
        """Cosines [B, C]."""
        return constrain(jnp.einsum("bd,cd->bc", self.image, text_CD, precision="highest"), "batch", None)

    def flat(self, chunks: jax.Array) -> jax.Array:
        """[chunks, C, ...] -> [B, ...]."""
        return chunks.reshape(-1, *chunks.shape[2:])[: self.size]

    def by_image(self, x_BC: jax.Array, text_CD: jax.Array) -> jax.Array:
        return jnp.einsum("bc,cd->bd", x_BC, text_CD, precision="highest")

    def by_text(self, x_BC: jax.Array) -> jax.Array:
        return jnp.einsum("bc,bd->cd", x_BC, self.image, precision="highest")

    def equal(self, keys_C2: jax.Array, mine_B2: jax.Array) -> jax.Array:
        return constrain((mine_B2[:, None] == keys_C2[None]).all(-1), "batch", None)

    def nearest(self, best: tuple[jax.Array, jax.Array], z_BC: jax.Array, keys_C2: jax.Array) -> Any:
        """The best score of every image so far and its text, and whether every text's best image has it."""
        top, key = best
        here = z_BC.max(1)
        key = jnp.where((here > top)[:, None], keys_C2[z_BC.argmax(1)], key)
        right = (self.keys[z_BC.argmax(0)] == keys_C2).all(-1)
        return (jnp.maximum(top, here), key), right

    def start(self) -> tuple[jax.Array, jax.Array]:
        lowest = jnp.full(self.size, -jnp.inf, self.image.dtype)
        return constrain(lowest, "batch"), constrain(jnp.zeros_like(self.keys), "batch", None)

    def clip(self, log_scale: jax.Array) -> tuple[Pairs, Gradients]:
        zeros = constrain(jnp.zeros(self.size, self.image.dtype), "batch")

        def sums(carry: Any, column: Any) -> Any:
            (lse, targets, partners), best = carry
            text, partner, keys, live = column
            z = jnp.where(live, self.scores(text) * self.scale, -jnp.inf)
            equal = self.equal(partner, self.partner) & live
            of_texts = jax.nn.logsumexp(z, axis=0)
            lse = jnp.logaddexp(lse, jax.nn.logsumexp(z, axis=1))
            found = jnp.where(equal, z, 0.0)
            best, right = self.nearest(best, z, keys)
            carry = (lse, targets + found.sum(1), partners + equal.sum(1)), best
            return carry, (of_texts, found.sum(0), equal.sum(0), right)

        first = (jnp.full_like(zeros, -jnp.inf), zeros, zeros), self.start()
        ((lse, targets, partners), (_, key)), by_text = jax.lax.scan(sums, first, self.columns)
        of_texts, found, shared, right = map(self.flat, by_text)
        loss = 0.5 * (lse - targets / partners) + 0.5 * (of_texts - found / jnp.maximum(shared, 1))

        def slopes(carry: Any, column: Any) -> Any:
            d_image, d_scale = carry
            (text, partner, _, live), lse_C, shared_C = column
            z = self.scores(text) * self.scale
            equal = self.equal(partner, self.partner)
            d_z = 0.5 * (jnp.exp(z - lse[:, None]) + jnp.exp(z - lse_C)) - equal / jnp.maximum(shared_C, 1)
            d_z = jnp.where(live, d_z, 0.0)
            d_image = d_image + self.by_image(d_z, text) * self.scale
            return (d_image, d_scale + (d_z * z).sum()), self.by_text(d_z) * self.scale

        zero = jnp.zeros((), self.image.dtype)
        columns = self.columns, by_text[0], by_text[2]
        (d_image, d_scale), d_text = jax.lax.scan(slopes, (jnp.zeros_like(self.image), zero), columns)
        # At the cap the scale may fall, and not rise.
        d_scale = jnp.where((log_scale > MAX_LOG_SCALE) & (d_scale < 0), 0.0, d_scale)
        return Pairs(loss, self.right(key), right), Gradients(d_image, self.flat(d_text), d_scale, zero)

    def siglip(self) -> tuple[Pairs, Gradients]:
        def one(carry: Any, column: Any) -> Any:
            (d_image, d_scale, d_bias), best = carry
            text, partner, keys, live = column
            cosines = self.scores(text)
            z = cosines * self.scale + self.bias
            sign = jnp.where(self.equal(partner, self.partner), 1.0, -1.0).astype(z.dtype)
            loss = jnp.where(live, -jax.nn.log_sigmoid(sign * z), 0.0)
            d_z = jnp.where(live, -sign * jax.nn.sigmoid(-sign * z), 0.0)
            best, right = self.nearest(best, jnp.where(live, z, -jnp.inf), keys)
            d_image = d_image + self.by_image(d_z, text) * self.scale
            d_scale = d_scale + (d_z * cosines).sum() * self.scale
            carry = (d_image, d_scale, d_bias + d_z.sum()), best
            return carry, (loss.sum(0), self.by_text(d_z) * self.scale, right)

        zero = jnp.zeros((), self.image.dtype)
        first = (jnp.zeros_like(self.image), zero, zero), self.start()
        ((d_image, d_scale, d_bias), (_, key)), by_text = jax.lax.scan(one, first, self.columns)
        loss, d_text, right = map(self.flat, by_text)
        return Pairs(loss, self.right(key), right), Gradients(d_image, d_text, d_scale, d_bias)

    def right(self, key_B2: jax.Array) -> jax.Array:
        return (key_B2 == self.keys).all(-1)


def used_scale(kind: Kind, log_scale: jax.Array) -> jax.Array:
    """What cosines are multiplied by, of its logarithm: in CLIP 100 at most."""
    return jnp.exp(jnp.minimum(log_scale, MAX_LOG_SCALE) if kind == "clip" else log_scale)


@partial(jax.custom_vjp, nondiff_argnums=(0, 6, 7))
def contrastive_loss(
    kind: Kind,
    image: jax.Array,
    text: jax.Array,
    log_scale: jax.Array,
    bias: jax.Array,
    text_key: jax.Array,
    equal_texts: bool = False,
    chunk: int = CHUNK,
) -> tuple[jax.Array, Pairs]:
    """The summed loss, differentiable by embeddings, scale and bias, and what `contrastive` says of every pair."""
    pairs, _ = contrastive(kind, image, text, log_scale, bias, text_key, equal_texts=equal_texts, chunk=chunk)
    return pairs.loss.sum(), pairs


def _forward(kind, image, text, log_scale, bias, text_key, equal_texts, chunk):
    pairs, slopes = contrastive(kind, image, text, log_scale, bias, text_key, equal_texts=equal_texts, chunk=chunk)
    return (pairs.loss.sum(), pairs), slopes


def _backward(kind, equal_texts, chunk, slopes, d):
    return (*(slope * d[0] for slope in slopes), None)


contrastive_loss.defvjp(_forward, _backward)


def surrogate(loss: jax.Array, slopes: Gradients, image: jax.Array, text: jax.Array, log_scale: Any, bias: Any):
    """The value `loss` with the derivatives `slopes` by the embeddings of some of the batch's pairs.

    What lets a batch of any size be met micro-batch after micro-batch (gradient caching, Gao et al. 2021, section 3.2):
    the derivatives by the embeddings are those of the whole batch, and only the towers are differentiated here.

    Args:
      loss: of these pairs, summed [].
      slopes: derivatives of the whole batch's loss by these pairs' embeddings [b, D]; of scale and bias, their share.
      image, text: embeddings [b, D].
      log_scale, bias: parameters [].
    """
    parts = ((slopes.image * image).sum() + (slopes.text * text).sum()) + slopes.log_scale * log_scale
    parts = parts + slopes.bias * bias
    return jax.lax.stop_gradient(loss) + parts - jax.lax.stop_gradient(parts)
