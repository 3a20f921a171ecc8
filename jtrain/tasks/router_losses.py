"""What the routers of a mixture of experts add to a loss, and the figures that are logged of them."""

from __future__ import annotations

import jax

from jtrain.models.config import DecoderConfig
from jtrain.models.router import RouterFigures
from jtrain.train.loss import Metric


def router_losses(
    config: DecoderConfig, figures: RouterFigures, count_B: jax.Array
) -> tuple[jax.Array, dict[str, Metric]]:
    """Load-balancing losses and router z-losses as a sum over rows, each weighed by what it counts for.

    A row's figures are means over its tokens. Multiplied by the row's targets they join the sum of cross-entropies,
    which is divided once by the targets of the whole batch: the weights mean the same with packing, padding, masked
    prompts, accumulation and on every mesh.

    Args:
      config: the decoder.
      figures: of the rows.
      count_B: what each row counts for in the loss: its targets.

    Returns:
      What is added to the loss's sum (the layers' losses added up, times their coefficients), and the metrics
      `aux_loss` and `router_z_loss` (means over the layers, without coefficients) and, where experts have a capacity,
      `dropped_tokens` (share of the assignments).
    """
    weight_B = count_B.astype(figures.balance.dtype)
    balance, z = (figures.balance * weight_B).sum(), (figures.z * weight_B).sum()
    added = config.router_aux_loss_coef * balance + config.router_z_loss_coef * z
    layers, count = config.num_expert_layers, weight_B.sum()
    metrics = {"aux_loss": (balance / layers, count), "router_z_loss": (z / layers, count)}
    if config.expert_capacity_factor:
        metrics["dropped_tokens"] = (figures.dropped.sum(), figures.load.sum())
    return added, jax.tree.map(jax.lax.stop_gradient, metrics)
