"""Flags as they are typed."""

import pytest

from jtrain.config import load_config
from jtrain.config.flags import print_help, split
from jtrain.config.names import fields, sections
from jtrain.config.schema import Config
from jtrain.errors import ConfigError


def load(*argv: str) -> Config:
    return load_config(None, argv, {})


def refused(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    return str(caught.value)


def test_underscores_hyphens_equals_signs_and_bare_assignments_are_taken():
    for argv in (["--max-length", "9"], ["--max_length", "9"], ["--max-length=9"], ["max_length=9"], ["max-length=9"]):
        assert load(*argv).max_length == 9
    assert load("--mesh=fsdp=4,tensor=2").mesh.fsdp == 4
    assert load("mesh.fsdp=4", "--eval.batch_size=3").eval.batch_size == 3


def test_switches_stand_alone_or_take_a_word():
    assert load("--deterministic").deterministic and load("--deterministic", "true").deterministic
    assert not load("--deterministic=false").deterministic and not load("--no-deterministic").deterministic
    assert not load("--data.no-shuffle").data.shuffle and load("--model.tie-word-embeddings").model.tie_word_embeddings
    assert load("--fast-dev-run").fast_dev_run is True and load("--fast-dev-run", "3").fast_dev_run == 3
    assert load("--bf16").precision == "bf16-mixed" and load("--gradient-checkpointing").model.remat == "full"


def test_lists_take_what_follows_and_numbers_may_be_negative():
    config = load("--data.train", "a b.txt", "c.txt", "--mesh.data", "-1", "--data.weights", "1", "2.5")
    assert (config.data.train, config.mesh.data, config.data.weights) == (("a b.txt", "c.txt"), -1, (1.0, 2.5))
    assert load("--data.train=[a.txt, b.txt]").data.train == ("a.txt", "b.txt")
    assert load("--data.train", "[a.txt, b.txt]").data.train == ("a.txt", "b.txt")
    assert load("--data.train", "[a.txt,", "b.txt]", "--data.eval", "[c]").data.train == ("a.txt", "b.txt")
    assert load("--data.train", "[ab]*.txt", "c[de]").data.train == ("[ab]*.txt", "c[de]")
    weighted = load("--data.train", "[{path: a, weight: 2}, {path: b, weight: 1}]").data
    assert (weighted.train, weighted.weights) == (("a", "b"), (2.0, 1.0))
    assert load("--optimizer.decay-rules", "[[bias, 0], [norm, 1]]").optimizer.decay_rules == (("bias", 0), ("norm", 1))
    assert load("--optimizer.decay-rules", ".*bias", "0", ".*", "1").optimizer.decay_rules == ((".*bias", 0), (".*", 1))


def test_unions_mappings_and_blanks():
    assert load("--data.eval", "0.1").data.eval == 0.1 and load("--data.eval", "a", "b").data.eval == ("a", "b")
    assert load("--devices", "auto").devices == "auto" and load("--devices", "8").devices == 8
    assert load("--resume", "5").checkpoint.resume == 5
    assert load("--sharding.rules", "{mlp: [tensor]}").sharding.rules == {"mlp": ("tensor",)}
    assert load("--checkpoint.best", "none").checkpoint.best is None and load("--strategy=none").strategy is None
    assert load("--model.remat", "none").model.remat == "none"
    assert load("--run-dir", "2024").run_dir == "2024"
    assert load("--seed", "1e3").seed == 1000 and load("--max-length=64.0").max_length == 64
    assert load("--max-steps", "2 epochs").max_steps == "2 epochs"


def test_the_last_of_two_flags_counts_and_a_short_form_starts_its_section_anew():
    assert load("--seed", "1", "--seed", "2").seed == 2
    mesh = load("--mesh.tensor", "4", "--mesh", "fsdp=4", "--mesh.slices", "2").mesh
    assert (mesh.tensor, mesh.fsdp, mesh.slices) == (1, 4, 2)
    assert load("--optimizer", "name=lion,lr=1e-4".replace("lr", "learning_rate")).optimizer.name == "lion"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--mehs", "a"], ["--mehs", "Did you mean --mesh?"]),
        (["--data.tokeniser", "a"], ["Did you mean --data.tokenizer?"]),
        (["--no-mesh"], ["--no-mesh"]),
        (["--no-max-length"], ["--no-max-length"]),
        (["-x"], ["-x"]),
        (["--mesh.fsdp"], ["a value is missing", "a whole number"]),
        (["--mesh"], ["a value is missing", "fsdp=4,tensor=2"]),
        (["--mesh.fsdp", "x"], ["--mesh.fsdp: 'x'"]),
        (["--max-length", "0"], ["--max-length: 0", "above 0"]),
        (["--max-length", "1e400"], ["--max-length: inf"]),
        (["--optimizer.decay-rules", "a"], ["--optimizer.decay-rules"]),
        (["--deterministic", "maybe"], ["'maybe' is not a flag"]),
        (["--sharding.rules", "mlp"], ["--sharding.rules: 'mlp'", "{mlp: [tensor]}"]),
        (["--mesh", "fsdp=2,fspd=3"], ["mesh.fspd", "Did you mean --mesh.fsdp?"]),
    ],
)
def test_a_mistyped_flag_is_answered_with_the_right_one(argv, words):
    message = refused(*argv)
    assert all(word in message for word in words), message


def test_positional_arguments_may_stand_anywhere():
    positional, flags = split(["--mesh.fsdp", "4", "demo", "--deterministic", "x"])
    assert positional == ["demo", "x"] and [flag.name for flag in flags] == ["mesh.fsdp", "deterministic"]


def test_the_help_page_lists_every_field_by_section_with_its_meaning(capsys):
    print_help("jtrain train", Config(max_length=77))
    page = capsys.readouterr().out
    for path, info in fields().items():
        assert f"--{path.replace('_', '-')}" in page, path
        assert info.description, f"{path} has no description"
    assert all(f"{section} options" in page for section in sections() if section != "roles")
    assert "default: 77" in page


def test_flags_leave_unset_what_nobody_said():
    """A model fills in what is unset, such as its own limit as max_length."""
    config = load_config({"seed": 3}, ["--max_steps", "5", "--mesh.fsdp", "2"], {})
    assert config.model_fields_set == {"seed", "max_steps", "mesh"}
    assert config.mesh.model_fields_set == {"fsdp"}
