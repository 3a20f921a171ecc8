"""`jtrain.generate`: rows alone and together, on one device and on a mesh, and what is wrong with a request."""

import dataclasses
import gc

import jax
import numpy as np
import pytest

import jtrain
from jtrain.data.tokenizers import load_tokenizer
from jtrain.errors import ConfigError, DataError
from jtrain.models.config import DecoderConfig
from jtrain.models.rope_scaling import RopeScaling
from jtrain.tasks import generate as module
from jtrain.tasks.generation_request import rounded_length
from jtrain.tasks.language_loss import token_logprobs
from tests.models.random_weights import random_model

SHAPE = DecoderConfig(
    vocab_size=264,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    sliding_window=6,
    layer_types=("sliding_attention", "full_attention"),
)
PROMPTS = ["a", "the quick brown", "x y z", "12345", "lorem ipsum dolor", "ab", "!", "end of it"]
NEW = 12


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Tiny programs that run once: most of their time is compiling."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compiler_options", lambda platform: {"xla_backend_optimization_level": 0})
        yield


@pytest.fixture(scope="module")
def model():
    return random_model(SHAPE, tokenizer=load_tokenizer("bytes"))


def generate(model, prompts, **options):
    return jtrain.generate(model, prompts, **{"max_new_tokens": NEW, "stop_token_ids": []} | options)


@pytest.fixture(scope="module")
def drawn_rows(model):
    return generate(model, PROMPTS, temperature=1.0, seed=3)


def assert_same(found, expected):
    assert [row.ids for row in found] == [row.ids for row in expected]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5, rtol=0)


def test_ragged_prompts_together_are_those_one_by_one(model, drawn_rows):
    assert_same(generate(model, PROMPTS, temperature=1.0, seed=3, batch_size=1), drawn_rows)
    assert len({tuple(row.ids) for row in drawn_rows}) == len(PROMPTS)


def test_log_probabilities_are_those_of_the_training_forward(model, drawn_rows):
    batch = {name: np.zeros((len(PROMPTS), 32), np.int32) for name in ("input_ids", "segment_ids", "position_ids")}
    batch["labels"] = np.full((len(PROMPTS), 32), -100, np.int32)
    for number, row in enumerate(drawn_rows):
        ids = [*row.prompt_ids, *row.ids]
        batch["input_ids"][number, : len(ids)] = ids
        batch["segment_ids"][number, : len(ids)] = 1
        batch["position_ids"][number, : len(ids)] = np.arange(len(ids))
        batch["labels"][number, len(row.prompt_ids) : len(ids)] = row.ids
    found = np.asarray(model.jit(token_logprobs)(batch)["logprobs"])
    for number, row in enumerate(drawn_rows):
        start = len(row.prompt_ids)
        np.testing.assert_allclose(found[number, start : start + NEW], row.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "mesh",
    (
        "fsdp=2,tensor=4",
        pytest.param("pipeline=2,fsdp=2", marks=pytest.mark.grid),
        pytest.param("context=2,fsdp=2", marks=pytest.mark.grid),
    ),
)
def test_a_mesh_gives_what_one_device_gives(model, drawn_rows, mesh):
    # Seven rows: the mesh adds one that is no prompt.
    meshed = random_model(SHAPE, mesh=mesh, tokenizer=model.tokenizer)
    assert_same(generate(meshed, PROMPTS[:7], temperature=1.0, seed=3), drawn_rows[:7])


@pytest.mark.grid
def test_experts_over_devices_give_what_one_device_gives():
    shape = SHAPE.replace(num_experts=4, moe_intermediate_size=12)
    prompts = [list(text.encode()) for text in PROMPTS]
    one = generate(random_model(shape), prompts, temperature=1.0)
    assert_same(generate(random_model(shape, mesh="expert=2,tensor=2"), prompts, temperature=1.0), one)


def test_a_seed_draws_one_text_and_another_another(model, drawn_rows):
    assert_same(generate(model, PROMPTS, temperature=1.0, seed=3), drawn_rows)
    others = generate(model, PROMPTS, temperature=1.0, seed=4)
    assert all(a.ids != b.ids for a, b in zip(others, drawn_rows, strict=True))


def test_pieces_that_are_streamed_join_to_the_text(model, drawn_rows):
    pieces = {}

    def stream(row, piece):
        assert piece
        pieces[row] = pieces.get(row, "") + piece

    found = generate(model, PROMPTS, temperature=1.0, seed=3, stream=stream)
    assert_same(found, drawn_rows)
    assert [row.text for row in found] == [row.text for row in drawn_rows]
    assert pieces == {number: row.text for number, row in enumerate(found) if row.text}


def test_a_stop_token_ends_a_row_and_stays_in_its_ids(model, drawn_rows):
    stop = drawn_rows[1].ids[4]
    found = generate(model, PROMPTS, temperature=1.0, seed=3, stop_token_ids=[stop])
    for row, free in zip(found, drawn_rows, strict=True):
        end = free.ids.index(stop) + 1 if stop in free.ids else NEW
        assert row.ids == free.ids[:end] and len(row.logprobs) == end
        assert row.finish_reason == ("stop" if stop in free.ids else "length")
        assert row.text == model.tokenizer.decode(free.ids[: end - (stop in free.ids)])


