"""Text of growing rows: whole characters, stop strings across tokens, pieces that join to the text."""

import pytest

from jtrain.data.tokenizers import load_tokenizer
from jtrain.tasks.generation_text import RowText


def grown(data, stop=(), prompt=()):
    """The text, whether a stop string ended it, the pieces, and how many tokens it took."""
    row, pieces, used = RowText(load_tokenizer("bytes"), prompt, stop), [], 0
    for token in data:
        if row.stopped:
            break
        row.push(token)
        used += 1
        pieces.append(row.take())
    row.finish()
    pieces.append(row.take())
    return row.text, row.stopped, pieces, used


def test_a_stop_string_is_found_across_tokens_and_cut_off():
    text, stopped, pieces, used = grown(b"one\ntwo###three", ("###", "zzz"))
    assert (text, stopped, used) == ("one\ntwo", True, len(b"one\ntwo###"))
    assert "".join(pieces) == text


def test_what_may_become_a_stop_string_is_held_back_and_given_when_it_does_not():
    _, _, pieces, _ = grown(b"a#b##c", ("###",))
    assert pieces == ["a", "", "#b", "", "", "##c", ""]
    text, stopped, pieces, _ = grown(b"ab##", ("###",))
    assert (text, stopped, pieces[-1]) == ("ab##", False, "##")


def test_the_first_of_several_stop_strings_counts():
    assert grown(b"xyEND.", (".", "END"))[0] == "xy"
    assert grown(b"xyEND.", ("D.", "YE"))[0] == "xyEN"
    assert grown(b"aab", ("aab", "ab"))[0] == ""


@pytest.mark.parametrize("text", ("naïve 東京 🦙!", "🦙"))
def test_pieces_are_whole_characters(text):
    found, _, pieces, _ = grown(text.encode())
    assert found == "".join(pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def test_a_character_that_is_never_finished_is_a_replacement_at_the_end():
    text, _, pieces, _ = grown("é".encode()[:1])
    assert text == "".join(pieces) == "\N{REPLACEMENT CHARACTER}"


def test_without_a_tokenizer_there_is_no_text():
    row = RowText(None, (1,), ())
    row.push(5)
    row.finish()
    assert row.text == row.take() == ""
