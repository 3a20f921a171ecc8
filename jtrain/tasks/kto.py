"""The loss of single completions on a model: KTO, and APO-zero's unpaired form.

The batch has the arrays of `jtrain.data.pairs.SingleRows` and, when the loss sees it (`jtrain/tasks/prepared.py`),
ref_logps [b] of the reference and, for KTO, kl [b]: the estimate of the divergence over the global batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jtrain.data.rows import IGNORE
from jtrain.models.decoder import Decoder
from jtrain.tasks.preference import Batch, Preference, Sequences, score_sequences, shifted
from jtrain.tasks.preference_losses import kto
from jtrain.tasks.router_losses import router_losses
from jtrain.train.loss import Loss, LossFn, Metric


def single_sequences(batch: Batch, prefix: str = "") -> Sequences:
    """The sequences of a micro-batch of single completions; with the prefix `kl_` the mismatched ones."""
    targets = shifted(batch[f"{prefix}labels"], IGNORE)
    ids, positions, segments = (batch[f"{prefix}{name}"] for name in ("input_ids", "position_ids", "segment_ids"))
    return Sequences(ids, positions, segments, targets, targets != IGNORE, None, batch["row"])


def kto_loss(preference: Preference) -> LossFn:
    """The loss: a sum over completions, and their number. The one kind of the preference is kto or its relative."""
    kind, options = preference.kinds[0], preference.options

    def loss_fn(model: nnx.Module, batch: Batch, rng: jax.Array | None) -> Loss:
        scores, router = score_sequences(model, single_sequences(batch), rng=rng, chunk_size=preference.chunk_size)
        live, wanted = scores.tokens > 0, batch["label"]
        logratios = jnp.where(live, scores.logps - batch["ref_logps"].astype(scores.logps.dtype), 0.0)
        kl = batch["kl"].astype(logratios.dtype) if "kl" in batch else jnp.zeros_like(logratios)
        each = jnp.where(live, kto(logratios, wanted, kl, options, kind=kind), 0.0)
        loss, count = each.sum(), live.sum(dtype=jnp.int32)

        def over(mask: jax.Array, x: jax.Array, n: jax.Array) -> Metric:
            return jnp.where(mask, x, 0.0).sum(), jnp.where(mask, n, 0).sum(dtype=jnp.int32)

        one = jnp.ones_like(scores.tokens)
        metrics: dict[str, Metric] = {"entropy": over(live, scores.entropy, scores.tokens)}
        if kind == "kto":
            metrics["kl"] = over(live, kl, one)
        for half, mask in (("chosen", live & wanted), ("rejected", live & ~wanted)):
            metrics[f"rewards/{half}"] = over(mask, options.beta * logratios, one)
            metrics[f"logps/{half}"] = over(mask, scores.logps, one)
            metrics[f"logits/{half}"] = over(mask, scores.logits, scores.tokens)
        metrics = jax.tree.map(jax.lax.stop_gradient, metrics)
        if rng is not None and router is not None and isinstance(model, Decoder):
            added, of_routers = router_losses(model.config, router, live)
            loss, metrics = loss + added.astype(loss.dtype), metrics | of_routers
        return Loss(loss, count, metrics)

    return loss_fn


def margins(figures: dict[str, float | None], prefix: str = "") -> dict[str, float]:
    """`rewards/margins`: the difference of the mean rewards, where both kinds of completions are there."""
    chosen, rejected = (figures.get(f"{prefix}rewards/{half}") for half in ("chosen", "rejected"))
    return {} if chosen is None or rejected is None else {f"{prefix}rewards/margins": chosen - rejected}
