"""`jtrain eval`: what is printed where, and what is wrong with a call."""

import json
import math
import sys

import pytest

from jtrain.cli.main import main
from jtrain.tasks import evaluate
from jtrain.tasks.generate import Generation
from tests.peers.make_eval_goldens import write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_folder(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JTRAIN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"w{n}", "completion": f" w{n}"}) + "\n" for n in range(3)))
    return str(file)


def test_json_is_one_object_and_everything_else_goes_to_standard_error(folder, data, tmp_path, capsys, monkeypatch):
    def generate(model, prompts, **options):
        return [Generation("w0", [], [], "stop", ids) for ids in prompts]

    monkeypatch.setattr(evaluate, "generate", generate)
    answers = tmp_path / "answers.jsonl"
    args = ["--metrics", "exact_match,chrf", "--max-new-tokens", "2", "--limit", "2", "--predictions", str(answers)]
    assert main(["eval", folder, "--data", data, "--json", *args]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert {"eval_loss", "perplexity", "eval_exact_match", "eval_chrf"} <= set(found)
    assert (
        found["eval_exact_match"] == 0.5
        and found["target_tokens"] == 6
        and set(found["signatures"]) == {"exact_match", "chrf"}
    )
    assert "3 examples (prompt and completion; completions are scored)" in said.err and "2 prompts" in said.err
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [(row["prompt"], row["reference"]) for row in rows] == [("w0", " w0"), ("w1", " w1")]


def test_figures_that_are_no_number_are_null_in_json(folder, data, capsys, monkeypatch):
    figures = {"eval_loss": 800.0, "perplexity": math.inf, "of": {"a": [math.nan, -math.inf, 1.5]}}
    monkeypatch.setattr(evaluate, "evaluate", lambda *args, **options: figures)
    assert main(["eval", folder, "--data", data, "--json"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text) == {"eval_loss": 800.0, "perplexity": None, "of": {"a": [None, None, 1.5]}}
    assert "NaN" not in text and "Infinity" not in text


def test_the_file_of_predictions_is_checked_first_and_figures_are_printed_without_it(
    folder, data, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(evaluate, "generate", lambda model, prompts, **more: [Generation("w0", [], [], "stop", [])] * 3)
    answers, args = (
        tmp_path / "answers",
        ["--data", data, "--json", "--metrics", "exact_match", "--max-new-tokens", "2"],
    )

    def remove(*args, **options):
        answers.mkdir()  # while the model computes
        return {"eval_loss": 1.5}

    monkeypatch.setattr(evaluate, "evaluate", remove)
    for name in (str(tmp_path), "", str(tmp_path / "no" / "file")):
        assert main(["eval", folder, *args, "--predictions", name]) == 64
        assert not answers.exists() and "--predictions" in capsys.readouterr().err
    assert main(["eval", folder, *args, "--predictions", str(answers)]) == 14
    said = capsys.readouterr()
    assert json.loads(said.out)["eval_loss"] == 1.5 and f"--predictions {answers}: Is a directory" in said.err


def test_prompts_without_room_for_an_answer_are_left_out_and_counted(folder, data, capsys, monkeypatch):
    with open(data, "a") as file:
        file.write(json.dumps({"prompt": "w1 " * 125, "completion": "w1"}) + "\n")
    monkeypatch.setattr(evaluate, "evaluate", lambda *args, **options: {})
    monkeypatch.setattr(evaluate, "generate", lambda model, prompts, **more: [Generation("w0", [], [], "stop", [])] * 3)
    args = ["--data", data, "--metrics", "exact_match", "--max-new-tokens", "8", "--json"]
    assert main(["eval", folder, *args]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["prompts_left_out"] == 1
    assert "3 prompts (1 that are too long left out)" in said.err


def test_figures_are_printed_a_line_each(folder, data, capsys):
    assert main(["eval", folder, "--data", data, "--all-tokens", "--no-eos"]) == 0
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert lines["target_tokens"] == "3" and float(lines["eval_loss"]) > 0


@pytest.mark.parametrize(
    ("args", "message"),
    (
        ([], "write --data FILE, or --tasks"),
        (["--data"], "--data has no value"),
        (["--data", "a", "--metrics", "blue"], "Did you mean bleu?"),
        (["--data", "a", "--metrics", "[bleu, rugue]"], "Did you mean rouge?"),
        (["--data", "a", "--metrics", ","], "--metrics is empty"),
        (["--metrics", "bleu", "--tasks", "x"], "--metrics without --data"),
        (["--data", "a", "--limit", "3"], "--limit without --metrics"),
        (["--data", "a", "--num-fewshot", "3"], "--num-fewshot without --tasks"),
        (["--data", "a", "--max-length", "-1"], "positive number"),
        (["--data", "a", "--packing", "concat"], "best_fit or none"),
        (["--data", "a", "--strid", "4"], "Did you mean --stride?"),
        (["--data", "a", "--dtype", "float8"], "dtype='float8'"),
        (["--data", "a", "--mesh", "fsdp=64"], "needs 64 devices"),
        (["--data", "pairs.jsonl", "--max-length", "999"], "the model takes rows of 128 tokens"),
        (["--data", "pairs.jsonl", "--stride", "4"], "holds no texts"),
        (["--tasks", "x", "--chat-template", "y"], "without --apply-chat-template"),
    ),
)
def test_a_wrong_call_is_answered_with_64(args, message, folder, data, capsys):
    args = [data if word == "pairs.jsonl" else word for word in args]
    assert main(["eval", folder, *args]) == 64
    said = capsys.readouterr()
    assert message in said.err and "Traceback" not in said.err and not said.out


@pytest.mark.parametrize(
    ("content", "args", "message"),
    (
        (None, [], "no/such.jsonl"),
        ("", [], "holds no record"),
        ('{"question": "a"}\n', [], "the fields question\n  Give prompt and completion"),
        ('{"text": null}\n', [], "the fields text, and text of the first record is null"),
        (
            '{"prompt": "w1", "completion": " w2"}\n{"prompt": 3, "completion": 4}\n',
            [],
            "line 2 can't be used: it holds",
        ),
        ("not json\n", [], "no line is a JSON object"),
        ('{"text": "w1 w2"}\n', ["--metrics", "exact_match"], "its records hold texts"),
        ('{"text": "w1"}\n', ["--no-eos"], "nothing to predict"),
        ('{"messages": [{"role": "user", "content": "w1"}]}\n', ["--chat-template", "no.jinja"], "no.jinja"),
    ),
)
def test_wrong_data_is_answered_with_65(content, args, message, folder, tmp_path, capsys):
    file = tmp_path / "data.jsonl"
    if content is not None:
        file.write_text(content)
    assert main(["eval", folder, "--data", "no/such.jsonl" if content is None else str(file), *args]) == 65
    said = capsys.readouterr()
    assert message in said.err and "Traceback" not in said.err and not said.out


def test_a_model_and_packages_that_are_not_there_are_answered_with_64(data, monkeypatch, capsys):
    assert main(["eval", "no/such/model", "--data", data]) == 64
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    assert main(["eval", "no/such/model", "--tasks", "hellaswag"]) == 64
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    assert main(["eval", "no/such/model", "--data", data, "--metrics", "rouge"]) == 64
    said = capsys.readouterr().err
    assert "no/such/model" in said and said.count("pip install 'jtrain[eval]'") == 2
