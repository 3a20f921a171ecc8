"""Recipes by name, and the resolved text of each (golden files are reviewed as diffs)."""

import os
from pathlib import Path

import pytest

from jtrain.config import load_config, to_yaml
from jtrain.config.paths import find_config, recipe_folder, recipes
from jtrain.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden"


def test_the_recipes_that_always_exist_are_there():
    assert {"demo", "llama3-8b"} <= set(recipes())


@pytest.mark.parametrize("name", sorted(recipes()))
def test_a_recipe_resolves_to_its_golden_text(name, tmp_path, monkeypatch):
    """Written again with JTRAIN_WRITE_GOLDEN=1, which is read here only."""
    monkeypatch.chdir(tmp_path)
    text = to_yaml(load_config(name, (), {}))
    text = text.replace(str(recipe_folder()), "CONFIGS").replace(str(tmp_path), "HERE")
    golden = GOLDEN / f"{name}.yaml"
    if os.environ.get("JTRAIN_WRITE_GOLDEN"):
        golden.write_text(text)
    assert golden.read_text() == text


def test_every_golden_text_has_its_recipe():
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(recipes())


def test_a_recipe_writes_to_the_working_directory_by_name_and_by_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    for source in ("demo", recipes()["demo"]):
        assert load_config(source, (), {}).run_dir == str(tmp_path / "runs" / "demo")
    assert all(Path(path).is_file() for path in load_config("demo", (), {}).data.train)


def test_a_config_that_is_not_there_is_answered_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for source, words in (
        ("dmeo", "did you mean 'demo'?"),
        ("demo.yaml", "The recipe is called 'demo'."),
        ("x/y.yaml", "x/y.yaml does not exist"),
        (str(tmp_path), "is a folder"),
    ):
        with pytest.raises(ConfigError) as caught:
            find_config(source)
        assert words in str(caught.value)
    (tmp_path / "plain").write_text("seed: 1")
    assert find_config("plain") == Path("plain")
