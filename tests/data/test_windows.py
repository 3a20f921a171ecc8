"""Windows that overlap, against the loop that makes them one by one."""

import numpy as np
import pytest

from jtrain.data.rows import IGNORE
from jtrain.data.store import TokenStore
from jtrain.data.windows import WindowRows

LENGTHS = (23, 1, 8, 9, 0, 17)


def windows_of(documents, length, stride):
    """(tokens, targets) of each window, as Hugging Face's recipe cuts them."""
    found = []
    for ids in documents:
        previous = 0
        for begin in range(0, len(ids), stride):
            end = min(begin + length, len(ids))
            scored = end - previous
            found.append((ids[begin:end], [IGNORE] * (end - begin - scored) + ids[end - scored : end]))
            previous = end
            if end == len(ids):
                break
    return found


@pytest.mark.parametrize("stride", (1, 3, 7))
def test_every_token_is_scored_once_with_what_stands_before_it_in_its_window(stride):
    draw = np.random.default_rng(0)
    documents = [draw.integers(1, 50, size).tolist() for size in LENGTHS]
    rows = WindowRows(TokenStore.from_documents(documents), 8, stride, token_bytes=np.arange(50))
    expected = windows_of(documents, 8, stride)
    assert len(rows) == len(expected)
    batch = rows.rows(np.arange(len(rows))[::-1])  # in any order
    scored = []
    for row, (ids, targets) in zip(range(len(rows))[::-1], expected, strict=True):
        size = len(ids)
        assert batch["input_ids"][row, :size].tolist() == ids
        assert batch["segment_ids"][row].tolist() == [1] * size + [0] * (8 - size)
        assert batch["position_ids"][row, :size].tolist() == list(range(size))
        # Nobody predicts the first token of a window.
        assert batch["labels"][row].tolist() == [IGNORE, *targets[1:]] + [IGNORE] * (8 - size)
        live = [token for token in targets[1:] if token != IGNORE]
        assert batch["bytes"][row] == sum(live)
        scored += live
    assert scored == [token for ids in documents for token in ids[1:]]
