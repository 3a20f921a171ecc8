"""Losses of preferences as functions of log-probabilities of whole completions.

Legend: B pairs (or single completions, for KTO). A log-probability is a sum over the tokens of a completion; the losses
that are defined on means divide by the number of tokens themselves. Names, formulas and signs are TRL's (1.16).

Every loss is one number a pair, so that a batch may be cut anywhere. Two things are properties of the whole global
batch and come from outside: the partners of AOT's sorted samples (`Partners`) and KTO's estimate of the divergence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

REVERSE_KL = "reverse_kl"
F_DIVERGENCES = (REVERSE_KL, "forward_kl", "js_divergence", "alpha_divergence")


class PairLogps(NamedTuple):
    """Log-probabilities of pairs, [B] each.

    Attributes:
      chosen, rejected: of the policy.
      ref_chosen, ref_rejected: of the reference; zeros for the losses without one.
      chosen_tokens, rejected_tokens: tokens of the completions.
    """

    chosen: jax.Array
    rejected: jax.Array
    ref_chosen: jax.Array
    ref_rejected: jax.Array
    chosen_tokens: jax.Array
    rejected_tokens: jax.Array

    @property
    def chosen_logratios(self) -> jax.Array:
        return self.chosen - self.ref_chosen

    @property
    def rejected_logratios(self) -> jax.Array:
        return self.rejected - self.ref_rejected


class Partners(NamedTuple):
    """What AOT compares each pair with: the sample of the same rank in the other sorted list, [B] each.

    Attributes:
      of_ratio: (`aot`) the reference's log-ratio of the rank that the pair's own log-ratio has.
      of_chosen: (`aot_unpaired`) the rejected log-ratio of the rank of the pair's chosen one.
      of_rejected: (`aot_unpaired`) the chosen log-ratio of the rank of the pair's rejected one.
    """

    of_ratio: jax.Array
    of_chosen: jax.Array
    of_rejected: jax.Array


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """Numbers of the losses; the names are TRL's.

    Attributes:
      beta: strength of the tie to the reference (IPO: tau; ORPO: lambda).
      label_smoothing: probability that a label is wrong.
      f_divergence_type, f_alpha_divergence_coef: divergence that the reward is derived from (f-DPO, Wang et al. 2023).
      discopop_tau: temperature of DiscoPOP's mixture.
      simpo_gamma: SimPO's target margin.
      alpha: of AlphaPO's reward (1 - p^-alpha) / alpha, for SimPO and CPO; 0: log p.
      desirable_weight, undesirable_weight: of KTO's two kinds of completions.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    f_divergence_type: str = REVERSE_KL
    f_alpha_divergence_coef: float = 0.5
    discopop_tau: float = 0.05
    simpo_gamma: float = 0.5
    alpha: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


PairLoss = Callable[[PairLogps, LossOptions, Partners | None], jax.Array]


def _smoothed(logits: jax.Array, smoothing: float) -> jax.Array:
    """-log sigmoid of logits whose label is wrong with probability `smoothing`."""
    return -jax.nn.log_sigmoid(logits) * (1 - smoothing) - jax.nn.log_sigmoid(-logits) * smoothing


def _score(logratios: jax.Array, options: LossOptions) -> jax.Array:
    """f'(policy / reference), whose difference is the reward margin (Wang et al. 2023, arXiv:2309.16240, table 1)."""
    if options.f_divergence_type == "forward_kl":
        return 1 - jnp.exp(-logratios)
    if options.f_divergence_type == "js_divergence":
        return math.log(2) + jax.nn.log_sigmoid(logratios)
    power = options.f_alpha_divergence_coef - 1.0
    if options.f_divergence_type == "alpha_divergence" and abs(power) >= 1e-6:  # at 1 the limit is log t
        return (jnp.exp(jnp.minimum(power * logratios, 80.0)) - 1.0) / power
    return logratios


def _delta(pairs: PairLogps, options: LossOptions) -> jax.Array:
    return _score(pairs.chosen_logratios, options) - _score(pairs.rejected_logratios, options)


def _mean_delta(pairs: PairLogps, options: LossOptions) -> jax.Array:
    """The difference of scores a token."""
    chosen = _score(pairs.chosen_logratios, options) / jnp.maximum(pairs.chosen_tokens, 1)
    return chosen - _score(pairs.rejected_logratios, options) / jnp.maximum(pairs.rejected_tokens, 1)


