"""Rows whose completions are drawn: which batches, which prompts, and what the rows hold then."""

import numpy as np
import pytest

from jtrain.tasks.completions import NumberedRows, completed, drawing_seed, is_on_policy, prompt_of, shortened

NONE = -100


def row(ids, live, size=12):
    """A row of one example [size], whose tokens at `live` are labels."""
    padded = np.zeros(size, np.int32)
    padded[: len(ids)] = ids
    labels = np.full(size, NONE, np.int32)
    labels[live] = padded[live]
    return padded, labels, (np.arange(size) < len(ids)).astype(np.int32)


def test_so_many_batches_are_on_policy_as_the_fraction_says_and_the_seed_says_which():
    chosen = {seed: [is_on_policy(seed, number, 0.3) for number in range(4000)] for seed in (1, 2)}
    for found in chosen.values():
        assert np.mean(found) == pytest.approx(0.3, abs=0.03)
    assert chosen[1] != chosen[2]
    assert not any(is_on_policy(1, n, 0.0) for n in range(50)) and all(is_on_policy(1, n, 1.0) for n in range(50))
    assert len({drawing_seed(seed, number) for seed in range(10) for number in range(100)}) == 1000


@pytest.mark.parametrize(
    ("live", "longest", "prompt"),
    [
        ([3, 4], 8, [11, 12, 13]),
        ([2, 5, 6], 8, [11, 12, 13, 14, 15]),  # a conversation: all before the last answer
        ([3, 4], 2, [12, 13]),  # the end of a prompt that is too long
        ([1, 2, 3, 4, 5, 6], 8, [11]),  # every token is learned
        ([], 8, None),
    ],
)
def test_the_prompt_is_what_stands_before_the_last_stretch_of_labels(live, longest, prompt):
    assert prompt_of(*row(range(11, 18), live), longest) == prompt


def test_completions_stand_behind_their_prompts_and_all_of_their_tokens_are_labels():
    rows = [row([5, 6, 7, 8], [2, 3]), row([1, 2], []), row([9, 9, 9], [1, 2])]
    batch = dict(zip(("input_ids", "labels", "segment_ids"), map(np.stack, zip(*rows, strict=True)), strict=True))
    asked = []

    def complete(prompts, seed):
        asked.append((prompts, seed))
        return [[40, 41, 2], [50]]

    found = completed(batch, complete, 7, longest_prompt=4, pad_id=0)
    assert asked == [([[5, 6], [9]], 7)]
    assert found["input_ids"][:, :6].tolist() == [[5, 6, 40, 41, 2, 0], [0] * 6, [9, 50, 0, 0, 0, 0]]
    assert found["labels"][:, :6].tolist() == [[NONE, NONE, 40, 41, 2, NONE], [NONE] * 6, [NONE, 50, *[NONE] * 4]]
    assert found["segment_ids"].sum(1).tolist() == [5, 0, 2]
    assert found["position_ids"][0, :6].tolist() == [0, 1, 2, 3, 4, 0]
    assert shortened(found, (4, 8, 12))["labels"].shape == (3, 8)
    assert shortened(found, ())["labels"].shape == (3, 12)


def test_rows_say_which_batch_they_stand_in():
    class Rows:
        buckets = (4,)

        def __len__(self):
            return 5

        def rows(self, indices):
            return {"n": np.asarray(indices)}

    rows = NumberedRows(Rows(), 3)
    assert rows.rows(np.arange(2, 8))["batch_number"].tolist() == [0, 1, 1, 1, 2, 2]
    assert rows.batch(2)["n"].tolist() == [6, 7, 8] and rows.buckets == (4,) and len(rows) == 5
