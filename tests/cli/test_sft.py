"""`jtrain sft`: works without a config file, says what it chose, and is no other task's verb."""

import json
from pathlib import Path

import pytest

from jtrain.cli import data, sft, task_verb
from jtrain.errors import ConfigError

ASSETS = Path(__file__).parents[2] / "configs" / "assets"


@pytest.fixture
def started(monkeypatch):
    """The configs that would have been run."""
    found = []
    monkeypatch.setattr(task_verb, "start", lambda config: found.append(config) or 0)
    return found


def test_without_a_file_it_prints_what_it_chose_and_why(started, capsys):
    assert sft.run(["--model.path", "DIR", "--data.train", "chat.jsonl", "--lr", "1e-3"]) == 0
    text = capsys.readouterr().out
    assert "task sft, no config file" in text
    assert "num_train_epochs" in text and "3" in text and "TRL's default" in text
    assert "learning_rate" not in text and "random weights" not in text  # both were given
    (config,) = started
    assert (config.task, config.optimizer.learning_rate, config.data.packing) == ("sft", 1e-3, "none")


def test_a_new_model_is_said_to_be_one_and_a_file_speaks_for_itself(started, capsys):
    sft.run([])
    assert "random weights" in capsys.readouterr().out
    sft.run(["sft-tiny"])
    assert capsys.readouterr().out == ""
    assert [config.task for config in started] == ["sft", "sft"]


def test_the_file_of_another_task_is_refused(started):
    with pytest.raises(ConfigError, match="task: pretrain, and the verb is sft"):
        sft.run(["cpu-tiny"])
    assert not started


def test_help_shows_the_tasks_defaults(capsys):
    assert sft.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert "jtrain sft" in text and "2e-05" in text


def test_inspect_shows_a_batch_with_its_mask(tmp_path, capsys):
    arguments = ["inspect", "sft-tiny", "--data.cache_dir", str(tmp_path), "--rows", "1"]
    assert data.run(arguments) == 0
    text = capsys.readouterr().out
    assert "1,357 examples: messages; the assistant's turns are learned" in text
    assert "[[<bos><|user|>" in text and "<|assistant|>]]" in text
    assert data.run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    segment = found["examples"][0]["segments"][0]
    assert [span["target"] for span in segment] == [False, True]
    assert segment[0]["text"].startswith("<bos><|user|>In hacker slang")
