"""The files around the package agree with it and with each other."""

import importlib
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import jax
import pytest

import jtrain

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "uv.lock").read_text()
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_version_is_that_of_the_project():
    assert jtrain.__version__ == PROJECT["version"]


def test_the_lock_is_of_this_project_file():
    own = next(package for package in tomllib.loads(LOCK)["package"] if package["name"] == "jtrain")

    def plain(requirement):
        name, extras, rest = re.fullmatch(r"([\w.-]+)(\[[\w,-]+\])?([^;]*).*", requirement).groups()
        return name.lower().replace("_", "-"), extras or "", rest.strip()

    wanted = {plain(r) for r in PROJECT["dependencies"]}
    wanted |= {plain(r) for extra in PROJECT["optional-dependencies"].values() for r in extra}
    locked = {
        (entry["name"], f"[{','.join(entry['extras'])}]" if "extras" in entry else "", entry.get("specifier", ""))
        for entry in own["metadata"]["requires-dist"]
    }
    assert locked == wanted


def test_the_lock_has_both_stacks_with_a_hash_for_every_file():
    packages = tomllib.loads(LOCK)["package"]
    versions = {package["version"] for package in packages if package["name"] == "jax"}
    # Python 3.11 keeps jax 0.10.2; 3.12 and newer have a later one.
    assert "0.10.2" in versions and len(versions) == 2
    files = [file for package in packages for file in [*package.get("wheels", []), package.get("sdist", {})] if file]
    assert files and all(file["hash"].startswith("sha256:") for file in files)


def test_the_lock_names_no_private_host_or_path():
    assert set(re.findall(r"https?://[^/\"]+", LOCK)) == {"https://pypi.org", "https://files.pythonhosted.org"}
    assert "file://" not in LOCK


def test_ci_runs_the_test_command_of_the_readme():
    commands = [line for block in blocks("bash") for line in block.splitlines()]
    assert [c for c in commands if c.endswith("&& pytest")] == ["pip install '.[test]' && pytest"]
    pattern = re.search(r"grep -m1 '(.*)' README.md", (ROOT / ".ci" / "run").read_text())[1]
    assert re.search(pattern, README, re.MULTILINE)[0] == "pip install '.[test]' && pytest"


def test_the_ci_script_is_valid_shell():
    assert subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=False).returncode == 0


def test_every_command_of_the_readme_makes_a_config(monkeypatch):
    from jtrain.cli.args import parse_config
    from jtrain.cli.main import VERBS

    modules = {verb.name: verb.module for verb in VERBS}
    monkeypatch.chdir(ROOT)
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    commands = [
        shlex.split(part, comments=True) for line in text.splitlines() for part in line.split("&&") if "jtrain " in part
    ]
    assert len(commands) >= 2
    for _, verb, *args in commands:
        module = importlib.import_module(f"jtrain.cli.{modules[verb]}")
        if hasattr(module, "HELP"):
            options = [arg for arg in args if arg.startswith("--")]
            assert all(f"{option} " in module.HELP for option in options), args
        else:
            parse_config(args, "jtrain", optional=True, defaults={} if verb == "train" else {"task": verb})


def test_every_recipe_that_the_readme_names_exists():
    named = set(re.findall(r"`([\w.-]+)`", re.search(r"name of a recipe \((.*?)\)", README, re.DOTALL)[1]))
    assert named == {path.stem for path in (ROOT / "configs").glob("*.yaml")}


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_the_python_of_the_readme_runs(number, tmp_path, monkeypatch, capsys):
    assert len(jax.devices()) == 8  # before an example makes as many as it wants, for the whole process
    monkeypatch.chdir(tmp_path)
    for name, value in {"MODEL__NUM_HIDDEN_LAYERS": "1", "EVAL__MAX_BATCHES": "2"}.items():
        monkeypatch.setenv(f"JTRAIN_{name}", value)
    exec(compile(blocks("python")[number], "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.strip()


def test_files_that_documents_point_to_exist():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_tokenizer_of_the_demo_is_what_its_recipe_makes(tmp_path, monkeypatch):
    from tokenizers import Tokenizer

    assets = ROOT / "configs" / "assets"
    (recipe,) = re.findall(r"```python\n(.*?)```", (assets / "README.md").read_text(), re.DOTALL)
    (tmp_path / "jargon-4.4.7.txt").symlink_to(assets / "jargon-4.4.7.txt")
    monkeypatch.chdir(tmp_path)
    exec(compile(recipe, "README.md", "exec"), {})
    made, committed = (Tokenizer.from_file(str(x / "jargon-bpe-1024.json")) for x in (tmp_path, assets))
    assert made.get_vocab() == committed.get_vocab()
    text = (assets / "jargon-4.4.7.txt").read_text("utf-8")[-5000:]
    assert made.encode(text).ids == committed.encode(text).ids
    assert committed.decode(committed.encode(text).ids) == text
