import numpy as np
import pytest

from jtrain.data import tokenise
from jtrain.data.sources import Chunk
from jtrain.data.tokenise import Recipe, token_dtype, tokenise_chunk
from jtrain.data.tokenizers import ByteTokenizer


class Recording(ByteTokenizer):
    def __init__(self):
        self.seen = []

    def encode_batch(self, texts):
        self.seen.extend(texts)
        return super().encode_batch(texts)


@pytest.mark.parametrize("text", ["some words of a long text " * 40, "x" * 999])
def test_a_very_long_text_is_encoded_by_pieces_and_stays_one_document(tmp_path, monkeypatch, text):
    monkeypatch.setattr(tokenise, "_LONG_CHARACTERS", 200)
    monkeypatch.setattr(tokenise, "_PIECE_CHARACTERS", 50)
    (tmp_path / "a.txt").write_text(text)
    tokenizer = Recording()
    result = tokenise_chunk(Chunk(str(tmp_path / "a.txt"), "text"), Recipe(), tokenizer, str(tmp_path / "out"))
    assert "".join(tokenizer.seen) == text
    assert 4 < len(tokenizer.seen) < 25
    if " " in text:
        assert all(piece.startswith(" ") and not piece.endswith(" ") for piece in tokenizer.seen[1:-1])
    assert np.fromfile(tmp_path / "out.lengths", np.int64).tolist() == [len(text) + 1]
    assert np.fromfile(tmp_path / "out.tokens", np.uint16).tolist() == [*text.encode(), 256]
    assert (result.documents, result.tokens) == (1, len(text) + 1)


def test_tokens_take_two_bytes_where_the_vocabulary_allows_it():
    assert [token_dtype(size).itemsize for size in (256, 65_536, 65_537)] == [2, 2, 4]
