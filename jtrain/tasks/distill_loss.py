"""The loss of distillation, and the numbers of a teacher that it reads.

The teacher's numbers come into the batch before the step (`jtrain/tasks/distill.py`), computed by a program of their
own, or read from a table. At the place of every target:
  teacher_logps    [b, L, K]  log-probabilities at the loss's temperature: of all tokens, or of teacher_ids
  teacher_ids      [b, L, K]  the likeliest tokens (with `top_k`)
  teacher_rest     [b, L]     log-probability of all others together (with `top_k`)
  teacher_nll      [b, L]     the teacher's own cross-entropy
  teacher_entropy  [b, L]
  on_policy        [b]        1 where the completion is the student's own (with `on_policy_fraction`)

Legend: A micro-batches, b rows of one, L tokens, K tokens of the teacher that are known, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jtrain.config.schema import Config
from jtrain.models.decoder import Decoder
from jtrain.ops.divergence import Tail, TeacherTokens, divergence
from jtrain.ops.teacher_scores import teacher_scores
from jtrain.ops.zigzag import to_zigzag
from jtrain.tasks.language_loss import (
    filled,
    hidden_and_targets,
    images_of,
    logit_cap,
    next_token,
    with_router_losses,
)
from jtrain.train.loss import Loss, LossFn, Metric

Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Distillation:
    """What is computed.

    Attributes:
      beta: 0 forward KL, 1 reverse KL, between them the generalised Jensen-Shannon divergence.
      temperature: of both distributions.
      ce_weight: share of the labels' cross-entropy in the loss of rows that are data.
      top_k: tokens of the teacher that are known; 0: all.
      tail: what becomes of the others.
      chunk_size: tokens of a row whose logits exist at a time.
    """

    beta: float = 0.0
    temperature: float = 1.0
    ce_weight: float = 0.0
    top_k: int = 0
    tail: Tail = "bucket"
    chunk_size: int | None = None


def distillation_of(config: Config) -> Distillation:
    """What the config's section `distill` asks for."""
    section = config.distill
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": section.beta}[section.loss]
    return Distillation(
        beta, section.temperature, section.ce_weight, section.top_k, section.tail, config.loss.chunk_size
    )


def distill_loss(options: Distillation, *, noise_alpha: float = 0.0) -> LossFn:
    """The loss: a sum over the live labels, and their number; see `divergence`.

    A mixture of experts adds the losses of its routers while it trains.

    Args:
      options: what is computed.
      noise_alpha: noise on the embeddings while training (NEFTune); 0: none.
    """

    def loss_fn(model: nnx.Module, batch: Batch, rng: jax.Array | None) -> Loss:
        hidden, router, targets, ways = hidden_and_targets(model, batch, rng, noise_alpha)
        known = (batch.get(f"teacher_{name}") for name in ("logps", "ids", "rest"))
        teacher = TeacherTokens(*(x if x is None else to_zigzag(x, ways) for x in known))
        weight: jax.Array | float = options.ce_weight
        if "on_policy" in batch:  # nothing is to be learned from one's own tokens but what the teacher says of them
            weight = jnp.where(batch["on_policy"] > 0, 0.0, weight)
        found = divergence(
            hidden,
            model.head(),  # type: ignore[attr-defined]
            targets,
            teacher,
            beta=options.beta,
            temperature=options.temperature,
            ce_weight=weight,
            tail=options.tail,
            softcap=logit_cap(model),
            chunk_size=options.chunk_size,
        )
        count = found.count
        metrics: dict[str, Metric] = {
            "kl": (found.kl, count),
            "nll": (found.nll, count),
            "entropy": (found.entropy, count),
            "mean_token_accuracy": (found.correct, count),
            "agreement": (found.agreement, count),
            "packing_efficiency": filled(batch["segment_ids"]),
        }
        for name in ("teacher_nll", "teacher_entropy"):
            metrics[name] = (batch[name].sum().astype(count.dtype), count)
        if "on_policy" in batch:
            metrics["on_policy"] = (batch["on_policy"].sum(), jnp.int32(batch["on_policy"].size))
        loss = found.loss
        if rng is not None:
            loss, metrics = with_router_losses(model, router, targets, loss, metrics)
        elif "bytes" in batch:
            metrics["_bytes"] = (batch["bytes"].sum(), jnp.int32(1))
        return Loss(loss, count, metrics)

    return loss_fn


def teacher_numbers(options: Distillation) -> Callable[[nnx.Module, Batch], Batch]:
    """`function(teacher, batch) -> teacher_... [A, b, ...]` of a batch [A, b, ...], micro-batch after micro-batch."""

    def one(model: nnx.Module, micro: Batch) -> Batch:
        images = images_of(model if isinstance(model, Decoder) else None, micro)
        seen = {} if images is None else {"images": images}
        hidden = model.hidden(  # type: ignore[attr-defined]
            micro["input_ids"], position_ids=micro["position_ids"], segment_ids=micro["segment_ids"], **seen
        )
        scores = teacher_scores(
            hidden,
            model.head(),  # type: ignore[attr-defined]
            next_token(micro["labels"]),
            top_k=options.top_k,
            temperature=options.temperature,
            softcap=logit_cap(model),
            chunk_size=options.chunk_size,
        )
        return {f"teacher_{name}": x for name, x in scores._asdict().items() if x is not None}

    return lambda model, batch: jax.lax.map(lambda micro: one(model, micro), batch)


def known_names(options: Distillation, vocab: int) -> tuple[str, ...]:
    """What `teacher_numbers` gives, by name.

    Args:
      options: what is computed.
      vocab: tokens that there are.
    """
    some = ("teacher_ids", "teacher_rest") if 0 < options.top_k < vocab else ()
    return ("teacher_logps", *some, "teacher_nll", "teacher_entropy")
