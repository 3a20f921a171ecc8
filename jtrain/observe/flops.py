"""Model FLOPs of a decoder and model FLOPs utilisation (MFU), by the two conventions in use.

A matrix product of [m, k] by [k, n] is 2·m·k·n FLOPs; the backward pass is twice the forward. Recomputation (remat) is
not counted: these are the FLOPs that the model needs; `jtrain.observe.hlo` counts those that the machine does.

- **causal**: matrix products that really are needed. A token attends to itself and what stands before it: (L+1)/2
  keys on average, fewer where a layer has a window. The embedding's look-up is no product.
- **legacy**: 6·N + 12·layers·heads·head_dim·L a token (PaLM, Chowdhery et al. 2022, appendix B; nanoGPT, torchtitan),
  as if every token attended to the whole row. N is every parameter that a token uses but an untied embedding table.
"""

from __future__ import annotations

from dataclasses import dataclass

from jtrain.models.config import DecoderConfig
from jtrain.models.counts import attention_product_count

BACKWARD_AND_FORWARD = 3
"""FLOPs of a training step in units of its forward pass."""


@dataclass(frozen=True)
class TokenFlops:
    """Training FLOPs (forward and backward) of one token.

    Attributes:
      causal: what the mathematics needs.
      legacy: the 6N convention, for comparison with figures published by others.
    """

    causal: float
    legacy: float


def matmul_parameters(shape: DecoderConfig) -> int:
    """Parameters that a token is multiplied with: projections, feed-forward, head; no embedding look-up, no norms.

    Of the routed experts those that a token goes through, the router whole.
    """
    matrices = 3 if shape.gated else 2
    dense = matrices * shape.hidden_size * shape.intermediate_size
    used = shape.num_experts_per_tok + shape.n_shared_experts
    experts = matrices * shape.hidden_size * shape.expert_size * used + shape.hidden_size * shape.num_experts
    feed_forward = shape.num_dense_layers * dense + shape.num_expert_layers * experts
    return (
        shape.num_hidden_layers * attention_product_count(shape) + feed_forward + shape.hidden_size * shape.vocab_size
    )


def decoder_flops(shape: DecoderConfig, length: int, *, parameters: int | None = None) -> TokenFlops:
    """Training FLOPs per token of a row.

    Args:
      shape: the decoder.
      length: L, tokens of a row. Packed documents are not told apart: attention is counted over the row.
      parameters: N of the legacy convention; by default `matmul_parameters` (norms and biases are < 0.1 % of it).
    """
    multiplied = matmul_parameters(shape)
    # Scores and weighted values: 2·keys·width FLOPs each.
    widths = shape.num_attention_heads * (shape.head_size + shape.value_size)
    causal_attention = sum(2 * _mean_keys(length, window) * widths for window in shape.windows)
    full_attention = 2 * length * widths * shape.num_hidden_layers
    return TokenFlops(
        causal=BACKWARD_AND_FORWARD * (2 * multiplied + causal_attention),
        legacy=BACKWARD_AND_FORWARD * (2 * (multiplied if parameters is None else parameters) + full_attention),
    )


def _mean_keys(length: int, window: int | None) -> float:
    """Keys that a token of a row sees on average."""
    if window is None or window >= length:
        return (length + 1) / 2
    return (window * (window + 1) / 2 + (length - window) * window) / length


def mfu(flops_per_token: float | None, tokens_per_second_per_device: float | None, peak: float | None) -> float | None:
    """Model FLOPs utilisation, a ratio (0.41 is 41 %); None when one of the three is unknown.

    Args:
      flops_per_token: training FLOPs of a token by either convention.
      tokens_per_second_per_device: tokens/s of one device.
      peak: FLOP/s that one device can do at best.
    """
    if flops_per_token is None or tokens_per_second_per_device is None or not peak:
        return None
    return flops_per_token * tokens_per_second_per_device / peak
