"""Tokenizers of GGUF files, against the ids of the models' own tokenizers (46 cases each)."""

import json
import lzma
from pathlib import Path

import pytest

from jtrain.checkpoint.gguf.vocabulary import byte_level_bpe, sentence_piece_bpe
from jtrain.errors import ConfigError

FIXTURES = Path(__file__).parents[1] / "data" / "fixtures" / "tokenizers"


def read(name):
    return json.loads(lzma.decompress((FIXTURES / f"{name}.json.xz").read_bytes()))


def make(content):
    tokens = content["tokens"]
    control = [token for token, kind in zip(tokens, content["types"], strict=True) if kind == 3]
    if content["scores"]:
        return sentence_piece_bpe(tokens, content["scores"], "<unk>", True, control)
    made = tokens[content["first"] :]
    merges = [(token[:cut], token[cut:]) for token, cut in zip(made, content["cuts"], strict=False)]
    return byte_level_bpe(tokens, merges, content["pre"], control)


@pytest.mark.parametrize("name", ["gpt-2", "qwen2", "phi-3"])
def test_ids_are_those_of_the_model_s_own_tokenizer(name):
    content = read(name)
    backend = make(content)
    assert len(content["cases"]) == 46
    for text, ids in content["cases"]:
        assert backend.encode(text, add_special_tokens=False).ids == ids, text
        if name != "phi-3" or not text.startswith(" "):  # one space at the beginning is what the model put there
            assert backend.decode(ids) == text
    control = next(token for token, kind in zip(content["tokens"], content["types"], strict=True) if kind == 3)
    assert backend.encode(f"a{control}b", add_special_tokens=False).ids[1] == content["tokens"].index(control)


def test_digits_stand_alone_for_smollm_and_in_threes_for_llama():
    tokens = [*"0123456789", "12", "34", "123", "1234"]
    merges = [("1", "2"), ("3", "4"), ("12", "3"), ("12", "34")]

    def pieces(pre):
        return byte_level_bpe(tokens, merges, pre).encode("1234").tokens

    assert pieces("gpt-2") == ["1234"]
    assert pieces("smollm") == ["1", "2", "3", "4"]
    assert pieces("llama-bpe") == ["123", "4"]
    assert pieces("qwen2") == ["1", "2", "3", "4"]


def test_an_unknown_rule_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match="'falcon'") as error:
        byte_level_bpe(["a"], [], "falcon")
    assert "qwen2" in error.value.remedy and "tokenizer.json" in error.value.remedy
