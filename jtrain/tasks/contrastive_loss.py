"""The contrastive losses of a batch that may come in micro-batches, slices or stages: negatives are always all of it.

Where a step sees its batch as a whole, the loss is `contrastive_loss` of the embeddings. Else (gradient accumulation, a
pipeline, slices with gradients of their own) the embeddings of the whole batch are computed before the step, without a
gradient, and the derivatives of the loss by them in closed form; each part of the step then has a surrogate whose
gradients are those (gradient caching, Gao et al. 2021). The towers compute the same numbers both times: their dropout
is a function of (seed, step, row).

Legend: A micro-batches of b pairs, D size of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jtrain.models.dual_encoder import DualEncoder
from jtrain.ops.contrastive import Gradients, Kind, Pairs, contrastive, contrastive_loss, surrogate, used_scale
from jtrain.train.loss import Loss, LossFn, Metric
from jtrain.train.state import TRAIN_STREAM, stream_key

Batch = dict[str, jax.Array]


def contrastive_loss_fn(kind: Kind, *, equal_texts: bool) -> LossFn:
    """The loss: a sum over pairs, and their number.

    Args:
      kind: clip or siglip.
      equal_texts: whether images of equal texts are partners of each other's texts; see `jtrain.ops.contrastive`.
    """

    def loss_fn(model: nnx.Module, batch: Batch, rng: jax.Array | None) -> Loss:
        assert isinstance(model, DualEncoder)
        dropout = rng if has_dropout(model) else None
        image, text = model.embed(batch["pixels"], batch["input_ids"], rng=dropout, row=batch["row"])
        scale, bias = model.scale_and_bias()
        if "slope_image" in batch:
            pairs = Pairs(*(batch[f"pair_{name}"] for name in Pairs._fields))
            slopes = Gradients(
                batch["slope_image"],
                batch["slope_text"],
                batch["slope_log_scale"].sum(),
                batch["slope_bias"].sum(),
            )
            loss = surrogate(pairs.loss.sum(), slopes, image, text, scale, bias)
        else:
            loss, pairs = contrastive_loss(kind, image, text, scale, bias, batch["text_key"], equal_texts)
        count = jnp.int32(image.shape[0])

        def over(x: jax.Array) -> Metric:
            return jax.lax.stop_gradient(x.astype(jnp.float32).sum()), count

        metrics = {
            "image_to_text_accuracy": over(pairs.image_to_text),
            "text_to_image_accuracy": over(pairs.text_to_image),
            "logit_scale": over(used_scale(kind, scale) * count),
        }
        return Loss(loss, count, metrics)

    return loss_fn


def whole_batch(kind: Kind, seed: int, *, equal_texts: bool) -> Callable[[nnx.Module, Batch, jax.Array], Batch]:
    """`function(module, batch, used)`: what the loss of each micro-batch reads of the whole batch, arrays [A, b, ...].

    Args:
      kind, equal_texts: see `contrastive_loss_fn`.
      seed: of the run; with the batches used so far it gives the key of the step's dropout.
    """

    def function(module: nnx.Module, batch: Batch, used: jax.Array) -> Batch:
        assert isinstance(module, DualEncoder)
        rng = stream_key(seed, TRAIN_STREAM, used) if has_dropout(module) else None
        embedded = jax.lax.map(
            lambda micro: module.embed(micro["pixels"], micro["input_ids"], rng=rng, row=micro["row"]),
            {name: batch[name] for name in ("pixels", "input_ids", "row")},
        )
        lead = batch["row"].shape
        image, text, keys = (x.reshape(-1, x.shape[-1]) for x in (*embedded, batch["text_key"]))
        pairs, slopes = contrastive(kind, image, text, *module.scale_and_bias(), keys, equal_texts=equal_texts)
        added = {f"pair_{name}": x.reshape(lead) for name, x in pairs._asdict().items()}
        added |= {f"slope_{name}": getattr(slopes, name).reshape(*lead, -1) for name in ("image", "text")}
        for name in ("log_scale", "bias"):  # every pair has its share, so that any part of the batch has its own
            share = getattr(slopes, name) / batch["row"].size
            added[f"slope_{name}"] = jnp.broadcast_to(share, lead)
        return added

    return function


def has_dropout(model: DualEncoder) -> bool:
    """Whether anything random happens in the towers."""
    return bool(model.config.text.dropout or model.config.vision.dropout)


def embeddings(model: nnx.Module, batch: Batch) -> dict[str, Any]:
    """Image and text of every row [b, D], float32 at least, of length one."""
    assert isinstance(model, DualEncoder)
    return dict(zip(("image", "text"), model.embed(batch["pixels"], batch["input_ids"]), strict=True))
