import subprocess
import sys

import pytest

from jtrain.errors import ConfigError
from jtrain.models.counts import parameter_count
from jtrain.models.presets import PRESETS, preset

PUBLISHED = {
    # Parameters in the published model cards or checkpoint indexes.
    "gpt2-124m": 124_439_808,
    "gpt2-1.5b": 1_557_611_200,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name):
    assert parameter_count(preset(name)) == PUBLISHED[name]


def test_active_parameters_are_those_that_a_token_meets():
    # "46.7B total parameters but only uses 12.9B parameters per token" (Mistral AI, December 2023); 30.5B and 3.3B
    # (Qwen3's model card). DeepSeek-V3: 671B and 37B (its report).
    assert parameter_count(preset("mixtral-8x7b"), active=True) / 1e9 == pytest.approx(12.9, abs=0.05)
    assert parameter_count(preset("qwen3-30b-a3b"), active=True) / 1e9 == pytest.approx(3.3, abs=0.06)
    deepseek = preset("deepseek-v3")
    assert parameter_count(deepseek) / 1e9 == pytest.approx(671, abs=0.5)
    assert parameter_count(deepseek, active=True) / 1e9 == pytest.approx(37, abs=1)


def test_the_smallest_preset_trains_in_minutes_on_a_laptop():
    assert 1.0e6 < parameter_count(preset("llama-tiny")) < 1.3e6


def test_a_preset_named_by_its_size_has_that_size():
    for name in PRESETS:
        if name.startswith("llama-") and name.endswith("m"):
            assert parameter_count(preset(name)) / 1e6 == pytest.approx(float(name[6:-1]), rel=0.12), name


def test_fields_that_are_set_replace_the_presets():
    config = preset("llama3.2-3b", num_hidden_layers=2, vocab_size=None)
    assert (config.num_hidden_layers, config.vocab_size, config.head_size) == (2, 128_256, 128)


def test_another_width_drops_the_presets_own_head_size():
    assert preset("llama3.2-3b", hidden_size=1536).head_size == 1536 // 24


def test_an_unknown_preset_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'llama3-8b'"):
        preset("lama3-8b")


def test_presets_are_read_without_jax():
    code = "import sys, jtrain.models.presets; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
