"""SmolLM3: Llama with layers that do not turn by position."""

from __future__ import annotations

from typing import Any

from jtrain.models.config import DecoderConfig
from jtrain.models.families.fields import Fields
from jtrain.models.families.llama import DEFAULTS, Llama
from jtrain.models.families.translation import layer_kinds, read_windows


class SmolLM3(Llama):
    """SmolLM3."""

    model_type = "smollm3"
    architectures = ("SmolLM3ForCausalLM",)
    defaults = DEFAULTS | {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    }

    def read(self, fields: Fields) -> dict[str, Any]:
        count, interval = fields.get("num_hidden_layers"), fields.get("no_rope_layer_interval")
        turns = fields.get("no_rope_layers") or [int((n + 1) % interval != 0) for n in range(count)]
        window = fields.get("sliding_window") if fields.get("use_sliding_window") else None
        fields.seen.add("max_window_layers")
        kinds = ["full_attention" if turn or window is None else "sliding_attention" for turn in turns[:count]]
        return {"no_rope_layers": tuple(turns[:count]), **read_windows(fields, window, kinds)}

    def write(self, config: DecoderConfig) -> dict[str, Any]:
        return {
            "no_rope_layers": list(config.no_rope_layers or (1,) * config.num_hidden_layers),
            "use_sliding_window": config.sliding_window is not None,
            "sliding_window": config.sliding_window,
            "layer_types": layer_kinds(config),
        }
