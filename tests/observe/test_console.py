import io
import logging

import pytest

from jtrain.observe.console import Console, eval_line, short, train_line

EVERYTHING = {
    "loss": 2.34512,
    "learning_rate": 2.91e-4,
    "grad_norm": 0.8412,
    "tokens_per_second": 18_234.0,
    "mfu": 0.4131,
    "memory_gib": 61.02,
    "data_wait_seconds": 0.0004,
    "skipped_steps": 0,
    "tokens": 12345,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_train_line_shows_each_figure_in_its_unit():
    assert train_line(120, 300, EVERYTHING) == (
        "step 120/300 | loss 2.3451 | lr 2.91e-04 | grad_norm 0.84 | 18.2k tok/s"
        " | mfu 41.3% | mem 61.0 GiB | data 0.4 ms"
    )


def test_unknown_figures_are_left_out():
    values = EVERYTHING | {"mfu": None, "memory_gib": None}
    assert train_line(1, 3, values) == (
        "step 1/3 | loss 2.3451 | lr 2.91e-04 | grad_norm 0.84 | 18.2k tok/s | data 0.4 ms"
    )


def test_skipped_steps_are_shown_once_there_are_any():
    assert train_line(1, 3, {"loss": float("nan"), "skipped_steps": 2}) == "step 1/3 | loss nan | skipped 2"


def test_an_eval_line_shows_every_number():
    values = {"eval_loss": 2.34512, "perplexity": 10.4345, "bits_per_byte": None}
    assert eval_line(100, 300, values) == "eval 100/300 | eval_loss 2.3451 | perplexity 10.43"


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (950, "950"), (18_234, "18.2k"), (1.25e6, "1.25M"), (3.1e9, "3.10G")]
)
def test_rates_are_short(number, text):
    assert short(number) == text


def test_a_file_gets_plain_lines_and_nothing_else():
    file = io.StringIO()
    with Console(3, file=file) as console:
        for step in (1, 2, 3):
            console.advance(step)
        console.train(3, {"loss": 1.0})
        console.evaluate(3, {"eval_loss": 2.0})
    assert file.getvalue() == "step 3/3 | loss 1.0000\neval 3/3 | eval_loss 2.0000\n"


def test_a_terminal_gets_a_bar_and_messages_keep_their_brackets(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()
    with Console(300, file=file) as console:
        console.resume(40)
        console.train(50, {"loss": 1.0, "tokens_per_second": 18_234.0})
        console.advance(50)
        console.message("mesh [data=2]")
    assert "40/300" in file.getvalue()
    assert "50/300" in file.getvalue() and "18.2k tok/s" in file.getvalue() and "mesh [data=2]" in file.getvalue()


def test_only_process_0_prints_steps_and_errors_of_others_carry_their_number():
    file = io.StringIO()
    with Console(3, process=2, file=file) as console:
        console.train(1, {"loss": 1.0})
        console.message("compiling")
        console.message("disk is full", "error")
    assert file.getvalue() == "[process 2] error: disk is full\n"


@pytest.mark.parametrize(
    ("level", "shown"),
    [("debug", ["d", "i", "warning: w"]), ("info", ["i", "warning: w"]), ("warning", ["warning: w"]), ("error", [])],
)
def test_the_level_decides_what_is_printed_of_modules_and_steps_alike(level, shown):
    file = io.StringIO()
    with Console(3, level=level, file=file):
        logger = logging.getLogger("jtrain.somewhere")
        logger.debug("d")
        logger.info("i")
        logger.warning("w")
    assert file.getvalue().splitlines() == shown


def test_after_the_close_the_loggers_are_as_before():
    logger = logging.getLogger("jtrain")
    Console(3, file=io.StringIO()).close()
    assert logger.handlers == [] and logger.propagate
