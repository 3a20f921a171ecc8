"""Gemma 1, 2 and 3 (text): norms with a factor of 1 + scale, embeddings times the root of D, GeGLU."""

from __future__ import annotations

from typing import Any

from jtrain.errors import ConfigError
from jtrain.models.config import DecoderConfig
from jtrain.models.families import blocks
from jtrain.models.families.fields import Fields
from jtrain.models.families.keys import Tensor
from jtrain.models.families.llama import DEFAULTS, Llama
from jtrain.models.families.rope_schema import read_scaling, write_scaling
from jtrain.models.families.translation import SIZES, TANH_GELU, layer_kinds, read_windows

_NAMES = SIZES | {"head_dim": "head_dim", "attention_bias": "attention_bias"}
_FIXED = {"norm_unit_offset": True, "activation": "geglu"}


class Gemma(Llama):
    """Gemma 1."""

    model_type = "gemma"
    architectures = ("GemmaForCausalLM",)
    names = _NAMES
    defaults = DEFAULTS | {
        "vocab_size": 256_000,
        "hidden_size": 3072,
        "intermediate_size": 24_576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    fixed = _FIXED
    # "gelu" in the first folders was meant as its tanh form, and transformers takes it so.
    only = {"hidden_act": (*TANH_GELU, "gelu"), "hidden_activation": (TANH_GELU[0], None, *TANH_GELU)}

    def read(self, fields: Fields) -> dict[str, Any]:
        return {"embedding_multiplier": fields.get("hidden_size") ** 0.5}


class Gemma2(Llama):
    """Gemma 2: a norm before and after each block, soft caps, every other layer slides."""

    model_type = "gemma2"
    architectures = ("Gemma2ForCausalLM",)
    names = _NAMES | {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }
    defaults = Gemma.defaults | {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    fixed = _FIXED | {"norm_position": "sandwich"}
    only = {"hidden_activation": TANH_GELU}

    def read(self, fields: Fields) -> dict[str, Any]:
        kinds = [self._kind(fields, n) for n in range(fields.get("num_hidden_layers"))]
        fields.seen |= {"hidden_act", "cache_implementation", "sliding_window_size"}  # hidden_activation is what counts
        return {
            "embedding_multiplier": fields.get("hidden_size") ** 0.5,
            "attention_scale": fields.get("query_pre_attn_scalar") ** -0.5,
            **read_windows(fields, fields.get("sliding_window"), kinds),
        }

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        scale = config.attention_scale
        return {
            "query_pre_attn_scalar": config.head_size if scale is None else round(scale**-2),
            "layer_types": layer_kinds(config),
            # transformers builds the mask of a window even where no layer slides
            "sliding_window": config.sliding_window or config.max_position_embeddings,
        }

    def _kind(self, fields: Fields, n: int) -> str:
        return "full_attention" if n % 2 else "sliding_attention"

    def norms(self, layer: blocks.Layer) -> list[Tensor]:
        return [
            *blocks.norm(layer, "input_layernorm", "attention_norm"),
            *blocks.norm(layer, "post_attention_layernorm", "post_attention_norm"),
            *blocks.norm(layer, "pre_feedforward_layernorm", "mlp_norm"),
            *blocks.norm(layer, "post_feedforward_layernorm", "post_mlp_norm"),
        ]


class Gemma3Text(Gemma2):
    """Gemma 3: norms on queries and keys, one full layer in six, a base of its own for the sliding ones."""

    model_type = "gemma3_text"
    architectures = ("Gemma3ForCausalLM",)
    defaults = Gemma2.defaults | {
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    }
    fixed = Gemma2.fixed | {"qk_norm": "head"}

    def _kind(self, fields: Fields, n: int) -> str:
        pattern = fields.hf.get("_sliding_window_pattern") or fields.get("sliding_window_pattern")
        return "sliding_attention" if (n + 1) % pattern else "full_attention"

    def read_positions(self, fields: Fields) -> dict[str, Any]:
        """`rope_parameters` has one entry a kind of layer; before, `rope_scaling` was that of the full ones."""
        new, old = fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}
        full, local = {**(new.get("full_attention") or {}), **old}, new.get("sliding_attention") or {}
        if set(new) - {"full_attention", "sliding_attention"} or local.get("rope_type", "default") != "default":
            raise ConfigError(
                f"config.json: rope_parameters is {new!r}",
                "Write entries for full_attention and for sliding_attention, the latter of rope_type default.",
            )
        theta, base = fields.get("rope_theta"), fields.get("rope_local_base_freq")
        return {
            "rope_theta": full.get("rope_theta") or theta,
            "rope_local_base_freq": local.get("rope_theta") or base,
            "rope_scaling": read_scaling(fields, full, {}),
        }

    def write_positions(self, config: DecoderConfig) -> dict[str, Any]:
        scaling = write_scaling(config)
        local = config.rope_theta if config.rope_local_base_freq is None else config.rope_local_base_freq
        return {
            "rope_theta": config.rope_theta,
            "rope_local_base_freq": local,
            "rope_scaling": scaling,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", **(scaling or {}), "rope_theta": config.rope_theta},
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            },
        }


class Gemma3(Gemma3Text):
    """The text part of a Gemma 3 with pictures. What is written is a text model."""

    model_type = "gemma3"
    architectures = ("Gemma3ForConditionalGeneration",)
    ignored = (*Gemma3Text.ignored, r"(model\.)?(vision_tower|multi_modal_projector)\..*")

    def decoder_config(self, hf: dict[str, Any]) -> DecoderConfig:
        text = hf.get("text_config") or {}
        return super().decoder_config({"quantization_config": hf.get("quantization_config"), **text})

    def hf_config(self, config: DecoderConfig) -> dict[str, Any]:
        named = {"model_type": Gemma3Text.model_type, "architectures": list(Gemma3Text.architectures)}
        return super().hf_config(config) | named

    def rename(self, key: str) -> str:
        """transformers 4: `language_model.model.…`; 5: `model.language_model.…`."""
        key = key.removeprefix("language_model.")
        return super().rename(key.replace("model.language_model.", "model.", 1))
