"""The router: which experts a token goes through, with what weight, and the losses that keep the experts busy.

Legend: B rows, L tokens, E experts, k experts a token.

All figures are **per row** [B]: a mean over the row's tokens, padding left out. Whoever builds the loss weighs the rows
(pretraining: by their targets), adds them up and divides once, as with every loss here, so that neither accumulation
nor the mesh changes a number.

Load balancing, with f_i the share of the row's assignments that fall to expert i and P_i the mean of its normalised
score (softmax, or score / sum of scores):

    balance = E · sum_i f_i · P_i        1 where both are even, E where one expert takes all

This is Switch Transformer's loss (Fedus et al. 2022, eq. 4-6: N · sum_i f_i · P_i) with k choices, taken over a row in
place of a device's batch; and DeepSeek-V3's sequence-wise loss (2024, eq. 17-20: sum_i f_i · P_i with
f_i = E / (k·T) · count_i), which it equals. What counts for f_i is where tokens really go: with a balancing bias, the
choice with it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jtrain.models.config import DecoderConfig


class Routing(NamedTuple):
    """What a router decides.

    Attributes:
      expert: int32 [B, L, k], the chosen experts, best first.
      weight: [B, L, k], what their results are multiplied by; float32 at least.
      share: [B, L, E], scores that add up to 1; float32 at least.
    """

    expert: jax.Array
    weight: jax.Array
    share: jax.Array


def route(config: DecoderConfig, logits_BLE: jax.Array, bias_E: jax.Array | None) -> Routing:
    """Chooses the experts of every token.

    Softmax: Mixtral (Jiang et al. 2024, section 2.1) and Qwen3. Sigmoid: DeepSeek-V3, eq. 12-16, where the bias decides
    on the choice and has no part in the weight. Ties go to the lower number.
    """
    score = jax.nn.softmax(logits_BLE) if config.scoring_func == "softmax" else jax.nn.sigmoid(logits_BLE)
    choice = jax.lax.stop_gradient(score if bias_E is None else score + bias_E.astype(score.dtype))
    if config.n_group > 1:
        choice = _of_best_groups(choice, config.n_group, config.topk_group)
    expert = jax.lax.top_k(choice, config.num_experts_per_tok)[1]
    weight = jnp.take_along_axis(score, expert, axis=-1)
    if config.norm_topk_prob:
        weight = weight / (weight.sum(-1, keepdims=True) + 1e-20)  # DeepSeek's guard; softmax does not need it
    share = score if config.scoring_func == "softmax" else score / (score.sum(-1, keepdims=True) + 1e-20)
    return Routing(expert.astype(jnp.int32), weight * config.routed_scaling_factor, share)


def _of_best_groups(choice_BLE: jax.Array, groups: int, kept: int) -> jax.Array:
    """Scores with -inf outside of the best groups; a group counts as the sum of its two best experts.

    DeepSeek-V3 (2024), section 2.1.2, node-limited routing, and its reference code.
    """
    by_group = choice_BLE.reshape(*choice_BLE.shape[:-1], groups, -1)
    best = jax.lax.top_k(jax.lax.top_k(by_group, 2)[0].sum(-1), kept)[1]
    live = (best[..., None] == jnp.arange(groups)).any(-2)[..., None]
    return jnp.where(live, by_group, -jnp.inf).reshape(choice_BLE.shape)


class RouterLoad(nnx.Variable):
    """int32 [layers, E]: assignments of this step so far, by expert."""


class RouterBias(nnx.Variable):
    """float32 [layers, E]: what balances without a loss. Constant within a step."""


def balance_step(
    bias_NE: jax.Array | None, load_NE: jax.Array, rate: float
) -> tuple[jax.Array | None, dict[str, jax.Array]]:
    """Moves the bias of every expert by `rate`, up where its load was below the mean of its layer, down where above.

    DeepSeek-V3 (2024, section 2.1.2); Wang et al. 2024, "Auxiliary-loss-free load balancing", algorithm 1.

    Returns:
      The new bias, and the figure `expert_load_max`: the largest load over the mean of its layer, over all layers.
    """
    load_NE = load_NE.astype(jnp.float32)
    mean_N1 = load_NE.mean(-1, keepdims=True)
    largest = (load_NE.max(-1, keepdims=True) / jnp.maximum(mean_N1, 1e-9)).max()
    moved = None if bias_NE is None else bias_NE + rate * jnp.sign(mean_N1 - load_NE)
    return moved, {"expert_load_max": largest}


class RouterFigures(NamedTuple):
    """What layers add up on their way, per row.

    Attributes:
      balance: [B], load-balancing losses, one added per layer.
      z: [B], router z-losses, the same: mean of log(sum(exp(logits)))^2 (ST-MoE, Zoph et al. 2022, eq. 5).
      load: [B, layers, E], assignments that fall to each expert, before any is dropped.
      dropped: [B], assignments that found no place, over all layers.
    """

    balance: jax.Array
    z: jax.Array
    load: jax.Array
    dropped: jax.Array

    @staticmethod
    def zeros(config: DecoderConfig, rows: int, dtype: jnp.dtype) -> RouterFigures:
        """Before the first layer."""
        none = jnp.zeros(rows, dtype)
        return RouterFigures(none, none, jnp.zeros((rows, config.num_expert_layers, config.num_experts), dtype), none)

    def add(self, layer: jax.Array, other: RouterFigures) -> RouterFigures:
        """With the figures of one layer (its `load` is [B, E]), whose number among those with experts is `layer`."""
        at_N1 = (jnp.arange(self.load.shape[1]) == layer)[:, None]
        load = self.load + jnp.where(at_N1, other.load[:, None], 0)
        return RouterFigures(self.balance + other.balance, self.z + other.z, load, self.dropped + other.dropped)
