"""The decoder of a run with the adapters that `model.lora` asks for."""

from __future__ import annotations

from collections.abc import Callable

from flax import nnx

from jtrain.config.schema import LoraConfig
from jtrain.models.config import DecoderConfig
from jtrain.models.decoder import Decoder
from jtrain.models.lora import Lora, add_lora


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
