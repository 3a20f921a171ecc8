"""A config as text: YAML that reads back, masked secrets, schema and reference page."""

import json
from pathlib import Path

import pytest

from jtrain.config import load_config, to_dict, to_yaml
from jtrain.config.export import json_schema, reference
from jtrain.config.names import ALIASES, fields


def test_yaml_reads_back_to_the_same_config_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_config(
        {
            "max_steps": "1e9 tokens",
            "run_dir": "r",
            "data": {"train": ["a", "b"], "weights": [1, 2], "eval": 0.1},
            "sharding": {"rules": {"mlp": ["tensor"]}},
            "optimizer": {"eps": 1e-9, "freeze": ["1e3", "no"]},
            "strategy": "zero1",
            "eval": {"sample_prompts": ["- a: b", "", "été"]},
        },
        (),
        {},
    )
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    monkeypatch.chdir("/")
    again = load_config(str(file), (), {})
    assert to_yaml(again) == file.read_text()
    assert again.run_dir == str(tmp_path / "r") and again.data.train == (str(tmp_path / "a"), str(tmp_path / "b"))
    assert again.model_copy(update={"run_dir": config.run_dir, "data": config.data}) == config


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("hub_token", "abc", "***"),
        ("eos_token", "</s>", "</s>"),
        ("train", ["https://me:pw@host/a.txt"], ["https://***@host/a.txt"]),
        ("sample_prompts", ["my password=abc, and"], ["my password=abc, and"]),  # it is read again
    ],
)
def test_secrets_are_masked_and_values_that_are_none_stay_as_they_are(key, value, shown):
    assert to_dict({"section": {key: value}}) == {"section": {key: shown}}


def test_masking_covers_every_form_of_a_config():
    config = load_config({"data": {"train": "https://me:hunter2@host/a.txt"}}, (), {})
    assert "hunter2" not in to_yaml(config) + json.dumps(to_dict(config))
    assert "hunter2" in to_yaml(config, masked=False)


def test_the_json_schema_describes_every_field():
    schema = json_schema()
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["MeshConfig"]["properties"]["fsdp"]["description"].startswith("Rows and parameters")
    json.dumps(schema)


def test_the_reference_page_lists_every_field_and_alias_and_is_up_to_date():
    page = reference()
    assert all(f"`{name}`" in page for name in [*fields(), *ALIASES])
    written = Path(__file__).parents[2] / "docs" / "config.md"
    assert written.read_text() == page, "write docs/config.md again: jtrain config docs > docs/config.md"
