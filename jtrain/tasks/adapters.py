"""The decoder of a run with the adapters that `model.lora` asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jtrain.checkpoint import arrays
from jtrain.checkpoint.parameters import load_parameters
from jtrain.config.schema import LoraConfig
from jtrain.models.config import DecoderConfig
from jtrain.models.decoder import Decoder
from jtrain.models.lora import ADAPTER, Lora, add_lora, plain_parameters
from jtrain.parallel.sharding import make_rules
from jtrain.train.model import FunctionalModel, functional_model
from jtrain.train.precision import precision_policy
from jtrain.train.state import StatePlan, plan_state


def lora_of(section: LoraConfig) -> Lora | None:
    """The adapters of the config's section; None where its rank is 0."""
    if not section.rank:
        return None
    return Lora(
        rank=section.rank,
        alpha=section.alpha,
        dropout=section.dropout,
        targets=section.targets,
        rslora=section.rslora,
        dora=section.dora,
        quantization=section.base if section.base in ("int8", "nf4") else None,  # type: ignore[arg-type]
        dtype={"keep": None, "bf16": "bfloat16"}.get(section.base, "auto"),
    )


def decoder_factory(shape: DecoderConfig, lora: Lora | None) -> Callable[[nnx.Rngs], Decoder]:
    """A function of `rngs` that builds the decoder. Adapters draw after it: they change none of its numbers."""

    def build(rngs: nnx.Rngs) -> Decoder:
        decoder = Decoder(shape, rngs)
        if lora is not None:
            add_lora(decoder, lora, key=rngs.params())
        return decoder

    return build


def load_merged(path: str, shape: DecoderConfig, lora: Lora, params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a run with adapters as those of the plain decoder, the adapters merged into their kernels.

    Args:
      path: RUN, or one of its checkpoints.
      shape: the decoder.
      lora: what the run has beside it.
      params: path -> shape, type and sharding of what is wanted.

    Raises:
      CheckpointError: there is no intact checkpoint, or one of another model.
    """
    model = functional_model(decoder_factory(shape, lora))
    raw = load_parameters(path, _plan(model, params).abstract.params, cast=True)
    variables = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), model.variables)

    def merged(raw: Any) -> dict[str, Any]:
        whole = arrays.flatten(plain_parameters(model.merge(raw, variables)))
        return {path: whole[path].astype(leaf.dtype) for path, leaf in params.items()}

    return jax.jit(merged, out_shardings={path: leaf.sharding for path, leaf in params.items()})(raw)


def load_adapters(path: str, shape: DecoderConfig, lora: Lora) -> dict[str, np.ndarray]:
    """The adapters of a run, on the host in float32: `<projection>/lora_a` and so on, as the run has them.

    Raises:
      CheckpointError: there is no intact checkpoint, or one of another model.
    """
    flat = arrays.flatten(functional_model(decoder_factory(shape, lora)).params)
    wanted = {path: leaf for path, leaf in flat.items() if path.rpartition("/")[2] in ADAPTER}
    loaded = load_parameters(path, wanted, cast=True, partial=True)
    return {path: np.asarray(array, np.float32) for path, array in loaded.items()}


def _plan(model: FunctionalModel, params: dict[str, Any]) -> StatePlan:
    mesh = next(iter(params.values())).sharding.mesh
    return plan_state(model, optax.identity(), mesh, make_rules(), precision_policy("32-true"))