def test_a_stop_string_ends_a_row_and_is_not_in_its_text(model):
    letters = [row for row in generate(model, PROMPTS, temperature=1.0, seed=5) if len(row.text) > 3]
    row = letters[0]
    number = PROMPTS.index(bytes(row.prompt_ids).decode())
    stop = row.text[1:3]
    found = generate(model, PROMPTS, temperature=1.0, seed=5, stop=[stop])[number]
    assert found.text == row.text[: row.text.index(stop)] and found.finish_reason == "stop"
    assert found.ids == row.ids[: len(found.ids)] and len(found.ids) < NEW
    assert stop in model.tokenizer.decode(found.ids)


def test_prompts_may_be_text_tokens_or_a_conversation(model, monkeypatch):
    expected = generate(model, "ab")
    assert len(expected) == 1 and expected[0].prompt_ids == [97, 98] and expected[0].finish_reason == "length"
    for prompts in ([97, 98], [[97, 98]], ["ab"], np.asarray([[97, 98]])):
        assert generate(model, prompts)[0].ids == expected[0].ids
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}b{% endif %}"
    monkeypatch.setattr(model.tokenizer, "chat_templates", {"default": template}, raising=False)
    messages = [{"role": "user", "content": "a"}]
    for prompts in (messages, [messages]):
        assert generate(model, prompts)[0].prompt_ids == [97, 98]
    assert generate(model, []) == []


def test_tokens_that_end_a_text_are_the_tokenizers_unless_others_are_named(model, drawn_rows, monkeypatch):
    monkeypatch.setattr(model.tokenizer, "stop_ids", (drawn_rows[0].ids[2],), raising=False)
    found = generate(model, PROMPTS, temperature=1.0, seed=3, stop_token_ids=None)
    assert found[0].ids == drawn_rows[0].ids[:3]


@pytest.mark.parametrize(
    ("options", "message"),
    (
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": 1e-40}, "temperature=1e-40"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 1.0, "top_k": -1}, "top_k=-1"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p=0.0"),
        ({"temperature": 1.0, "min_p": 1.5}, "min_p=1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"stop": [""]}, "empty string"),
        ({"seed": -1}, "seed=-1"),
        ({"batch_size": -1}, "batch_size=-1"),
        ({"top_k": 5}, "temperature above 0"),
        ({"top_p": 0.9}, "temperature above 0"),
    ),
)
def test_options_out_of_range_are_named(model, options, message):
    with pytest.raises(ConfigError, match=message):
        generate(model, "a", **options)


def test_a_prompt_that_is_too_long_is_refused_with_the_arithmetic(model):
    with pytest.raises(ConfigError, match=r"prompt 1 has 60 tokens, and 60 \+ max_new_tokens=12 = 72 .*=64") as error:
        generate(model, ["a", "x" * 60])
    assert "max_new_tokens: 4" in error.value.remedy
    with pytest.raises(ConfigError) as error:
        generate(model, "x" * 80)
    assert "52 tokens" in error.value.remedy


def test_a_prompt_of_no_known_form_is_refused(model):
    for prompts, message in (
        ([[]], r"a prompt is \[\]"),
        ([3.5], "a prompt is 3.5"),
        (3, "prompts are 3"),
        ([[999]], "999"),
    ):
        with pytest.raises(DataError, match=message):
            generate(model, prompts)
    bare = dataclasses.replace(model, tokenizer=None)
    with pytest.raises(ConfigError, match="no tokenizer"):
        generate(bare, "text")
    with pytest.raises(ConfigError, match="no tokenizer"):
        generate(bare, [[1]], stop=["x"])
    with pytest.raises(DataError, match="chat template"):
        generate(model, [{"role": "user", "content": "a"}])


def test_programs_are_few_and_go_with_the_model(model):
    assert [rounded_length(size) for size in (1, 16, 17, 128, 129, 256, 257)] == [16, 16, 32, 128, 256, 256, 512]
    other = random_model(SHAPE)
    before = len(module._generators)
    generate(other, [[1, 2]])
    generate(other, [[1, 2, 3]], max_new_tokens=9)
    assert len(module._generators[other]._programs) == 1 and len(module._generators) == before + 1
    del other
    gc.collect()
    assert len(module._generators) == before


def test_longrope_takes_the_factors_of_every_row_by_itself():
    scaling = RopeScaling(
        rope_type="longrope", factor=4.0, original_length=16, short_factor=(1.0, 1.0), long_factor=(1.0, 4.0)
    )
    model = random_model(SHAPE.replace(rope_scaling=scaling, sliding_window=None, layer_types=None))
    prompts = [list(range(10)), list(range(11))]  # with six tokens 16 and 17
    together = generate(model, prompts, max_new_tokens=6)
    for prompt, length, found in zip(prompts, (10, 17), together, strict=True):
        # A row of more than 16 tokens has the long factors, and no token sees what is behind it.
        row = prompt + [0] * (length - len(prompt))
        expected = np.asarray(jax.nn.log_softmax(model([row])))[0, len(prompt) - 1]
        assert expected.argmax() == found.ids[0] and abs(expected.max() - found.logprobs[0]) < 1e-5
    alone = generate(model, prompts[0], max_new_tokens=6)[0]
    assert alone.ids == together[0].ids
    np.testing.assert_allclose(alone.logprobs, together[0].logprobs, atol=1e-5)
    assert generate(model, prompts[0], max_new_tokens=12)[0].logprobs[0] != alone.logprobs[0]
