"""The loss of pairs on a model: DPO and its relatives, ORPO, SimPO, CPO.

Legend: A micro-batches, b pairs of one, R = 2 b sequences (chosen and rejected in turn, so that both halves of a pair
lie on one device), L tokens.

What a micro-batch can't know by itself stands in the batch when the loss sees it (`jtrain/tasks/prepared.py`):
  ref_chosen_logps, ref_rejected_logps [b]  of the reference
  partner_ratio, partner_chosen, partner_rejected [b]  of AOT (`preference_losses.Partners`)
  nll_scale [b]  pairs of the global batch / tokens of its cross-entropy: a mean over tokens joins a mean over pairs
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jtrain.data.rows import IGNORE
from jtrain.models.decoder import Decoder
from jtrain.models.router import RouterFigures
from jtrain.ops.token_scores import token_scores
from jtrain.ops.zigzag import to_zigzag, zigzag_order
from jtrain.tasks.preference_losses import (
    KINDS,
    UNPAIRED,
    LossOptions,
    PairLogps,
    Partners,
    cpo_rewards,
    log_odds_ratio,
    mean_logps,
)
from jtrain.tasks.router_losses import router_losses
from jtrain.train.loss import Loss, LossFn, Metric

Batch = dict[str, jax.Array]
HALVES = ("chosen", "rejected")


@dataclasses.dataclass(frozen=True)
class Preference:
    """What is computed of pairs.

    Attributes:
      kinds: values of `preference_losses.KINDS`; those without a reference stand alone.
      weights: of each.
      options: numbers of the losses.
      ld_alpha: weight of tokens behind the length that both completions have (LD-DPO, Liu et al. 2024,
        arXiv:2409.06411, eq. 10); None: 1.
      use_weighting: pairs are weighed by the policy's probability of them (WPO, Zhou et al. 2024, arXiv:2406.11827).
      cpo_alpha: weight of the cross-entropy of cpo and simpo.
      chunk_size: see `token_scores`.
    """

    kinds: tuple[str, ...] = ("sigmoid",)
    weights: tuple[float, ...] = (1.0,)
    options: LossOptions = dataclasses.field(default_factory=LossOptions)
    ld_alpha: float | None = None
    use_weighting: bool = False
    cpo_alpha: float = 0.0
    chunk_size: int | None = None

    @property
    def unpaired(self) -> bool:
        """Whether single completions are scored."""
        return self.kinds[0] in UNPAIRED

    @property
    def needs_reference(self) -> bool:
        return self.unpaired or any(KINDS[kind].reference for kind in self.kinds)

    @property
    def sorts(self) -> bool:
        """Whether pairs of the whole batch are compared with each other."""
        return not self.unpaired and any(KINDS[kind].sorts for kind in self.kinds)

    @property
    def nll_weight(self) -> float:
        """Of the cross-entropy a token."""
        of_kind = {"sft": 1.0, "orpo": 1.0, "cpo": self.cpo_alpha, "simpo": self.cpo_alpha}
        return sum(w * of_kind.get(kind, 0.0) for kind, w in zip(self.kinds, self.weights, strict=True))

    @property
    def nll_of_prompts(self) -> bool:
        """Whether the cross-entropy is that of whole chosen sequences."""
        return "orpo" in self.kinds


class Sequences(NamedTuple):
    """Sequences to be scored [R, L]; `targets` and `weight` stand where the prediction is made.

    Attributes:
      targets: what each place predicts, IGNORE: nothing.
      completion: True where the target belongs to a completion.
      weight: of the log-probability of the target; None: 1 on completions.
      row: global number of each sequence [R].
    """

    input_ids: jax.Array
    position_ids: jax.Array
    segment_ids: jax.Array
    targets: jax.Array
    completion: jax.Array
    weight: jax.Array | None
    row: jax.Array


class SequenceScores(NamedTuple):
    """Sums over the completion of each sequence [R], but for the last two, which are over all targets.

    Attributes:
      logps: log-probabilities, weighed.
      tokens: number of tokens.
      entropy, logits, correct: of the tokens; see `TokenScores`.
      aligned: log-probabilities less the log of the sum of squared probabilities (WPO).
      nll, targets: cross-entropy, and how many tokens it is of.
    """

    logps: jax.Array
    tokens: jax.Array
    entropy: jax.Array
    logits: jax.Array
    correct: jax.Array
    aligned: jax.Array
    nll: jax.Array
    targets: jax.Array


def score_sequences(
    model: nnx.Module,
    sequences: Sequences,
    *,
    rng: jax.Array | None = None,
    chunk_size: int | None = None,
    figures: bool = True,
) -> tuple[SequenceScores, RouterFigures | None]:
    """Scores sequences, and what the routers did.

    Args:
      model: a decoder, or any module with `hidden` and `head`.
      sequences: what is scored.
      rng: key of the step while training, else None.
      chunk_size: see `token_scores`.
      figures: False: log-probabilities, tokens and cross-entropy alone.
    """
    decoder = model if isinstance(model, Decoder) else None
    # A sum does not mind the order of its terms: tokens go where every device of `context` does the same work.
    ways = 1 if decoder is None else decoder.balanced_ways(sequences.input_ids.shape[1])
    weight = sequences.completion.astype(jnp.float32) if sequences.weight is None else sequences.weight
    ids, positions, segments, targets, completion, weight = (
        to_zigzag(x, ways) for x in (*sequences[:4], sequences.completion, weight)
    )
    arguments: dict[str, Any] = {"position_ids": positions, "segment_ids": segments, "rng": rng, "row": sequences.row}
    with zigzag_order(ways):
        if decoder is not None:
            hidden, router = decoder.hidden_and_router(ids, **arguments, deterministic=rng is None)
        else:
            hidden, router = model.hidden(ids, **arguments, deterministic=rng is None), None  # type: ignore[attr-defined]
    cap = None if decoder is None else decoder.config.final_logit_softcapping
    scores = token_scores(
        hidden,
        model.head(),  # type: ignore[attr-defined]
        targets,
        softcap=cap,
        chunk_size=chunk_size,
        figures=figures,
    )

    def over_completion(x: jax.Array) -> jax.Array:
        return jnp.where(completion, x, 0.0).sum(1)

    return SequenceScores(
        logps=(scores.logps * weight.astype(scores.logps.dtype)).sum(1),
        tokens=completion.sum(1, dtype=jnp.int32),
        entropy=over_completion(scores.entropy),
        logits=over_completion(scores.mean_logits),
        correct=over_completion(scores.correct),
        aligned=over_completion(scores.logps - scores.log_sum_sq_probs),
        nll=-scores.logps.sum(1),
        targets=(targets != IGNORE).sum(1, dtype=jnp.int32),
    ), router


def shifted(x_RL: jax.Array, fill: Any) -> jax.Array:
    """What stands one place to the right [R, L]: where it is predicted."""
    return jnp.pad(x_RL[:, 1:], ((0, 0), (0, 1)), constant_values=fill)


def pair_sequences(batch: Batch, preference: Preference) -> Sequences:
    """The sequences of a micro-batch's pairs: chosen and rejected in turn."""

    def both(name: str) -> jax.Array:
        x = jnp.stack([batch[f"chosen_{name}"], batch[f"rejected_{name}"]], axis=1)
        return x.reshape(-1, x.shape[-1])

    ids, segments, targets = both("input_ids"), both("segment_ids"), shifted(both("labels"), IGNORE)
    completion = targets != IGNORE
    if preference.nll_of_prompts:  # every token of a chosen sequence is a target
        live = shifted(segments, 0) > 0
        chosen = jnp.arange(len(ids))[:, None] % 2 == 0
        targets = jnp.where(chosen & live & (segments > 0), shifted(ids, IGNORE), targets)
    weight = None
    if preference.ld_alpha is not None:
        place, lengths = completion.cumsum(1), completion.sum(1)
        shared = jnp.repeat(lengths.reshape(-1, 2).min(1), 2)[:, None]
        weight = jnp.where(place <= shared, 1.0, preference.ld_alpha) * completion
    row = (2 * batch["row"][:, None] + jnp.arange(2, dtype=batch["row"].dtype)).reshape(-1)
    return Sequences(ids, both("position_ids"), segments, targets, completion, weight, row)


