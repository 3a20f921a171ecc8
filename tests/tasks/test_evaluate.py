"""`jtrain.evaluate`: the figures of plain numpy and of transformers, whatever the batch, the mesh and the rows.

Goldens are made by tests/peers/make_eval_goldens.py (transformers 5.24 on CPU, float32).
"""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from jtrain.data.questions import read_questions
from jtrain.data.tokenizers import load_tokenizer
from jtrain.errors import ConfigError, DataError
from jtrain.models.config import DecoderConfig
from jtrain.tasks.eval_reading import Reading
from jtrain.tasks.eval_text import TextEvaluation, generate_sorted
from jtrain.tasks.evaluate import evaluate, evaluate_answers
from jtrain.tasks.generate import Generation
from jtrain.tasks.loading import load_model
from tests.models.random_weights import random_model
from tests.peers.make_eval_goldens import write_folder

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "evaluation.json").read_text())
DATA = json.loads((Path(__file__).parent / "fixtures" / "sft" / "goldens.json").read_text())["data"]
TEXTS = [{"text": text} for text in GOLDENS["texts"]]
END = 2
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_folder(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def by_hand(model, documents):
    """Summed loss, targets and hits of (ids, first target) in float64."""
    size = max(len(ids) for ids, _ in documents)
    padded = np.zeros((len(documents), size), np.int32)
    for row, (ids, _) in enumerate(documents):
        padded[row, : len(ids)] = ids
    logits = np.asarray(model(padded), np.float64)
    logits -= logits.max(-1, keepdims=True)
    logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    total, count, hits = 0.0, 0, 0
    for row, (ids, first) in enumerate(documents):
        for place in range(max(first, 1), len(ids)):
            total -= logps[row, place - 1, ids[place]]
            count += 1
            hits += int(logps[row, place - 1].argmax() == ids[place])
    return {"eval_loss": total / count, "eval_mean_token_accuracy": hits / count, "target_tokens": count}


def examples(model):
    """Prompts and completions as (ids, first token of the completion); the end token is behind them."""
    found = []
    for record in DATA["prompt_completion"]:
        before = model.tokenizer.encode(record["prompt"])
        found.append(([*before, *model.tokenizer.encode(record["completion"]), END], len(before)))
    return found


def test_figures_are_those_of_plain_numpy(model):
    found = evaluate(model, DATA["prompt_completion"])
    expected = by_hand(model, examples(model))
    assert found == pytest.approx(expected | {"perplexity": math.exp(expected["eval_loss"])}, rel=1e-6)
    whole = evaluate(model, DATA["prompt_completion"], completion_only_loss=False)
    assert whole["eval_loss"] == pytest.approx(
        by_hand(model, [(ids, 0) for ids, _ in examples(model)])["eval_loss"], rel=1e-6
    )


def test_figures_do_not_depend_on_batch_size_packing_and_mesh(model, folder):
    expected = evaluate(model, DATA["messages"], assistant_only_loss=True)
    del expected["perplexity"]  # its relative error is the loss's absolute one
    meshed = load_model(folder, mesh="fsdp=2,tensor=2,pipeline=2")
    for other, options in (
        (model, {"batch_size": 1}),
        (model, {"batch_size": 5, "packing": "best_fit", "max_length": 64}),
        (meshed, {"batch_size": 3}),
    ):
        found = evaluate(other, DATA["messages"], assistant_only_loss=True, **options)
        assert found.pop("perplexity") == pytest.approx(math.exp(found["eval_loss"]))
        assert found == pytest.approx(expected, rel=1e-6)


def test_texts_packed_and_padded_have_one_figure(model):
    both = [evaluate(model, TEXTS, max_length=64, packing=packing) for packing in ("best_fit", "none")]
    assert both[0] == pytest.approx(both[1], rel=1e-6)


def test_bytes_are_those_of_the_targets():
    shape = DecoderConfig(
        vocab_size=259, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = random_model(shape, tokenizer=load_tokenizer("bytes"))
    found = evaluate(model, [{"text": "naïve 猫"}], max_length=16)
    size = len("naïve 猫".encode())
    assert (found["target_bytes"], found["target_tokens"]) == (size - 1, size)  # one is nobody's target; the end
    assert found["bits_per_byte"] == pytest.approx(found["eval_loss"] * size / math.log(2) / (size - 1))


@pytest.mark.parametrize("stride", GOLDENS["windows"])
def test_windows_that_overlap_have_transformers_perplexity(model, stride):
    golden, said = GOLDENS["windows"][stride], []
    options = {"append_eos": False, "stride": int(stride), "report": said.append}
    found = evaluate(model, TEXTS, max_length=GOLDENS["max_length"], **options)
    assert found["target_tokens"] == golden["tokens"]
    assert found["eval_loss"] == pytest.approx(golden["loss"], abs=1e-5)
    assert f"windows, {stride} tokens apart" in said[0] and "4 texts" in said[0]


def test_what_was_found_is_said(model, tmp_path):
    file, said = tmp_path / "chat.jsonl", []
    file.write_text("".join(json.dumps(record) + "\n" for record in DATA["messages"]))
    evaluate(model, [str(file)], assistant_only_loss=True, cache_dir=str(tmp_path / "cache"), report=said.append)
    assert said == [f"--data: {file}: 6 examples (messages; the assistant's turns are scored)"]


FILLED = [{"prompt": "w1", "completion": " w2"}, {"prompt": "w1 " * 200, "completion": " w2 w3"}]
LONG = [{"prompt": "w1 " * 100, "completion": " w2" * 60}]


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    (
        (TEXTS, {"max_length": 129}, ConfigError, "takes rows of 128"),
        (TEXTS, {"max_length": 32, "stride": 32}, ConfigError, "from 1 to 31"),
        (DATA["messages"], {"stride": 8}, ConfigError, "holds no texts"),
        (TEXTS, {"batch_size": 0}, ConfigError, "batch_size=0"),
        (TEXTS, {"batch_size": "3"}, ConfigError, "batch_size='3'"),
        (TEXTS, {"max_length": "64"}, ConfigError, "max_length='64'"),
        (TEXTS, {"stride": -1}, ConfigError, "stride=-1"),
        (TEXTS, {"max_lenght": 64}, ConfigError, "Did you mean max_length?"),
        (TEXTS, {"assistant_only_loss": True}, ConfigError, "no message of an assistant"),
        (LONG, {}, DataError, "1 of 1 examples are longer than a row of 128 tokens; the first is number 1, with 161"),
        (FILLED, {}, DataError, "1 of 2 examples are longer than a row of 128 tokens; the first is number 2, with 203"),
        ([{"question": "a"}], {}, DataError, "the fields question"),
        ([], {}, DataError, "give a path"),
        ("no/such.jsonl", {}, DataError, "--data: no/such.jsonl"),
    ),
)
def test_what_can_not_be_evaluated_is_refused(model, data, options, error, message):
    with pytest.raises(error) as caught:
        evaluate(model, data, **options)
    assert message in str(caught.value)


def test_a_prompt_that_fills_a_row_is_an_example_that_is_too_long(model):
    with pytest.raises(DataError, match="1 of 1 examples are longer than a row of 128 tokens"):
        evaluate(model, FILLED[1:])


@pytest.mark.parametrize("good", ({"text": "w1 w2"}, {"prompt": "w1", "completion": " w2"}))
def test_records_that_are_left_out_are_counted(model, tmp_path, good):
    file, said = tmp_path / "data.jsonl", []
    bad = {name: 3 for name in good}
    records = [good, bad, good, bad]
    file.write_text("".join(json.dumps(record) + "\n" for record in records) + "no json\n")
    options = {"on_bad_record": "skip", "cache_dir": str(tmp_path / "cache"), "report": said.append}
    assert evaluate(model, str(file), **options)["records_left_out"] == 3
    assert said[0].endswith("; 3 records that can't be used left out")
    assert evaluate(model, records, **options)["records_left_out"] == 2
    assert evaluate(model, [good], **options)["records_left_out"] == 0 and "left out" not in said[-1]


def test_a_folder_is_no_loaded_model(folder):
    with pytest.raises(ConfigError, match=r"(?s)model is .*, not a loaded model.*jtrain\.load_model"):
        evaluate(str(folder), TEXTS)


def test_a_part_of_a_long_example_is_scored_where_that_is_asked_for(model):
    assert evaluate(model, LONG, truncation="keep_end")["target_tokens"] == 61
    with pytest.raises(ConfigError, match="no tokenizer"):
        evaluate(dataclasses.replace(model, tokenizer=None), TEXTS)


# -- answers ----------------------------------------------------------------------------------------------------------


def echo(prompts, **options):
    """Answers with the prompt's last word."""
    return [Generation(f"w{ids[-1] - 9}", [], [], "stop", list(ids)) for ids in prompts]


def test_answers_are_scored_against_what_the_assistant_says_last(model):
    records = [
        {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}] * 2},
        {"messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
        {"messages": [{"role": "assistant", "content": "w9"}]},
    ]
    config = Reading().config(model, "sft", 128)
    (question,) = read_questions(config, model.tokenizer, records, field="--data", name="data")
    assert question.reference == "w2 w3" and question.record is records[0]
    names = [model.tokenizer.id_to_token(token) for token in question.ids]
    turn = ["<|im_start|>", "user", "w1", "<|im_end|>", "<|im_start|>", "assistant"]
    assert names == ["<bos>", *turn, "w2", "w3", "<|im_end|>", *turn]


