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
    """down(act(gate(x)) * up(x)), or down(gelu(up(x))). GELU is the tanh approximation, as in GPT-2 and Gemma.

    Args:
      config: the decoder.
      keys: three keys, for the gate (if there is one), up and down kernels.
      dtype: type of the parameters.
    """

    def __init__(self, config: DecoderConfig, keys: jax.Array, dtype: jnp.dtype):
        std, bias = config.initializer_range, config.mlp_bias
        embed, mlp = (("embed", config.hidden_size),), (("mlp", config.intermediate_size),)
        self.activation = config.activation
        if config.gated:
            self.gate_proj = Projection(keys[0], std, embed, mlp, bias=bias, dtype=dtype)
        self.up_proj = Projection(keys[1], std, embed, mlp, bias=bias, dtype=dtype)
        self.down_proj = Projection(keys[2], std, mlp, embed, bias=bias, dtype=dtype)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """[B, L, D] -> [B, L, D]."""
        names = ("batch", "sequence", "mlp")
        if self.activation == "gelu":
            h = jax.nn.gelu(constrain(self.up_proj(x_BLD), *names), approximate=True)
        else:
            up, gate = (constrain(y, *names) for y in project((self.up_proj, self.gate_proj), x_BLD))
            h = (jax.nn.silu(gate) if self.activation == "swiglu" else jax.nn.gelu(gate, approximate=True)) * up
        return checkpoint_name(self.down_proj(h), remat.OUT)
