"""YAML as data only."""

import math

import pytest

from jtrain.config.yaml_file import MAX_ALIASES, MAX_BYTES, MAX_DEPTH, dump_yaml, parse_scalar, read_yaml
from jtrain.errors import ConfigError


def test_scalars_follow_yaml_1_2():
    text = (
        "a: 3e-4\nb: 1e9\nc: no\nd: 0o17\ne: 010\nf: 2024-01-01\ng: 1:30\nh: .inf\ni: ~\nj:\nk: true\nl: 0x10\nm: '5'"
    )
    value, _ = read_yaml(text, "x")
    expected = {"a": 0.0003, "b": 1e9, "c": "no", "d": "0o17", "e": 10, "f": "2024-01-01", "g": "1:30", "h": math.inf}
    assert value == expected | {"i": None, "j": None, "k": True, "l": 16, "m": "5"}


def test_keys_know_their_lines():
    _, lines = read_yaml("# comment\nseed: 1\nmesh:\n  fsdp: 2\n", "x")
    assert lines == {"seed": 2, "mesh": 3, "mesh.fsdp": 4}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: !!python/object/apply:os.system [ls]", "!!python/object/apply:os.system"),
        ("a: !mine 3", "tag `!mine`"),
        ("a: !!binary aGVsbG8=", "tag `!!binary`"),
        ("a: !!set {b}", "tag `!!set`"),
        ("seed: 1\nmesh:\n  fsdp: 2\n  fsdp: 3\n", "line 4: `mesh.fsdp` stands twice (first on line 3)"),
        ("a: &a [*a]", "an alias that contains itself"),
        ("a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 30)), "aliases stand for"),
        ("mesh:\n\tfsdp: 2", "spaces, not tabs"),
        ("a: 1\n---\na: 2", "line 2: not YAML"),
        ("a: [1, 2", "not YAML"),
        ("? [a]\n: 1", "a key that is not a word"),
        ("a: &x 1\nb: [" + ", ".join(["*x"] * (MAX_ALIASES + 1)) + "]", "aliases"),
        ("[" * (MAX_DEPTH + 1), "nested levels"),
        ("[" * 50_000, "nested levels"),
        ("a: [" + "1," * 30_000 + "]", "values"),
        ("#" * (MAX_BYTES + 1), "characters"),
        ("a: !!int x", "does not fit its tag"),
    ],
)
def test_what_is_not_plain_data_is_refused(text, words):
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "file.yaml")
    assert words in str(caught.value) and "file.yaml" in str(caught.value)


def test_a_dump_reads_back_to_the_same_value():
    value = {
        "a": "1e9",
        "b": "no",
        "c": "true",
        "d": 1e-8,
        "e": [],
        "f": "null",
        "g": "é: #x",
        "h": "",
        "i": {"j": ["3"]},
    }
    assert read_yaml(dump_yaml(value), "x")[0] == value


def test_text_that_is_not_yaml_stays_text():
    assert parse_scalar("[a") == "[a" and parse_scalar("a: b: c") == "a: b: c" and parse_scalar("4") == 4