def test_answers_of_the_model_are_scored(model):
    said = []
    result = evaluate_answers(
        model, DATA["prompt_completion"], ["exact_match", "bleu"], examples=3, max_new_tokens=4, samples=2,
        batch_size=2, report=said.append,
    )  # fmt: skip
    assert set(result.metrics) == {"eval_exact_match", "eval_bleu"}
    assert [row["prompt"] for row in result.samples] == [row["prompt"] for row in DATA["prompt_completion"][:2]]
    assert said[0].startswith("3 prompts") and "bleu: nrefs:1|" in said[1] + said[2]
    from jtrain import generate

    for row in result.samples:  # one by one, the same
        assert generate(model, row["prompt"], max_new_tokens=4)[0].text == row["completion"]


def test_a_callable_gets_predictions_references_and_the_records_fields(model):
    seen = {}

    def compute(predictions, references, **columns):
        seen.update(columns, predictions=predictions, references=references)
        return {"hits": np.float32(0.5)}

    records = [{"prompt": f"w{n} w{n}", "completion": f" w{n}", "kind": n} for n in range(5)]
    questions = read_questions(Reading().config(model, "sft", 128), model.tokenizer, records, field="", name="data")
    evaluation = TextEvaluation(
        questions, model.tokenizer, 128, metrics=["exact_match"], compute=compute, examples=4, max_new_tokens=4
    )
    result = evaluation(echo, 3)
    assert result.metrics == {"eval_exact_match": 1.0, "hits": 0.5}
    assert seen["predictions"] == ["w0", "w1", "w2", "w3"] and seen["references"] == [" w0", " w1", " w2", " w3"]
    assert seen["kind"] == [0, 1, 2, 3] and seen["prompt"][3] == "w3 w3"
    with pytest.raises(ConfigError, match="compute_text_metrics returned 3"):
        TextEvaluation(evaluation.questions, model.tokenizer, 128, compute=lambda *a, **b: 3, max_new_tokens=4)(echo, 3)


