"""`jtrain generate`: what is printed where, prompts from files, and what is wrong with a call."""

import json

import pytest

from jtrain.cli.main import main
from jtrain.tasks import generate as module

MODEL = ["generate", "llama-tiny", "--tokenizer", "bytes", "--max-new-tokens", "4"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "compiler_options", lambda platform: {"xla_backend_optimization_level": 0})


def test_prompts_from_everywhere_give_one_json_object(tmp_path, capsys):
    lines, records = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text("from a file\n\nand another line\n")
    records.write_text('{"prompt": "a record"}\n{"input_ids": [1, 2]}\n')
    args = [*MODEL, "--prompt", "one", "--prompt", "two", "--json"]
    assert main([*args, "--prompts-file", str(lines)]) == 0
    found = json.loads(capsys.readouterr().out)["generations"]
    assert [row["prompt"] for row in found] == ["one", "two", "from a file", "and another line"]
    for row in found:
        assert row["prompt_ids"] == list(row["prompt"].encode())
        assert len(row["ids"]) == len(row["logprobs"]) == 4 and row["finish_reason"] == "length"
    from jtrain.cli.generate import _prompts

    asked = _prompts({"prompts-file": str(records), "chat": True})
    assert asked == [[{"role": "user", "content": "a record"}], [1, 2]]


def test_a_text_goes_to_standard_output_as_it_grows_and_the_figures_elsewhere(capsys, monkeypatch):
    def generate(model, prompts, *, stream, **options):
        for piece in ("some ", "text"):
            stream(0, piece)
        return [module.Generation("some text", [1, 2], [-1.0, -2.0], "length", [3])]

    monkeypatch.setattr(module, "generate", generate)
    assert main([*MODEL, "--prompt", "one"]) == 0
    said = capsys.readouterr()
    assert said.out == "some text\n" and "2 tokens" in said.err


@pytest.mark.parametrize(
    ("args", "message"),
    (
        ([], "there is no prompt"),
        (["--prompt", "a", "--top-k", "4"], "temperature above 0"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--prompt", "a", "--max-new-tokens", "many"], "is not a whole number"),
        (["--prompt", "a", "--temprature", "1"], "temperature"),
        (["--prompt", "x" * 2100], "2100 tokens, and 2100 + max_new_tokens=64 = 2164"),
    ),
)
def test_a_wrong_call_is_answered_with_64(args, message, capsys):
    assert main(["generate", "llama-tiny", "--tokenizer", "bytes", *args]) == 64
    said = capsys.readouterr()
    assert message in said.err and "Traceback" not in said.err and not said.out


@pytest.mark.parametrize("content", (None, "not json", '{"text": "a"}', '{"prompt": ""}'))
def test_a_wrong_file_of_prompts_is_answered_with_65(content, tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    if content is not None:
        path.write_text(content)
    assert main([*MODEL, "--prompts-file", str(path)]) == 65
    assert "p.jsonl" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_answered_with_64(capsys):
    assert main(["generate", "no/such/model", "--prompt", "a"]) == 64
    assert "no/such/model" in capsys.readouterr().err