def halves(x_R: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[R] as chosen and rejected [b]."""
    pairs = x_R.reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def pair_logps(scores: SequenceScores, batch: Batch) -> tuple[PairLogps, jax.Array]:
    """The pairs, and which of them are rows and not filling [b]. Filling gets numbers that no loss stumbles over."""
    chosen_tokens, rejected_tokens = halves(scores.tokens)
    live = (chosen_tokens > 0) & (rejected_tokens > 0)
    chosen, rejected = halves(scores.logps)
    none = jnp.zeros_like(chosen)
    ref_chosen, ref_rejected = (batch.get(f"ref_{half}_logps", none).astype(none.dtype) for half in HALVES)
    chosen, rejected, ref_chosen, ref_rejected = (
        jnp.where(live, x, -1.0) for x in (chosen, rejected, ref_chosen, ref_rejected)
    )
    return PairLogps(chosen, rejected, ref_chosen, ref_rejected, chosen_tokens, rejected_tokens), live


def preference_loss(preference: Preference) -> LossFn:
    """The loss: a sum over pairs, and their number.

    In training the cross-entropy of the chosen sequences is added with `nll_scale`; in evaluation it is the metric
    `nll_loss` alone, and `evaluation_loss` adds the two means.
    """
    options, weight = preference.options, preference.nll_weight

    def loss_fn(model: nnx.Module, batch: Batch, rng: jax.Array | None) -> Loss:
        training = rng is not None
        sequences = pair_sequences(batch, preference)
        scores, router = score_sequences(model, sequences, rng=rng, chunk_size=preference.chunk_size)
        pairs, live = pair_logps(scores, batch)
        partners = Partners(*(batch[f"partner_{name}"] for name in PARTNERS)) if preference.sorts else None
        per_pair = jnp.zeros_like(pairs.chosen)
        for kind, share in zip(preference.kinds, preference.weights, strict=True):
            per_pair += share * KINDS[kind].loss(pairs, options, partners)
        if preference.use_weighting:
            means = jax.lax.stop_gradient(scores.aligned / jnp.maximum(scores.tokens, 1))
            per_pair *= jnp.exp(sum(halves(means)))
        loss, count = jnp.where(live, per_pair, 0.0).sum(), live.sum(dtype=jnp.int32)
        metrics = _figures(preference, pairs, live, scores)
        if weight:
            nll, targets = (jnp.where(live, halves(x)[0], 0) for x in (scores.nll, scores.targets))
            metrics["nll_loss"] = (jax.lax.stop_gradient(nll).sum(), targets.sum())
            if training:
                loss += weight * (nll * batch["nll_scale"].astype(nll.dtype)).sum()
        if training and router is not None and isinstance(model, Decoder):
            share = jnp.repeat(live, 2) * 0.5
            added, of_routers = router_losses(model.config, router, share)
            loss, metrics = loss + added.astype(loss.dtype), metrics | of_routers
        return Loss(loss, count, metrics)

    return loss_fn


PARTNERS = ("ratio", "chosen", "rejected")
"""Names in a batch of the fields of `Partners`."""


def _figures(preference: Preference, pairs: PairLogps, live: jax.Array, scores: SequenceScores) -> dict[str, Metric]:
    """Metrics with TRL's names and definitions: means over pairs, and over the tokens of completions."""
    kind, options = preference.kinds[0], preference.options
    chosen, rejected = pairs.chosen, pairs.rejected
    if kind in ("orpo", "simpo"):
        chosen, rejected = mean_logps(pairs)
    if KINDS[kind].reference:
        rewards = pairs.chosen_logratios, pairs.rejected_logratios
    else:
        rewards = cpo_rewards(chosen, rejected, options) if kind != "orpo" else (chosen, rejected)
    count = live.sum(dtype=jnp.int32)

    def over_pairs(x: jax.Array) -> Metric:
        return jnp.where(live, x, 0).astype(jnp.float32).sum(), count

    def over_tokens(x_R: jax.Array) -> tuple[Metric, Metric]:
        found = zip(halves(x_R), halves(scores.tokens), strict=True)
        first, second = ((jnp.where(live, x, 0.0).sum(), jnp.where(live, n, 0).sum()) for x, n in found)
        return first, second

    won, lost = (options.beta * x for x in rewards)
    (entropy, n), (rejected_entropy, m) = over_tokens(scores.entropy)
    logits = over_tokens(scores.logits)
    metrics = {
        "rewards/chosen": over_pairs(won),
        "rewards/rejected": over_pairs(lost),
        "rewards/accuracies": over_pairs(won > lost),
        "rewards/margins": over_pairs(won - lost),
        "logps/chosen": over_pairs(chosen),
        "logps/rejected": over_pairs(rejected),
        "logits/chosen": logits[0],
        "logits/rejected": logits[1],
        "entropy": (entropy + rejected_entropy, n + m),
        "mean_token_accuracy": over_tokens(scores.correct)[0],
    }
    if kind == "orpo":
        odds = log_odds_ratio(pairs)
        metrics |= {"log_odds_chosen": over_pairs(odds), "log_odds_ratio": over_pairs(jax.nn.log_sigmoid(odds))}
    return jax.tree.map(jax.lax.stop_gradient, metrics)


def evaluation_loss(sums: dict[str, tuple[float, float]], nll_weight: float) -> dict[str, float]:
    """`eval_loss` with its mean over tokens, where the loss has one."""
    (loss, pairs), (nll, tokens) = sums["loss"], sums.get("nll_loss", (0.0, 0.0))
    if not pairs or not tokens:
        return {}
    return {"eval_loss": loss / pairs + nll_weight * nll / tokens}
