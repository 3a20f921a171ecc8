import numpy as np
import pytest

from jtrain.data.order import Mixture, key64, permute


@pytest.mark.parametrize("size", [1, 2, 3, 100, 4096, 4097, 10_000, 65_536])
def test_a_permutation_holds_every_item_once(size):
    assert np.array_equal(np.sort(permute(np.arange(size), size, key64(1))), np.arange(size))


@pytest.mark.parametrize("size", [100, 10_000])
def test_an_item_of_a_permutation_does_not_depend_on_what_else_is_asked_for(size):
    whole = permute(np.arange(size), size, 7)
    places = np.asarray([5, 0, size - 1, 5])
    assert np.array_equal(permute(places, size, 7), whole[places])


@pytest.mark.parametrize("size", [1000, 10_000])
def test_another_key_gives_another_order(size):
    first, second = (permute(np.arange(size), size, key64(1, epoch)) for epoch in (0, 1))
    # Two random permutations agree in one place on average.
    assert (first == second).sum() < 10


@pytest.mark.parametrize("size", [3000, 5000])
def test_a_permutation_looks_random(size):
    order = permute(np.arange(size), size, key64(11))
    # Neighbours of a random permutation: |difference| is n/3 on average, correlation 0 +- 1/sqrt(n).
    assert abs(np.abs(np.diff(order)).mean() / size - 1 / 3) < 0.02
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 4 / np.sqrt(size)
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 4 / np.sqrt(size)


def test_the_order_never_changes_under_a_run_that_is_resumed_by_a_later_version():
    assert permute(np.arange(6), 6, key64(42, 0)).tolist() == _SMALL
    assert permute(np.arange(4), 100_000, key64(42, 0)).tolist() == _LARGE


def test_every_part_of_a_key_counts():
    keys = {key64(), key64(0), key64(1), key64(0, 0), key64(0, 1), key64(1, 0), key64(2**64), key64(-1)}
    assert len(keys) == 7  # 2**64 is 0 in 64 bits


@pytest.mark.parametrize("weights", [(1.0,), (3.0, 1.0), (0.7, 0.2, 0.1), (5.0, 1e-3, 5.0, 2.0)])
def test_a_mixture_gives_each_source_its_share_of_every_stretch(weights):
    source, _ = Mixture(weights).locate(np.arange(20_000))
    shares = np.asarray(weights) / sum(weights)
    counts = np.cumsum(source[:, None] == np.arange(len(weights)), axis=0)
    wanted = (np.arange(20_000)[:, None] + 1) * shares
    assert np.abs(counts - wanted).max() <= len(weights)


def test_a_source_of_next_to_no_weight_is_read_in_the_end():
    source, _ = Mixture((1e-12, 1.0)).locate(np.asarray([0, 2**26 - 1, 2**26]))
    assert source.tolist() == [1, 0, 1]


def test_a_mixture_reads_each_source_in_turn_without_gaps():
    source, place = Mixture((0.5, 0.3, 0.2)).locate(np.arange(5000))
    for number in range(3):
        mine = place[source == number]
        assert np.array_equal(mine, np.arange(len(mine)))


def test_a_mixture_answers_at_random_access():
    mixture = Mixture((0.5, 0.3, 0.2))
    source, place = mixture.locate(np.arange(1000))
    some = np.asarray([999, 3, 500])
    assert np.array_equal(mixture.locate(some)[0], source[some])
    assert np.array_equal(mixture.locate(some)[1], place[some])


# Written down from this code on the day it was first used: a change of the order is a change of every run's data.
_SMALL = [2, 5, 4, 1, 0, 3]
_LARGE = [2184, 61558, 39521, 61651]
