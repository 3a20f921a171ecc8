"""Reading a config.json: what was asked for, what is refused, what carries nothing, and what nobody knows."""

from __future__ import annotations

import logging
from typing import Any

from jtrain.errors import ConfigError

log = logging.getLogger("jtrain.models.families")

HARMLESS = frozenset(
    """
    architectures attn_implementation attention_dropout attn_pdrop auto_map bad_words_ids begin_suppress_tokens
    bos_token_id boi_token_index boi_token_id chunk_size_feed_forward classifier_dropout cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size
    eoi_token_index eoi_token_id eos_token_id ep_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout id2label image_token_index
    image_token_id initial_context_length is_decoder label2id length_penalty max_length min_length mm_tokens_per_image
    model_type n_ctx no_repeat_ngram_size num_beam_groups num_beams num_labels num_mtp_layers num_nextn_predict_layers
    num_return_sequences output_attentions output_hidden_states output_router_logits output_scores pad_token_id prefix
    pretraining_tp problem_type pruned_heads remove_invalid_values reorder_and_upcast_attn repetition_penalty
    resid_pdrop return_dict return_dict_in_generate sep_token_id seq_aux summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    typical_p unsloth_version unsloth_fixed use_bfloat16 use_cache
    """.split()  # noqa: SIM905
)
"""Keys that change no logit: token ids, types, dropout (`model.dropout` is ours to set), settings of generation."""

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "quantization_config": (
        (None,),
        "Quantised weights are not read. Load the folder with transformers, call model.dequantize() (gpt-oss: load it "
        "with quantization_config=Mxfp4Config(dequantize=True)) and save_pretrained; or take the unquantised folder.",
    ),
    "use_bidirectional_attention": ((None, False), "jtrain has causal attention only."),
    "is_encoder_decoder": ((None, False), "jtrain has decoders only."),
    "add_cross_attention": ((None, False), "jtrain has decoders only."),
}
"""Keys of every family: the values that may stand, and what to do about others."""


class Fields:
    """The keys of a config.json, with transformers' defaults for those that are not there.

    Args:
      hf: the config.json.
      defaults: what transformers takes for an absent key.
    """

    def __init__(self, hf: dict[str, Any], defaults: dict[str, Any]):
        self.hf, self.defaults = hf, defaults
        self.seen: set[str] = set()
        for key, (allowed, remedy) in REFUSED.items():
            self.only(key, allowed, remedy)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key. An explicit null stays None."""
        self.seen.add(key)
        return self.hf.get(key, self.defaults.get(key, default))

    def only(self, key: str, allowed: tuple[Any, ...], remedy: str | None = None) -> Any:
        """The value of a key that may have certain ones alone.

        Raises:
          ConfigError: it has another.
        """
        value = self.get(key, allowed[0])
        if value not in allowed:
            choices = " or ".join(repr(one) for one in allowed)
            raise ConfigError(
                f"config.json: {key} is {value!r}, and jtrain does {choices} for {self.hf.get('model_type')} only",
                remedy or "The model would compute something else; there is no setting for it.",
            )
        return value

    def finish(self) -> None:
        """Warns of keys that no one has asked for and that are not known to be harmless."""
        unknown = sorted(
            key
            for key, value in self.hf.items()
            if key not in self.seen and key not in HARMLESS and not key.startswith("_") and value is not None
            if not (value is False and key.endswith("_bias"))
        )
        if unknown:
            log.warning(
                "config.json of %s: unknown keys are not taken into account: %s. If one of them changes what the model "
                "computes, the logits will differ",
                self.hf.get("model_type"),
                ", ".join(f"{key}={self.hf[key]!r}" for key in unknown),
            )