def sigmoid(pairs: PairLogps, options: LossOptions, _: Partners | None = None) -> jax.Array:
    """DPO (Rafailov et al. 2023, arXiv:2305.18290, eq. 7): -log sigmoid(beta (chosen - rejected log-ratio))."""
    return -jax.nn.log_sigmoid(options.beta * _delta(pairs, options))


def sigmoid_norm(pairs: PairLogps, options: LossOptions, _: Partners | None = None) -> jax.Array:
    """DPO of log-ratios a token."""
    return -jax.nn.log_sigmoid(options.beta * _mean_delta(pairs, options))


def hinge(pairs: PairLogps, options: LossOptions, _: Partners | None = None) -> jax.Array:
    """RSO (Liu et al. 2023, arXiv:2309.06657, eq. 4) and SLiC."""
    return jax.nn.relu(1 - options.beta * _delta(pairs, options))


def ipo(pairs: PairLogps, options: LossOptions, _: Partners | None = None) -> jax.Array:
    """IPO (Azar et al. 2023, arXiv:2310.12036, eq. 17), of log-ratios a token, as its authors compute it."""
    return jnp.square(_mean_delta(pairs, options) - 1 / (2 * options.beta))


def exo_pair(pairs: PairLogps, options: LossOptions, _: Partners | None = None) -> jax.Array:
    """EXO-pref (Ji et al. 2024, arXiv:2402.00856, eq. 16): KL(softmax of rewards || (1 - eps, eps))."""
    logits = options.beta * _delta(pairs, options)
    won, lost = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    log_p, log_q = math.log1p(-options.label_smoothing), math.log(options.label_smoothing)
    return jnp.exp(won) * (won - log_p) + jnp.exp(lost) * (lost - log_q)


def nca_pair(pairs: PairLogps, options: LossOptions, _: Partners | None = None) -> jax.Array:
    """NCA (Chen et al. 2024, arXiv:2402.05369), of a pair."""
    chosen, rejected = options.beta * pairs.chosen_logratios, options.beta * pairs.rejected_logratios
    log = jax.nn.log_sigmoid
    return -log(chosen) - 0.5 * log(-chosen) - 0.5 * log(-rejected)


def robust(pairs: PairLogps, options: LossOptions, _: Partners | None = None) -> jax.Array:
    """Robust DPO (Chowdhury et al. 2024, arXiv:2403.00409, eq. 12)."""
    logits, smoothing = options.beta * _delta(pairs, options), options.label_smoothing
    clean = -(1 - smoothing) * jax.nn.log_sigmoid(logits)
    return (clean + smoothing * jax.nn.log_sigmoid(-logits)) / (1 - 2 * smoothing)


def bco_pair(pairs: PairLogps, options: LossOptions, _: Partners | None = None) -> jax.Array:
    """BCO (Jung et al. 2024, arXiv:2404.04656) of a pair, without the reward's shift."""
    log = jax.nn.log_sigmoid
    return -log(options.beta * pairs.chosen_logratios) - log(-options.beta * pairs.rejected_logratios)


def sppo_hard(pairs: PairLogps, options: LossOptions, _: Partners | None = None) -> jax.Array:
    """SPPO (Wu et al. 2024, arXiv:2405.00675, eq. 4.7) with probabilities 1 and 0."""
    margin = 0.5 / options.beta
    return jnp.square(pairs.chosen_logratios - margin) + jnp.square(pairs.rejected_logratios + margin)


def aot(pairs: PairLogps, options: LossOptions, partners: Partners | None = None) -> jax.Array:
    """AOT (Melnyk et al. 2024, arXiv:2406.05882, eq. 8), paired: sorted log-ratios of policy and reference compared."""
    partners = find_partners(pairs) if partners is None else partners
    ratio = pairs.chosen - pairs.rejected
    return _smoothed(options.beta * (ratio - partners.of_ratio), options.label_smoothing)


def aot_unpaired(pairs: PairLogps, options: LossOptions, partners: Partners | None = None) -> jax.Array:
    """AOT (eq. 7), unpaired: sorted log-ratios of chosen and of rejected completions compared.

    The value of a pair is that of its chosen completion's rank. Its gradient is that of both of its completions, whose
    partners are in other pairs: the sum over the batch has the gradient of the sum of sorted differences.
    """
    partners = find_partners(pairs) if partners is None else partners
    beta, smoothing = options.beta, options.label_smoothing
    of_chosen = _smoothed(beta * (pairs.chosen_logratios - partners.of_chosen), smoothing)
    of_rejected = _smoothed(beta * (partners.of_rejected - pairs.rejected_logratios), smoothing)
    return of_chosen + of_rejected - jax.lax.stop_gradient(of_rejected)


