"""The loss of next-token prediction, for every task that has one, and the figures of its logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jtrain.data.rows import IGNORE
from jtrain.models.decoder import Decoder
from jtrain.models.multimodal import Images, image_places
from jtrain.models.router import RouterFigures
from jtrain.ops.cross_entropy import cross_entropy_figures, soft_cap
from jtrain.ops.zigzag import to_zigzag, zigzag_order
from jtrain.tasks.router_losses import router_losses
from jtrain.train.loss import Loss, LossFn, Metric


def next_token_loss(
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_size: int | None = None,
    *,
    entropy: bool = False,
    packing_efficiency: bool = False,
    noise_alpha: float = 0.0,
) -> LossFn:
    """The loss of next-token prediction: sum of cross-entropies in nats over the live labels.

    A mixture of experts adds the losses of its routers. Evaluation (`rng` None) leaves them out, and smoothing, z loss
    and noise as well: `eval_loss` is the model's own cross-entropy.

    Args:
      label_smoothing, z_loss, chunk_size: see `cross_entropy_figures`.
      entropy: adds the metric `entropy`: mean over the live labels, in nats.
      packing_efficiency: adds the metric of this name: share of the rows' places that hold a token.
      noise_alpha: noise on the embeddings while training (NEFTune); 0: none.
    """

    def loss_fn(model: nnx.Module, batch: dict[str, jax.Array], rng: jax.Array | None) -> Loss:
        training = rng is not None
        hidden, router, targets, _ = hidden_and_targets(model, batch, rng, noise_alpha)
        found = cross_entropy_figures(
            hidden,
            model.head(),  # type: ignore[attr-defined]
            targets,
            label_smoothing=label_smoothing if training else 0.0,
            z_loss=z_loss if training else 0.0,
            softcap=logit_cap(model),
            chunk_size=chunk_size,
            entropy=entropy,
        )
        loss, count = found.loss, found.count
        metrics: dict[str, Metric] = {"mean_token_accuracy": (found.correct, count)}
        if entropy:
            metrics["entropy"] = (found.entropy, count)
        if packing_efficiency:
            metrics["packing_efficiency"] = filled(batch["segment_ids"])
        if training:
            loss, metrics = with_router_losses(model, router, targets, loss, metrics)
        if not training and "bytes" in batch:
            metrics["_bytes"] = (batch["bytes"].sum(), jnp.int32(1))
        return Loss(loss, count, metrics)

    return loss_fn


def hidden_and_targets(
    model: nnx.Module, batch: dict[str, jax.Array], rng: jax.Array | None, noise_alpha: float = 0.0
) -> tuple[jax.Array, RouterFigures | None, jax.Array, int]:
    """Activations before the head [B, L, D], figures of the routers, targets [B, L]; and the ways of their order.

    A sum does not mind the order of its terms: tokens go where every device of `context` does the same work, and
    whatever else is given of them has to be put in this order (`to_zigzag(x, ways)`).
    """
    training = rng is not None
    # Any model with `hidden` and `head` will do; ours say more.
    decoder = model if isinstance(model, Decoder) else None
    ways = 1 if decoder is None else decoder.balanced_ways(batch["input_ids"].shape[1])
    images = images_of(decoder, batch)
    if images is not None:
        images = images._replace(places=to_zigzag(images.places, ways))
    ids, positions, segments, targets = (
        to_zigzag(x, ways)
        for x in (batch["input_ids"], batch["position_ids"], batch["segment_ids"], next_token(batch["labels"]))
    )
    router = None
    with zigzag_order(ways):
        arguments = {"position_ids": positions, "segment_ids": segments, "rng": rng, "row": batch["row"]}
        if decoder is not None:
            noise = noise_alpha if training else 0.0
            hidden, router = decoder.hidden_and_router(
                ids, **arguments, deterministic=not training, noise_alpha=noise, images=images
            )
        else:
            hidden = model.hidden(ids, **arguments, deterministic=not training)  # type: ignore[attr-defined]
    return hidden, router, targets, ways


def images_of(decoder: Decoder | None, batch: dict[str, jax.Array]) -> Images | None:
    """The images of a batch; None: its rows have none, or the model does not see."""
    if decoder is None or decoder.config.images is None or "pixel_values" not in batch:
        return None
    places = image_places(batch["input_ids"], decoder.config.images.image_token_index)
    return Images(batch["pixel_values"], places)


def with_router_losses(
    model: nnx.Module,
    router: RouterFigures | None,
    targets: jax.Array,
    loss: jax.Array,
    metrics: dict[str, Metric],
) -> tuple[jax.Array, dict[str, Metric]]:
    """A loss and its metrics with those of the routers of a mixture of experts; as they are without any."""
    if router is None or not isinstance(model, Decoder):
        return loss, metrics
    added, figures = router_losses(model.config, router, (targets != IGNORE).sum(1))
    return loss + added.astype(loss.dtype), metrics | figures


def next_token(labels_BL: jax.Array) -> jax.Array:
    """Labels moved one place to the left: what each position has to predict [B, L]. The one shift there is."""
    return jnp.pad(labels_BL[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORE)


def token_logprobs(model: nnx.Module, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """For `predict`: the log-probability of every label [b, L] (at its own place), 0 where there is none."""
    images = images_of(model if isinstance(model, Decoder) else None, batch)
    hidden = model.hidden(  # type: ignore[attr-defined]
        batch["input_ids"],
        position_ids=batch["position_ids"],
        segment_ids=batch["segment_ids"],
        **({} if images is None else {"images": images}),
    )
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    logits = jnp.einsum("bld,dv->blv", hidden, model.head(), preferred_element_type=wide)  # type: ignore[attr-defined]
    logits = soft_cap(logits, logit_cap(model))
    targets = next_token(batch["labels"])
    live = targets != IGNORE
    logprobs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logprobs, jnp.where(live, targets, 0)[..., None], axis=-1)[..., 0]
    return {"logprobs": jnp.pad(jnp.where(live, chosen, 0.0)[:, :-1], ((0, 0), (1, 0)))}


def logit_cap(model: nnx.Module) -> float | None:
    """The bound of the logits of a decoder; a model of one's own has `hidden` and `head` and nothing more to say."""
    return model.config.final_logit_softcapping if isinstance(model, Decoder) else None


def filled(segment_ids: jax.Array) -> Metric:
    """(places with a token, places of the rows that have any): rows that fill up a batch are none."""
    held = segment_ids > 0
    return held.sum(dtype=jnp.int32), held.any(1).sum(dtype=jnp.int32) * segment_ids.shape[1]
