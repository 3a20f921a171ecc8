import numpy as np
import pytest

from jtrain.data.packing import plan_rows, split_edges


def edges_of(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def lognormal(count, *, median=400, sigma=1.0, seed=0):
    return np.maximum(1, np.random.default_rng(seed).lognormal(np.log(median), sigma, count)).astype(int)


def rows_of(plan):
    """[(start, length), ...] of each row."""
    pieces = list(zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True))
    return [pieces[a:b] for a, b in zip(plan.first[:-1], plan.first[1:], strict=True)]


def best_fit_decreasing(lengths, capacity):
    """The textbook algorithm, one piece at a time: free space of each bin."""
    bins = []
    for length in sorted(lengths, reverse=True):
        fitting = [(space, number) for number, space in enumerate(bins) if space >= length]
        if fitting:
            bins[min(fitting)[1]] -= length
        else:
            bins.append(capacity - length)
    return sorted(bins)


@pytest.mark.parametrize("packing", ["best_fit", "concat", "none"])
def test_every_token_is_in_one_row_once(packing):
    lengths = [5, 0, 17, 1, 8, 3, 40, 0, 8]
    plan = plan_rows(edges_of(lengths), 8, packing)
    places = [place for row in rows_of(plan) for start, size in row for place in range(start, start + size)]
    assert sorted(places) == list(range(sum(lengths)))
    assert all(0 < sum(size for _, size in row) <= 8 for row in rows_of(plan))


@pytest.mark.parametrize("packing", ["best_fit", "concat", "none"])
def test_a_piece_never_crosses_a_document(packing):
    lengths = [5, 17, 1, 8, 3, 40, 8]
    edges = edges_of(lengths)
    plan = plan_rows(edges, 8, packing)
    first, last = plan.starts, plan.starts + plan.lengths - 1
    assert np.array_equal(np.searchsorted(edges, first, "right"), np.searchsorted(edges, last, "right"))


def test_ten_thousand_lognormal_documents_fill_99_3_percent_with_none_cut_that_fits():
    lengths = lognormal(10_000)
    edges = edges_of(lengths)
    plan = plan_rows(edges, 2048, "best_fit")
    assert plan.fill >= 0.993
    short = lengths <= 2048
    whole = set(zip(edges[:-1][short].tolist(), lengths[short].tolist(), strict=True))
    assert whole <= set(zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True))


def test_a_longer_document_is_cut_into_full_pieces_and_one_tail():
    plan = plan_rows(edges_of([21]), 8, "best_fit")
    assert sorted(plan.lengths.tolist()) == [5, 8, 8]


@pytest.mark.parametrize(("count", "capacity"), [(300, 64), (500, 1000), (200, 7)])
def test_the_plan_is_as_tight_as_textbook_best_fit_decreasing(count, capacity):
    lengths = np.minimum(lognormal(count, median=capacity / 4), capacity)
    plan = plan_rows(edges_of(lengths), capacity, "best_fit")
    free = sorted(capacity - sum(size for _, size in row) for row in rows_of(plan))
    assert free == best_fit_decreasing(lengths.tolist(), capacity)


def test_rows_and_their_pieces_are_in_the_order_of_the_documents():
    plan = plan_rows(edges_of(lognormal(500)), 2048, "best_fit")
    rows = rows_of(plan)
    assert all(row == sorted(row) for row in rows)
    heads = [row[0] for row in rows]
    assert heads == sorted(heads)


def test_concat_fills_all_rows_but_the_last():
    plan = plan_rows(edges_of([5, 9, 7]), 8, "concat")
    assert rows_of(plan) == [[(0, 5), (5, 3)], [(8, 6), (14, 2)], [(16, 5)]]


def test_none_gives_one_document_a_row():
    plan = plan_rows(edges_of([5, 9, 0, 7]), 8, "none")
    assert rows_of(plan) == [[(0, 5)], [(5, 8)], [(13, 1)], [(14, 7)]]


def test_a_million_documents_are_planned_in_seconds():
    plan = plan_rows(
        edges_of(lognormal(1_000_000)), 2048, "best_fit"
    )  # about 0.5 s; the suite's time limit is the check
    assert plan.fill > 0.999


@pytest.mark.parametrize(
    ("lengths", "fraction", "cut"),
    [
        ([100], 0.1, 90),  # one document: inside it
        ([10] * 10, 0.1, 90),  # at a boundary
        ([10] * 9 + [12], 0.1, 90),  # at the nearest boundary: 12 of 102 tokens
        ([50, 50], 0.1, 90),  # no boundary is near: 50 would be five times what was asked for
        ([3, 90, 7], 0.1, 93),
        ([100, 0, 0], 0.1, 90),
    ],
)
def test_the_held_out_part_is_the_end_and_overlaps_nothing(lengths, fraction, cut):
    first, last = split_edges(edges_of(lengths), fraction)
    assert (first[0], first[-1], last[0], last[-1]) == (0, cut, cut, sum(lengths))
    assert set(first.tolist()) | set(last.tolist()) == set(edges_of(lengths).tolist()) | {cut}
