import json

import pytest

from jtrain.cli.main import main


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("JTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}\n{"text": "you"}\n')
    return ["--data.train", str(tmp_path / "a.jsonl"), "--max-length", "12"]


def test_prepare_tokenises_and_says_how_full_the_rows_are(corpus, capsys, tmp_path):
    assert main(["data", "prepare", *corpus]) == 0
    assert "1 rows of 12 · 10 tokens · 2 documents · 83.33% full" in capsys.readouterr().out
    assert list((tmp_path / "cache" / "tokens").glob("*/tokens.bin"))


def test_inspect_marks_what_is_not_a_target(corpus, capsys):
    assert main(["data", "inspect", *corpus, "--rows", "1"]) == 0
    out = capsys.readouterr().out
    assert "segment 1: [[h]]ello" in out
    assert "segment 2: [[y]]ou" in out
    assert "8 targets, 6 bytes" in out


def test_inspect_as_json_is_one_object(corpus, capsys):
    assert main(["data", "inspect", "--rows=3", "--json", *corpus]) == 0
    assert len(json.loads(capsys.readouterr().out)["examples"]) == 3


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["inspcet"], 64, "Did you mean inspect?"),
        (["inspect", "--rows", "many"], 64, "--rows: 'many'"),
        (["inspect", "--data.train", "gone.jsonl"], 65, "gone.jsonl does not exist"),
        (["prepare", "--data.train", "gone.jsonl", "--data.tokenizer", "gone.json"], 65, "gone.json does not exist"),
        (["prepare"], 64, "data.train is empty"),
    ],
)
def test_a_mistake_ends_with_its_code_and_one_message(args, code, message, capsys):
    assert main(["data", *args]) == code
    assert message in capsys.readouterr().err


def test_help_names_both_verbs(capsys):
    assert main(["data", "--help"]) == 0
    out = capsys.readouterr().out
    assert "prepare" in out
    assert "inspect" in out
