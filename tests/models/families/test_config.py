"""config.json in and out: both RoPE schemas, what is refused by name, what is warned of."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jtrain.errors import ConfigError
from jtrain.models import families
from jtrain.models.config import DecoderConfig
from jtrain.models.families import FAMILIES, family, family_of
from jtrain.models.families.translation import of_function
from jtrain.models.presets import PRESETS
from jtrain.models.rope_scaling import RopeScaling

from . import published
from .folders import NAMES, folder


def read(hf: dict, **changes) -> DecoderConfig:
    hf = {key: value for key, value in (hf | changes).items() if value != "absent"}
    return family(hf["model_type"]).decoder_config(hf)


@pytest.fixture
def warnings(caplog) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, logger="jtrain.models.families"):
        yield caplog


# --- there and back


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_reads_as_the_same_decoder(name, warnings):
    one = folder(name)
    config = one.family.decoder_config(one.hf)
    written = json.loads(json.dumps(one.family.hf_config(config)))
    assert written["architectures"] == one.hf["architectures"]
    assert one.family.decoder_config(written) == config
    assert not warnings.records


@pytest.mark.parametrize("name", published.ALL)
def test_configs_of_transformers_4_are_read_and_written(name, warnings):
    hf = published.ALL[name]
    config = read(hf)
    assert not warnings.records
    written = family(hf["model_type"]).hf_config(config)
    assert family(written["model_type"]).decoder_config(written) == config
    for key in (
        "vocab_size",
        "hidden_size",
        "rms_norm_eps",
        "num_hidden_layers",
        "intermediate_size",
        "sliding_window",
    ):
        if key in hf and (key != "sliding_window" or hf.get("use_sliding_window", True)):
            assert written[key] == hf[key], key


@pytest.mark.parametrize("schema", ["4", "5"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt2"])
def test_each_rope_schema_alone_says_the_same(name, schema):
    one = folder(name)
    written = one.family.hf_config(one.config)
    older = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "rotary_emb_base")
    drop = ("rope_parameters",) if schema == "4" else (*older, "rotary_pct")
    assert read(written, **dict.fromkeys(drop, "absent")) == one.family.decoder_config(one.hf)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_family(name):
    one = family_of(PRESETS[name])
    assert of_function(one.decoder_config(one.hf_config(PRESETS[name]))) == of_function(PRESETS[name])


def test_a_decoder_goes_to_the_family_that_most_programs_read():
    plain = DecoderConfig(64, 16, 32, 2, 4, num_key_value_heads=2)
    assert family_of(plain).model_type == "llama"
    assert family_of(plain.replace(sliding_window=8)).model_type == "mistral"
    assert family_of(plain.replace(attention_bias=True, attention_out_bias=False)).model_type == "qwen2"
    assert family_of(plain.replace(qk_norm="head", remat="none", dropout=0.1)).model_type == "qwen3"
    assert family_of(plain.replace(num_experts=4, router_z_loss_coef=0.1)).model_type == "mixtral"
    assert family_of(plain.replace(num_experts=4, norm_topk_prob=False, qk_norm="head")).model_type == "qwen3_moe"
    assert family_of(plain.replace(no_rope_layers=(1, 0))).model_type == "smollm3"


def test_a_decoder_that_no_family_has_is_refused_by_its_fields():
    odd = DecoderConfig(64, 16, 32, 2, 4, activation="geglu", residual_multiplier=0.5)
    with pytest.raises(ConfigError, match=r"model\.activation 'geglu'|model\.residual_multiplier 0\.5"):
        family_of(odd)


# --- fields


def test_llama_31():
    config = read(published.LLAMA_31_8B)
    assert config.rope_scaling == RopeScaling(factor=8.0, original_length=8192)
    assert (config.rope_theta, config.head_dim, config.num_key_value_heads) == (500_000.0, 128, 8)


def test_a_gemma_3_with_pictures_gives_its_text_model():
    config = read(published.GEMMA_3_4B)
    # transformers 4.50's defaults for what the file leaves out
    assert (config.vocab_size, config.num_attention_heads, config.num_key_value_heads) == (262_208, 8, 4)
    assert config.rope_scaling == RopeScaling(rope_type="linear", factor=8.0)
    assert (config.rope_theta, config.rope_local_base_freq) == (1e6, 1e4)
    assert [n for n, window in enumerate(config.windows) if window is None] == [5, 11, 17, 23, 29]
    assert config.embedding_multiplier == 2560**0.5 and config.head_dim == 256
    assert family("gemma3").hf_config(config)["model_type"] == "gemma3_text"


def test_deepseek_v3_multiplies_its_scores_for_yarn():
    config = read(published.DEEPSEEK_V3)
    # 0.1 * ln(40) + 1 = 1.3688879, squared
    assert config.attention_scale == pytest.approx(192**-0.5 * 1.873854, rel=1e-5)
    assert (config.n_group, config.topk_group, config.first_k_dense_replace) == (8, 4, 3)


def test_longrope_takes_its_factor_from_the_two_lengths():
    config = read(published.PHI_35_MINI)
    assert config.rope_scaling.factor == 32.0 and config.rope_scaling.original_length == 4096
    written = family("phi3").hf_config(config)
    # transformers 4 refuses a fourth field
    assert written["rope_scaling"].keys() == {"type", "short_factor", "long_factor"}
    early = {**published.PHI_35_MINI["rope_scaling"], "type": "su"}
    assert read(published.PHI_35_MINI, rope_scaling=early) == config


def test_windows_by_layer():
    assert read(published.GEMMA_2_9B).windows == (4096, None) * 21
    assert read(published.GPT_OSS_20B).windows == (128, None) * 12
    assert read(published.MISTRAL_7B).windows == (4096,) * 32
    assert read(published.QWEN25_7B).windows == (None,) * 28
    slides = read(published.QWEN25_7B, use_sliding_window=True, sliding_window=100, max_window_layers=26)
    assert slides.windows == (None,) * 26 + (100,) * 2


def test_gpt2_and_pythia():
    gpt2, pythia = read(published.GPT2_SMALL), read(published.PYTHIA_410M)
    assert (gpt2.intermediate_size, gpt2.activation, gpt2.position_embedding) == (3072, "gelu", "learned")
    assert gpt2.tie_word_embeddings and gpt2.attention_bias and gpt2.out_bias
    assert gpt2.dropout == 0.0  # a folder's rates are not taken over
    assert (pythia.rotary_size, pythia.activation, pythia.parallel_residual) == (16, "gelu_exact", True)


# --- refused


@pytest.mark.parametrize(
    ("hf", "changes", "named"),
    [
        (published.LLAMA_31_8B, {"hidden_act": "relu"}, "hidden_act is 'relu'"),
        (published.LLAMA_31_8B, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        (published.LLAMA_31_8B, {"rope_scaling": {"rope_type": "linear"}}, "no factor"),
        (published.LLAMA_31_8B, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (published.LLAMA_31_8B, {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 500000.0"),
        (published.LLAMA_31_8B, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "kind of layer"),
        (published.LLAMA_31_8B, {"num_key_value_heads": 5}, "num_key_value_heads 5"),
        (published.LLAMA_31_8B, {"partial_rotary_factor": 0.5}, "turns whole heads"),
        (published.LLAMA_31_8B, {"hidden_size": "4096"}, "hidden_size is '4096'"),
        (published.LLAMA_31_8B, {"vocab_size": None}, "vocab_size is None"),
        (published.LLAMA_31_8B, {"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        (published.LLAMA_31_8B, {"rope_theta": "1e6"}, "wrong kind"),
        (published.GPT_OSS_20B, {"layer_types": ["chunked_attention"] * 24}, "chunked_attention"),
        (published.GPT_OSS_20B, {"sliding_window": None}, "no window"),
        (published.GPT_OSS_20B, {"layer_types": ["full_attention"]}, "names 1 layers of 24"),
        (published.GEMMA_2_9B, {"query_pre_attn_scalar": 0}, "wrong kind"),
        (published.QWEN3_30B_A3B, {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]"),
        (published.QWEN3_30B_A3B, {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        (published.QWEN3_30B_A3B, {"num_experts": 0, "num_local_experts": 0}, "num_experts is 0"),
        (published.GEMMA_2_9B, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (published.GPT2_SMALL, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (published.GPT2_SMALL, {"add_cross_attention": True}, "add_cross_attention"),
        (published.GPT2_SMALL, {"activation_function": "relu"}, "activation_function"),
        (published.PHI_35_MINI, {"rope_scaling": {"type": "longrope", "long_factor": [1.0] * 48}}, "short_factor"),
        (published.DEEPSEEK_V3, {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        (published.DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        (published.DEEPSEEK_V3, {"attention_bias": True}, "attention_bias"),
        (published.GEMMA_3_4B, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_what_would_change_the_function_is_refused_by_name(hf, changes, named):
    with pytest.raises(ConfigError, match=named) as error:
        read(hf, **changes)
    assert error.value.remedy


def test_an_unknown_key_is_warned_of_and_a_harmless_one_is_not(warnings):
    read(published.LLAMA_31_8B, use_cache=False, torch_dtype="float16", _attn_implementation="eager", new=None)
    assert not warnings.records
    read(published.LLAMA_31_8B, attention_temperature=2.0)
    assert "attention_temperature=2.0" in warnings.records[0].getMessage()


def test_an_unknown_family_names_the_known_ones_and_the_way_for_ones_own():
    with pytest.raises(ConfigError, match=r"'qwen2_5'") as error:
        family("qwen2_5")
    assert "Did you mean 'qwen2'" in error.value.remedy
    assert all(name in error.value.remedy for name in FAMILIES) and "docs/models.md" in error.value.remedy
    with pytest.raises(ConfigError, match=r"\['llama'\]"):
        family(["llama"])


def test_the_family_of_the_docs_works(monkeypatch):
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "MyLlama" in block)
    monkeypatch.setattr(families, "FAMILIES", dict(FAMILIES))
    exec(code, {})
    one = family("my_llama")
    config = read(published.LLAMA_31_8B, model_type="my_llama")
    assert config.qk_norm == "full"
    assert "model.layers.0.self_attn.q_norm.weight" in {tensor.key for tensor in one.tensors(config)}
    assert family_of(config) is one  # no family of ours has this, and none with experts passes for it
    with pytest.raises(ConfigError, match="attention_bias"):
        read(published.LLAMA_31_8B, model_type="my_llama", attention_bias=True)


def test_every_family_stands_in_the_docs():
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert all(f"`{name}`" in text for name in FAMILIES)
