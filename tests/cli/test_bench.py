import json

import pytest

from jtrain.cli.bench import FIGURES
from jtrain.cli.main import main


def test_a_figure_has_value_unit_comparison_and_ratio(capsys):
    assert main(["bench", "help", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert set(figures["help_seconds"]) == {"value", "unit", "against", "ratio"}
    assert 0 < figures["help_seconds"]["value"] == figures["help_seconds"]["ratio"]


def test_every_figure_that_the_help_page_names_can_be_measured():
    from jtrain.cli import figures

    assert all(callable(getattr(figures, name)) for name in FIGURES)


@pytest.mark.parametrize("args", (["hepl"], ["--fast"]))
def test_an_unknown_figure_or_flag_is_answered_with_64(args, capsys):
    assert main(["bench", *args]) == 64
    assert "bench" in capsys.readouterr().err


def test_a_peer_of_sft_that_does_not_run_is_answered_with_64(tmp_path, capsys):
    other = tmp_path / "python"
    for written in (False, True):
        if written:
            other.write_text("#!/bin/sh\necho no module named trl >&2; exit 1\n")
            other.chmod(0o755)
        assert main(["bench", "--task", "sft", "--peer", str(other)]) == 64
        text = capsys.readouterr().err
        assert "bench sft" in text and ("no module named trl" in text) == written
