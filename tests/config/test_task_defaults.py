"""What a task chooses where nobody does."""

import pytest

from jtrain.config import load_config
from jtrain.config.layers import from_mapping
from jtrain.config.task_defaults import TASK_DEFAULTS, defaults_of
from jtrain.errors import ConfigError


def load(source=None, overrides=(), env=None):
    return load_config(source, overrides, env or {})


def test_flag_beats_environment_beats_file_beats_the_tasks_default_beats_the_default(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("task: sft\n")
    assert load().optimizer.learning_rate == 3e-4
    assert load(file).optimizer.learning_rate == 2e-5
    file.write_text("task: sft\nlearning_rate: 0.1\n")
    assert load(file).optimizer.learning_rate == 0.1
    variables = {"JTRAIN_OPTIMIZER__LEARNING_RATE": "0.2"}
    assert load(file, (), variables).optimizer.learning_rate == 0.2
    assert load(file, ["--lr", "0.3"], variables).optimizer.learning_rate == 0.3
    assert load(None, ["--task", "sft"]).optimizer.learning_rate == 2e-5
    assert load(None, (), {"JTRAIN_TASK": "sft"}).optimizer.learning_rate == 2e-5


def test_a_length_or_a_batch_of_ones_own_takes_the_place_of_the_tasks():
    config = load({"task": "sft"})
    assert (config.num_train_epochs, config.per_device_batch_size) == (3.0, 8)
    config = load({"task": "sft", "max_steps": 5, "global_batch_size": 6})
    assert (config.num_train_epochs, config.max_steps) == (None, 5)
    assert (config.per_device_batch_size, config.global_batch_size) == (None, 6)


def test_adapters_have_a_rate_of_their_own():
    assert load({"task": "sft", "model.lora.rank": 8}).optimizer.learning_rate == 1e-4
    assert load({"task": "sft", "model.lora.rank": 8, "lr": 1e-3}).optimizer.learning_rate == 1e-3


def test_a_config_keeps_what_it_has_when_it_is_loaded_again():
    config = load({"task": "sft", "max_steps": 5})
    assert load(config) == config
    assert load(config, {"num_train_epochs": 2}).max_steps is None


def test_a_default_says_why_and_stands_for_nothing_that_was_given():
    paths = [default.path for default in defaults_of(from_mapping({"task": "sft", "max_steps": 3, "lr": 1}, str))]
    assert "optimizer.learning_rate" not in paths and "num_train_epochs" not in paths
    assert "data.packing" in paths
    assert all(default.why for defaults in TASK_DEFAULTS.values() for default in defaults)


def test_a_trainer_refuses_the_config_of_another_task():
    from jtrain.tasks.language import task_config

    with pytest.raises(ConfigError, match="task: pretrain, and this is the trainer of sft"):
        task_config("sft", {"task": "pretrain"}, {})
    assert task_config("sft", None, {"max_steps": 3}).data.packing == "none"