def apo_zero(pairs: PairLogps, options: LossOptions, _: Partners | None = None) -> jax.Array:
    """APO-zero (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7)."""
    chosen, rejected = options.beta * pairs.chosen_logratios, options.beta * pairs.rejected_logratios
    return jax.nn.sigmoid(-chosen) + jax.nn.sigmoid(rejected)


def apo_down(pairs: PairLogps, options: LossOptions, _: Partners | None = None) -> jax.Array:
    """APO-down (arXiv:2408.06266, eq. 8)."""
    chosen, rejected = options.beta * pairs.chosen_logratios, options.beta * pairs.rejected_logratios
    return jax.nn.sigmoid(chosen) + jax.nn.sigmoid(rejected - chosen)


def discopop(pairs: PairLogps, options: LossOptions, _: Partners | None = None) -> jax.Array:
    """DiscoPOP (Lu et al. 2024, arXiv:2406.08414, eq. 5)."""
    logits = options.beta * _delta(pairs, options)
    mixture = jax.nn.sigmoid(logits / options.discopop_tau)
    return -jax.nn.log_sigmoid(logits) * (1 - mixture) + jnp.exp(-logits) * mixture


def sft(pairs: PairLogps, options: LossOptions, _: Partners | None = None) -> jax.Array:
    """Nothing of a pair: this loss is the cross-entropy of the chosen completions a token (`Kind.nll`)."""
    return jnp.zeros_like(pairs.chosen)


def orpo(pairs: PairLogps, options: LossOptions, _: Partners | None = None) -> jax.Array:
    """The odds-ratio part of ORPO (Hong et al. 2024, arXiv:2403.07691, eq. 6 and 7), of log-probabilities a token."""
    return -options.beta * jax.nn.log_sigmoid(log_odds_ratio(pairs))


def log_odds_ratio(pairs: PairLogps) -> jax.Array:
    """log odds(chosen) - log odds(rejected), of mean log-probabilities [B]."""
    chosen, rejected = mean_logps(pairs)
    return (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))


def cpo(pairs: PairLogps, options: LossOptions, _: Partners | None = None) -> jax.Array:
    """The preference part of CPO (Xu et al. 2024, arXiv:2401.08417, eq. 3)."""
    chosen, rejected = cpo_rewards(pairs.chosen, pairs.rejected, options)
    return _smoothed(options.beta * (chosen - rejected), options.label_smoothing)


def simpo(pairs: PairLogps, options: LossOptions, _: Partners | None = None) -> jax.Array:
    """SimPO (Meng et al. 2024, arXiv:2405.14734, eq. 6), of log-probabilities a token."""
    chosen, rejected = cpo_rewards(*mean_logps(pairs), options)
    return _smoothed(options.beta * (chosen - rejected) - options.simpo_gamma, options.label_smoothing)


def cpo_rewards(chosen: jax.Array, rejected: jax.Array, options: LossOptions) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities as rewards without beta: themselves, or AlphaPO's (Gupta et al. 2025, arXiv:2501.03884)."""
    if not options.alpha:
        return chosen, rejected
    return tuple(-jnp.expm1(-options.alpha * x) / options.alpha for x in (chosen, rejected))  # type: ignore[return-value]


