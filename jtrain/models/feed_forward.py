"""Feed-forward: gated (SwiGLU, GeGLU; Shazeer 2020, eq. 6) or plain with GELU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jtrain.models import remat
from jtrain.models.config import DecoderConfig
from jtrain.models.projection import Projection, project
from jtrain.ops.logical import constrain


class FeedForward(nnx.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))).

    Args:
      config: the decoder.
      keys: three keys, for the gate (if there is one), up and down kernels.
      dtype: type of the parameters.
    """

    def __init__(self, config: DecoderConfig, keys: jax.Array, dtype: jnp.dtype):
        std, bias = config.initializer_range, config.mlp_bias
        embed, mlp = (("embed", config.hidden_size),), (("mlp", config.intermediate_size),)
        self.config = config
        if config.gated:
            self.gate_proj = Projection(keys[0], std, embed, mlp, bias=bias, dtype=dtype)
        self.up_proj = Projection(keys[1], std, embed, mlp, bias=bias, dtype=dtype)
        self.down_proj = Projection(keys[2], std, mlp, embed, bias=bias, dtype=dtype)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """[B, L, D] -> [B, L, D]."""
        names = ("batch", "sequence", "mlp")
        if self.config.gated:
            up, gate = (constrain(y, *names) for y in project((self.up_proj, self.gate_proj), x_BLD))
        else:
            up, gate = constrain(self.up_proj(x_BLD), *names), None
        return checkpoint_name(self.down_proj(activate(self.config, up, gate)), remat.OUT)


def activate(config: DecoderConfig, up: jax.Array, gate: jax.Array | None) -> jax.Array:
    """What is projected down; `gate` is None where there is none.

    GELU is the tanh approximation, as in GPT-2 and Gemma, but for `gelu_exact` and
    CLIP's `quick_gelu`, x * sigmoid(1.702 x) (Hendrycks and Gimpel 2016, section 2). `swiglu_clamped` is gpt-oss'
    (OpenAI 2025, reference code): (up + 1) * gate * sigmoid(alpha * gate), both cut off at `swiglu_limit`, the gate
    from above only.
    """
    if gate is None:
        if config.activation == "quick_gelu":
            return up * jax.nn.sigmoid(1.702 * up)
        return jax.nn.gelu(up, approximate=config.activation == "gelu")
    if config.activation == "swiglu_clamped":
        limit = config.swiglu_limit
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(config.swiglu_alpha * gate)
    return (jax.nn.silu(gate) if config.activation == "swiglu" else jax.nn.gelu(gate, approximate=True)) * up