def test_prompts_go_by_length_and_come_back_in_order():
    calls = []

    def generate(prompts, **options):
        calls.append([len(ids) for ids in prompts])
        return echo(prompts)

    prompts = [[9 + n] * size for n, size in enumerate((3, 1, 7, 2, 5))]
    rows = generate_sorted(generate, prompts, 2, max_new_tokens=4)
    assert [row.text for row in rows] == ["w0", "w1", "w2", "w3", "w4"]
    assert calls == [[7, 5], [3, 2], [1, 1]]  # the last batch is filled up


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    (
        (TEXTS, {}, DataError, "its records hold texts"),
        (TEXTS, {"examples": 0}, ConfigError, "examples=0"),
        (TEXTS, {"max_new_tokens": "8"}, ConfigError, "max_new_tokens='8'"),
        (TEXTS, {"batch_size": 1.5}, ConfigError, "batch_size=1.5"),
        (DATA["prompt_completion"], {"max_new_tokens": 127}, ConfigError, "(?s)data: record .* write max_new_tokens: "),
        ([{"messages": [{"role": "user", "content": "w1"}]}], {}, DataError, "no prompt with an answer"),
    ),
)
def test_data_without_answers_and_prompts_that_are_too_long_are_refused(model, data, options, error, message):
    with pytest.raises(error, match=message):
        evaluate_answers(model, data, ["exact_match"], **options)