def mean_logps(pairs: PairLogps) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities a token of chosen and rejected completions, [B] each."""
    return pairs.chosen / jnp.maximum(pairs.chosen_tokens, 1), pairs.rejected / jnp.maximum(pairs.rejected_tokens, 1)


@dataclasses.dataclass(frozen=True)
class Kind:
    """One value of `dpo.loss_type`.

    Attributes:
      loss: one number a pair.
      reference: whether it reads the reference's log-probabilities.
      divergence: whether other divergences than reverse KL are defined for it.
      nll: whether it adds the cross-entropy a token of the chosen completions (orpo: of the whole chosen sequences).
      sorts: whether it compares sorted samples of the batch.
    """

    loss: PairLoss
    reference: bool = True
    divergence: bool = False
    nll: bool = False
    sorts: bool = False


KINDS: dict[str, Kind] = {
    "sigmoid": Kind(sigmoid, divergence=True),
    "hinge": Kind(hinge, divergence=True),
    "ipo": Kind(ipo, divergence=True),
    "exo_pair": Kind(exo_pair, divergence=True),
    "nca_pair": Kind(nca_pair),
    "robust": Kind(robust, divergence=True),
    "bco_pair": Kind(bco_pair),
    "sppo_hard": Kind(sppo_hard),
    "aot": Kind(aot, sorts=True),
    "aot_unpaired": Kind(aot_unpaired, sorts=True),
    "apo_zero": Kind(apo_zero),
    "apo_down": Kind(apo_down),
    "discopop": Kind(discopop, divergence=True),
    "sft": Kind(sft, divergence=True, nll=True),
    "sigmoid_norm": Kind(sigmoid_norm, divergence=True),
    "orpo": Kind(orpo, reference=False, nll=True),
    "simpo": Kind(simpo, reference=False, nll=True),
    "cpo": Kind(cpo, reference=False, nll=True),
}
"""Every loss of pairs."""

UNPAIRED = ("kto", "apo_zero_unpaired")
"""Losses of single completions."""


def find_partners(pairs: PairLogps, live: jax.Array | None = None) -> Partners:
    """AOT's partners within these pairs.

    Args:
      pairs: all pairs of a batch.
      live: which of them are rows and not filling [B]; None: all.
    """
    live = jnp.ones(pairs.chosen.shape, bool) if live is None else live

    def of(samples: jax.Array, others: jax.Array) -> jax.Array:
        # Filling sorts behind everything in both lists, and is its own partner.
        samples, others = (jnp.where(live, x, jnp.inf) for x in (samples, others))
        rank = jnp.argsort(jnp.argsort(samples))
        return jnp.where(live, jnp.sort(others)[rank], 0.0)

    return jax.tree.map(
        jax.lax.stop_gradient,
        Partners(
            of_ratio=of(pairs.chosen - pairs.rejected, pairs.ref_chosen - pairs.ref_rejected),
            of_chosen=of(pairs.chosen_logratios, pairs.rejected_logratios),
            of_rejected=of(pairs.rejected_logratios, pairs.chosen_logratios),
        ),
    )


def kto(
    logratios: jax.Array, desirable: jax.Array, kl: jax.Array | float, options: LossOptions, *, kind: str = "kto"
) -> jax.Array:
    """KTO (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 7) of single completions, or APO-zero's unpaired form.

    Args:
      logratios: of policy and reference [B].
      desirable: whether a completion is wanted, bool [B].
      kl: estimate of the divergence of the policy from the reference, not below 0; see `kto_kl`.
      options: beta and the weights of both kinds.
      kind: kto | apo_zero_unpaired (which has no use for kl).

    Returns:
      One number a completion [B].
    """
    shift = jax.lax.stop_gradient(kl) if kind == "kto" else 0.0
    logits = options.beta * (logratios - shift)
    wanted = options.desirable_weight * jax.nn.sigmoid(-logits)
    return jnp.where(desirable, wanted, options.undesirable_weight * jax.nn.sigmoid(logits))


def kto_kl(logratios: jax.Array, live: jax.Array) -> jax.Array:
    """KTO's estimate: the mean log-ratio of mismatched prompts and completions [B], at least 0 (a scalar)."""
    mean = jnp.where(live, logratios, 0.0).sum() / jnp.maximum(live.sum(), 1)
    return jax.lax.stop_gradient(jnp.maximum(mean, 0.0))


def bradley_terry(
    chosen: jax.Array, rejected: jax.Array, margin: jax.Array | None = None, center_rewards_coefficient: float = 0.0
) -> jax.Array:
    """The loss of a reward model (Ouyang et al. 2022, eq. 1): -log sigmoid(chosen - rejected - margin), one a pair.

    Args:
      chosen, rejected: rewards [B].
      margin: how much better the chosen one is [B] (Touvron et al. 2023, eq. 2).
      center_rewards_coefficient: weight of (chosen + rejected)^2 (Eisenstein et al. 2023, arXiv:2312.09244, eq. 2).
    """
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    loss = -jax.nn.log_sigmoid(difference)
    return loss + center_rewards_coefficient * jnp.square(chosen + rejected) if center_rewards_coefficient else loss


def _log1mexp(x: jax.Array) -> jax.Array:
    """log(1 - exp(x)) for x <= 0, exact at both ends."""
    # The branch that is not taken must not be infinite: its gradient would be NaN.
    x = jnp.minimum(x, -jnp.finfo(x.dtype).tiny)
    near = x > -math.log(2)
    return jnp.where(near, jnp.log(-jnp.expm1(jnp.where(near, x, -1.0))), jnp.log1p(-jnp.exp(jnp.where(near, -1.0, x))))
